"""dKV-Cache, decode variant (arXiv 2505.15781): a token's keys and values are kept one pass after it was decided."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.cache.base import Cache, Cached, computed, live_rows, nothing_cached, scored_rows
from polestar_jax.decode.policy import Plan, Wanted
from polestar_jax.decode.rows import every_row, picked
from polestar_jax.decode.state import FULL_ENTRY, REFRESH_STEP, STEP, DecodeState, Pass
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec

FULL = "full"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedCache(Cache):
    """Every row in the first two passes over a block and in every ``refresh_every``-th after; else those of all undecided
    positions (with the row before each where rows score the next position) and of the tokens that the last pass decided.

    The fewer they are the fewer rows are computed: of a few static numbers, each half of the one before, the smallest that
    holds them.

    Attributes:
      gen_length: G.
      block_length: the longest span that the schedule gives.
      refresh_every: passes, counted in a block; 1: every row in every pass.
    """

    gen_length: int
    block_length: int
    refresh_every: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows that a pass may have, the largest first; one more is for the row before the generation."""
        sizes = [self.gen_length + 1]
        while sizes[-1] // 2 >= self.block_length:
            sizes.append(-(-sizes[-1] // 2))
        return tuple(sizes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        names = [str(size) for size in self.sizes]
        return (Plan(FULL), *(Plan(name, also=tuple(names[i + 1 :])) for i, name in enumerate(names)))

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> Cached:
        return nothing_cached(spec, wanted, state, dtype)

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        count = jnp.sum(self.chosen(state, spec.logit_shift), axis=-1)
        smallest = jnp.sum(count[:, None] <= jnp.array(self.sizes)[None], axis=-1)
        full = (state.span_passes < 2) | (state.span_passes % self.refresh_every == 0)
        return jnp.where(full, 0, smallest)

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        shift, full = model.spec.logit_shift, plan == FULL
        rows = every_row(state) if full else picked(self.chosen(state, shift), min(int(plan), state.tokens.shape[1]))
        x, layers, _ = computed(model, state, state.cache.layers, rows)
        x, target = scored_rows(x, rows, wanted, state, shift, full=full)
        kind = jnp.where(state.entering, FULL_ENTRY, REFRESH_STEP) if full else jnp.full(state.done.shape, STEP)
        own = state.cache._replace(layers=layers)
        return Pass(x, target, kind, jnp.full(state.done.shape, full), live_rows(rows, state), own)

    def chosen(self, state: DecodeState, shift: int) -> jax.Array:
        """The columns of a pass that does not compute all, bool [b, n]."""
        open_ = state.committed_at < 0
        prompt = jnp.zeros((open_.shape[0], state.prompt_columns), bool)
        chosen = jnp.concatenate([prompt, open_ | (state.committed_at == state.nfe[:, None] - 1)], axis=1)
        if shift:
            chosen = chosen | jnp.roll(jnp.concatenate([prompt, open_], axis=1), -1, axis=1)
        return chosen
