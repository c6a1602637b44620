"""Fast-dLLM's caches (arXiv 2505.22618): keys and values of every row, computed anew when a block is entered.

Inside a block, ``DualCache`` computes the block's rows alone, ``PrefixCache`` those of the block and all after it. What is
computed is written in place before it is attended to, so that these rows see each other as they are now and the rest as it was
at the entry. Settings of the commit rule are in ``commit``: a threshold, a fixed number a pass, or the factor rule.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention import attend
from polestar_jax.cache import Cache
from polestar_jax.decode.policy import Plan, Schedule
from polestar_jax.decode.rows import KEYS, VALUES, Rows, Run, block_rows, every_row, rows_of
from polestar_jax.decode.state import FULL_ENTRY, STEP, DecodeState, Pass
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec

ENTRY = "entry"
FIRST_TOKENS = ("left_neighbour", "force")


class KV(NamedTuple):
    """One layer's keys [b, g, n, e], before rotation, and values [b, g, e, n] of every canvas column, in the model's dtype."""

    k: jax.Array
    v: jax.Array


def computed(
    model: Denoiser, state: DecodeState, cache: tuple[KV, ...], rows: Rows
) -> tuple[jax.Array, tuple[KV, ...]]:
    """The last-layer states of some rows [b, r, d], and the cache with their keys and values, for the sequences in the pass."""
    spec, canvas = model.spec, state.positions
    positions, valid = rows.take(canvas), canvas >= 0
    where = jnp.broadcast_to(state.active[:, None], rows.live.shape)
    x, new = model.embed(rows.take(state.tokens)), []
    for layer, old in zip(model.layers, cache, strict=True):
        q, k, v = layer.project(x)
        k, v = rows.write(old.k, k, where, KEYS), rows.write(old.v, v, where, VALUES)
        heads = attend(q, k, v, q_positions=positions, k_positions=canvas, theta=spec.rope_theta, valid=valid)
        x = layer.finish(x, heads)
        new.append(KV(k, v))
    return x, tuple(new)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualCache(Cache):
    """Every row at a block's entry, the block's rows inside it.

    Attributes:
      block_length: the longest span that the schedule gives.
      first_token: how a model whose rows score the position after them (Dream) reads a block's first position:
        "left_neighbour": the row before the block is computed with it; "force": as in Fast-dLLM's own Dream decoder, the entry
        decides that position alone, whatever its confidence, and inside the block it is not read again.

    Raises:
      InputError: an unknown first_token.
    """

    block_length: int
    first_token: str = "left_neighbour"

    plans = (Plan(ENTRY), Plan("step"))

    def __post_init__(self):
        if self.first_token not in FIRST_TOKENS:
            raise InputError(f"first_token {self.first_token!r} is not accepted: {' | '.join(FIRST_TOKENS)}")

    def init(self, spec: ModelSpec, state: DecodeState, dtype: jnp.dtype) -> tuple[KV, ...]:
        b, n = state.tokens.shape
        g, e = spec.n_kv_heads, spec.head_dim
        return tuple(KV(jnp.zeros((b, g, n, e), dtype), jnp.zeros((b, g, e, n), dtype)) for _ in range(spec.n_layers))

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return jnp.where(state.entering, 0, 1)

    def forward(self, model: Denoiser, schedule: Schedule, state: DecodeState, plan: str) -> Pass:
        shift = model.spec.logit_shift
        force = bool(shift) and self.first_token == "force"
        entry = plan == ENTRY
        rows = every_row(state) if entry else self.inside(state, plan, 0 if force else shift)
        x, cache = computed(model, state, state.cache, rows)
        target = state.span_targets(self.block_length)
        first = rows.columns[:, :1]  # of rows that are consecutive
        read = state.prompt_columns + state.span_start[:, None] + jnp.arange(self.block_length)[None] - shift
        if force:  # the block's first position at its entry, all others after it
            index = jnp.arange(self.block_length)[None]
            target = jnp.where((index == 0) == entry, target, state.gen_length)
        x = jnp.take_along_axis(x, jnp.clip(read - first, 0, x.shape[1] - 1)[..., None], axis=1)
        kind = jnp.full(state.done.shape, FULL_ENTRY if entry else STEP, jnp.int32)
        return Pass(x, target, kind, jnp.full(state.done.shape, entry), cache)

    def inside(self, state: DecodeState, plan: str, shift: int) -> Rows:
        """The rows of a pass inside a block."""
        return block_rows(state, self.block_length, shift)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCache(DualCache):
    """Every row at a block's entry, those of the block and all after it inside.

    The fewer are left the fewer rows there are to compute: of a few static numbers, each half of the one before, the smallest
    that holds them.

    Attributes:
      gen_length: G.
    """

    gen_length: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Generated rows that a pass inside a block may have, the largest first."""
        sizes = [self.gen_length]
        while sizes[-1] // 2 >= self.block_length:
            sizes.append(-(-sizes[-1] // 2))
        return tuple(sizes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        names = [f"last {size}" for size in self.sizes]
        return (Plan(ENTRY), *(Plan(name, also=tuple(names[i + 1 :])) for i, name in enumerate(names)))

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        left = self.gen_length - state.span_start
        smallest = jnp.sum(left[:, None] <= jnp.array(self.sizes)[None], axis=-1)
        return jnp.where(state.entering, 0, smallest)

    def inside(self, state: DecodeState, plan: str, shift: int) -> Rows:
        b, n = state.tokens.shape
        size = int(plan.removeprefix("last ")) + shift
        column = jnp.broadcast_to(n - size + jnp.arange(size)[None], (b, size))
        live = column >= state.prompt_columns + state.span_start[:, None] - shift
        return rows_of((Run(jnp.full(b, n - size, jnp.int32), live),), n)
