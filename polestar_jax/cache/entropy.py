"""EntropyCache (arXiv 2603.18489): every row is computed after a commit from an uncertain distribution, else few are."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from polestar_jax.cache.base import KV, Cache, computed, live_rows, nothing_cached, scored_rows
from polestar_jax.decode.policy import Plan, Wanted
from polestar_jax.decode.rows import Picked, every_row, picked
from polestar_jax.decode.state import FULL_ENTRY, LOCAL_ENTRY, REFRESH_STEP, STEP, DecodeState, Pass, Scores
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec

FULL, PARTIAL = "full", "partial"


class EntropyState(NamedTuple):
    """Keys and values of every layer, and the largest entropy, f32 [b] in nats, that the last pass committed from."""

    layers: tuple[KV, ...]
    entropy: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyCache(Cache):
    """Every row is computed when the last pass committed a token from a distribution of more than ``entropy_threshold``; else
    those committed last and the undecided ones of the span (with the row before each where rows score the next position).

    Attributes:
      block_length: the longest span that the schedule gives.
      entropy_threshold: nats; below 0: every row in every pass.
      recent: how many of the positions committed last are computed.
      entry_full: whether a block's entry computes every row.
    """

    block_length: int
    entropy_threshold: float
    recent: int
    entry_full: bool = False

    plans = (Plan(FULL), Plan(PARTIAL))

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> EntropyState:
        layers = nothing_cached(spec, wanted, state, dtype).layers
        return EntropyState(layers, jnp.full(state.tokens.shape[0], jnp.inf, jnp.float32))

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        uncertain = state.cache.entropy[: state.nfe.shape[0]] > self.entropy_threshold
        full = (uncertain | state.entering) if self.entry_full else uncertain
        return jnp.where(full | (state.nfe == 0), 0, 1)

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        shift, full = model.spec.logit_shift, plan == FULL
        rows = every_row(state) if full else self.chosen(state, shift)
        x, layers, _ = computed(model, state, state.cache.layers, rows)
        x, target = scored_rows(x, rows, wanted, state, shift, full=full)
        entry, step = (FULL_ENTRY, REFRESH_STEP) if full else (LOCAL_ENTRY, STEP)
        kind = jnp.where(state.entering, entry, step)
        own = EntropyState(layers, state.cache.entropy)
        return Pass(x, target, kind, jnp.full(state.done.shape, full), live_rows(rows, state), own)

    def chosen(self, state: DecodeState, shift: int) -> Picked:
        """The rows of a partial pass."""
        b, p = state.tokens.shape[0], state.prompt_columns
        open_ = state.in_span & (state.committed_at < 0)
        last = picked(state.committed_at >= 0, self.recent, state.committed_at.astype(jnp.float32))
        chosen = open_ | last.put(jnp.zeros_like(open_), jnp.ones_like(last.live))
        chosen = jnp.concatenate([jnp.zeros((b, p), bool), chosen], axis=1)
        if shift:
            before = jnp.concatenate([jnp.zeros((b, p), bool), open_], axis=1)
            chosen = chosen | jnp.roll(before, -1, axis=1)
        return picked(chosen, min(self.recent + self.block_length + shift, chosen.shape[1]))

    def observe(self, own: EntropyState, scores: Scores, accept: jax.Array, state: DecodeState) -> EntropyState:
        entropy = jnp.max(jnp.where(accept, -scores.neg_entropy, -jnp.inf), axis=-1)
        return own._replace(entropy=jnp.where(state.active, entropy, own.entropy))
