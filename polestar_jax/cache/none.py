"""No cache: every pass computes everything."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import Distribution, attend, measure
from polestar_jax.cache.base import Cache, drifted, nowhere, row_reads, wanted_reads
from polestar_jax.decode.policy import Wanted
from polestar_jax.decode.rows import every_row
from polestar_jax.decode.state import FULL_ENTRY, STEP, DecodeState, Pass
from polestar_jax.models.attention import as_keys, as_values
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class NoCache(Cache):
    """Every row is computed in every pass; nothing is kept but, for rules that go by drift, what the span's rows attend to.

    The head reads the span's rows alone unless the commit rule wants more.
    """

    gives = frozenset({"drift", "attention", "every", "canvas"})

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> Any:
        previous = nowhere(spec, wanted, state)
        return () if previous is None else previous

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        shift, needs = model.spec.logit_shift, wanted.needs
        drift = attention = None
        own = state.cache
        if needs.drift or needs.attention:
            rows, drift, attention, own = _watched(model, wanted, state)
        else:
            rows = model(state.tokens, state.positions, state.valid)
        if needs.rows == "canvas":
            target = row_reads(every_row(state), state, shift)
        else:
            column, target = wanted_reads(wanted, state, shift)
            rows = jnp.take_along_axis(rows, column[..., None], axis=1)
        kind = jnp.where(state.entering, FULL_ENTRY, STEP)
        computed = jnp.sum(state.positions >= 0, axis=-1)
        return Pass(rows, target, kind, jnp.ones_like(state.done), computed, own, drift, attention)


def _watched(
    model: Denoiser, wanted: Wanted, state: DecodeState
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Any]:
    """A full pass: its rows, their drift and attention as far as they are wanted, and what is kept."""
    spec, positions = model.spec, state.positions
    rest = dict(q_positions=positions, k_positions=positions, theta=spec.rope_theta, valid=state.valid)
    x, maps = model.embed(state.tokens), []
    for i, layer in enumerate(model.layers):
        q, k, v = layer.project(x)
        k, v = as_keys(k), as_values(v)
        if i >= len(model.layers) - wanted.needs.attention:
            maps.append(_head_mean(measure(q, k, **rest).distribution))
        x = layer.finish(x, attend(q, k, v, **rest))
    attention = sum(maps) / len(maps) if maps else None
    if not wanted.needs.drift:
        return x, None, attention, state.cache
    drift, own = drifted(spec, wanted, state, every_row(state), q, k, state.cache)
    return x, drift, attention, own


def _head_mean(seen: Distribution) -> jax.Array:
    """The probabilities of a distribution [b, h, r, n], mean over the heads."""
    return jnp.mean(jnp.exp(seen.scores - seen.lse[..., None]), axis=1)
