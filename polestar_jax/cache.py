"""Cache policies: how a forward pass is run and what it leaves for the next one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from polestar_jax.decode.policy import Plan, Schedule
from polestar_jax.decode.state import FULL_ENTRY, STEP, DecodeState, Pass
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec


def scored_rows(schedule: Schedule, state: DecodeState, shift: int) -> tuple[jax.Array, jax.Array]:
    """Canvas columns whose rows score the span, and the positions they score, each i32 [b, B].

    Row i scores position i + shift, so a span's first position is read from the column before it (Dream).
    """
    column = state.prompt_columns + state.span_start[:, None] + jnp.arange(schedule.capacity)[None] - shift
    return jnp.minimum(column, state.tokens.shape[1] - 1), state.span_targets(schedule.capacity)


class Cache:
    """Defaults of a policy: one plan for every pass, no drift."""

    plans: tuple[Plan, ...] = (Plan("pass"),)
    gives_drift: bool = False

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return jnp.zeros_like(state.nfe)


@dataclasses.dataclass(frozen=True)
class NoCache(Cache):
    """Every row is computed in every pass; nothing is kept. The head reads the span's rows alone."""

    def init(self, spec: ModelSpec, state: DecodeState, dtype: jnp.dtype) -> Any:
        return ()

    def forward(self, model: Denoiser, schedule: Schedule, state: DecodeState, plan: str) -> Pass:
        positions = state.positions
        rows = model(state.tokens, positions, positions >= 0)
        column, target = scored_rows(schedule, state, model.spec.logit_shift)
        rows = jnp.take_along_axis(rows, column[..., None], axis=1)
        kind = jnp.where(state.entering, FULL_ENTRY, STEP)
        return Pass(rows, target, kind, jnp.ones_like(state.done), state.cache)
