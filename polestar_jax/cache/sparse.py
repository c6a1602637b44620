"""Sparse-dLLM (arXiv 2508.02558): within a block, only the most important keys and values outside it are kept."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention import attend, measure
from polestar_jax.cache.base import Cache, live_rows, span_reads, wanted_reads
from polestar_jax.decode.policy import Plan, Wanted
from polestar_jax.decode.rows import block_rows, every_row, picked
from polestar_jax.decode.state import FULL_ENTRY, STEP, DecodeState, Pass, kept
from polestar_jax.errors import InputError
from polestar_jax.models.attention import as_keys, as_values
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec

ENTRY = "entry"


class Few(NamedTuple):
    """One layer's kept keys [b, g, c, e], before rotation, and values [b, g, e, c] in the model's dtype; their canvas columns i32
    [b, c], the most important first; and which of them there are, bool [b, c]."""

    k: jax.Array
    v: jax.Array
    columns: jax.Array
    live: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCache(Cache):
    """Every row in the first two passes over a block, the second of which leaves the cache; then the block's rows alone, which
    see each other and what is kept. Nothing else is written, and the next block starts anew.

    Each layer keeps its own columns, the same for all heads: those with the largest attention scores of the block's rows, mean
    over these and over heads, of which each column takes the maximum over its neighbourhood. Neighbours are counted with the
    block cut out. With a logit shift the row before the block is computed with it, as a part of it: it is not among the others.

    Attributes:
      block_length: the longest span that the schedule gives.
      keep_ratio: the share of the columns outside the block to keep, rounded down to whole columns.
      pool_width: columns of a neighbourhood, an odd number.

    Raises:
      InputError: a share outside 0..1, or an even width.
    """

    block_length: int
    keep_ratio: float
    pool_width: int

    plans = (Plan(ENTRY), Plan("step"))

    def __post_init__(self):
        if not 0 <= self.keep_ratio <= 1:
            raise InputError(f"keep_ratio {self.keep_ratio} is not accepted: a number >= 0 and <= 1")
        if self.pool_width < 1 or self.pool_width % 2 == 0:
            raise InputError(f"pool_width {self.pool_width} is not accepted: an odd number >= 1")

    def counts(self, columns: int) -> np.ndarray:
        """How many of 0, 1, ... ``columns`` columns are kept, i32 [columns + 1]."""
        # 0.29 of 100 are 29, which binary fractions miss.
        return np.floor(self.keep_ratio * np.arange(columns + 1) + 1e-9).astype(np.int32)

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> tuple[Few, ...]:
        b, n = state.tokens.shape
        g, e, c = spec.n_kv_heads, spec.head_dim, int(self.counts(n)[-1])
        nothing = Few(
            jnp.zeros((b, g, c, e), dtype), jnp.zeros((b, g, e, c), dtype), jnp.zeros((b, c), jnp.int32),
            jnp.zeros((b, c), bool),
        )  # fmt: skip
        return tuple(jax.tree.map(jnp.copy, nothing) for _ in range(spec.n_layers))

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return jnp.where(state.span_passes < 2, 0, 1)

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        shift, entry = model.spec.logit_shift, plan == ENTRY
        rows = every_row(state) if entry else block_rows(state, self.block_length, shift)
        positions = rows.take(state.positions)
        x, own = model.embed(rows.take(state.tokens)), []
        for layer, old in zip(model.layers, state.cache, strict=True):
            projected = layer.project(x)
            k, v, at, valid = as_keys(projected.k), as_values(projected.v), state.positions, state.valid
            if entry:
                own.append(kept(state.active, self.sifted(model.spec, state, projected.q, k, v), old))
            else:
                k, v = jnp.concatenate([old.k, k], axis=2), jnp.concatenate([old.v, v], axis=3)
                at = jnp.concatenate([jnp.take_along_axis(at, old.columns, axis=1), positions], axis=1)
                valid = jnp.concatenate([old.live, rows.live & rows.take(valid)], axis=1)
                own.append(old)
            heads = attend(
                projected.q, k, v, q_positions=positions, k_positions=at, theta=model.spec.rope_theta, valid=valid
            )
            x = layer.finish(x, heads)
        read, target = wanted_reads(wanted, state, shift) if entry else span_reads(wanted, state, shift)
        here = jnp.clip(read - rows.columns[:, :1], 0, x.shape[1] - 1)  # of rows that are consecutive
        x = jnp.take_along_axis(x, here[..., None], axis=1)
        kind, full = jnp.int32(FULL_ENTRY if entry else STEP), jnp.bool_(entry)
        kind, full = (jnp.broadcast_to(value, state.done.shape) for value in (kind, full))
        return Pass(x, target, kind, full, live_rows(rows, state), tuple(own))

    def sifted(self, spec: ModelSpec, state: DecodeState, q: jax.Array, k: jax.Array, v: jax.Array) -> Few:
        """What a layer keeps of queries [b, n, h, e], keys [b, g, n, e] and values [b, g, e, n] of the whole canvas."""
        n = state.tokens.shape[1]
        block = block_rows(state, self.block_length, 0)
        scores = measure(
            block.take(q), k, q_positions=block.take(state.positions), k_positions=state.positions, theta=spec.rope_theta,
            valid=state.valid,
        ).distribution.scores  # fmt: skip
        importance = jnp.mean(jnp.mean(scores, axis=1), axis=1, where=block.live[..., None])
        # The columns without the block, closed up.
        first = (state.prompt_columns + state.span_start - spec.logit_shift)[:, None]
        after = (state.prompt_columns + state.span_end)[:, None]
        column = jnp.arange(n)[None]
        column = jnp.where(column < first, column, column - first + after)
        here = jnp.minimum(column, n - 1)
        outside = (column < n) & jnp.take_along_axis(state.valid, here, axis=1)
        importance = jnp.where(outside, jnp.take_along_axis(importance, here, axis=1), -jnp.inf)
        importance = lax.reduce_window(importance, -jnp.inf, lax.max, (1, self.pool_width), (1, 1), "SAME")
        counts = self.counts(n)
        count = jnp.asarray(counts)[jnp.sum(outside, axis=-1)]
        most = picked(outside, int(counts[-1]), importance)
        columns = jnp.take_along_axis(here, most.columns, axis=1)
        return Few(
            jnp.take_along_axis(k, columns[:, None, :, None], axis=2),
            jnp.take_along_axis(v, columns[:, None, None, :], axis=3),
            columns,
            most.live & (jnp.arange(columns.shape[1])[None] < count[:, None]),
        )
