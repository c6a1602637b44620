"""What cache policies have in common: defaults, keys and values of every column, and what the last layer attends to."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention import Distribution, attend, measure
from polestar_jax.decode.policy import CachePolicy, Plan, Wanted
from polestar_jax.decode.rows import KEYS, VALUES, Picked, Rows, block_rows
from polestar_jax.decode.state import DecodeState, Scores, by_position, kept
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec


class Cache:
    """Defaults of a policy: one plan for every pass, nothing beside the span's scores, nothing learnt from commits."""

    plans: tuple[Plan, ...] = (Plan("pass"),)
    gives: frozenset[str] = frozenset()

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return jnp.zeros_like(state.nfe)

    def observe(self, own: Any, scores: Scores, accept: jax.Array, state: DecodeState) -> Any:
        return own


class Wrapping(Cache):
    """A policy around another, ``inside``, whose plans it has and whose needs it meets."""

    inside: CachePolicy

    @property
    def plans(self) -> tuple[Plan, ...]:
        return self.inside.plans

    @property
    def gives(self) -> frozenset[str]:
        return self.inside.gives

    @property
    def block_length(self) -> int | None:
        return getattr(self.inside, "block_length", None)


class KV(NamedTuple):
    """One layer's keys [b, g, n, e], before rotation, and values [b, g, e, n] of every canvas column, in the model's dtype."""

    k: jax.Array
    v: jax.Array


class Cached(NamedTuple):
    """Keys and values of every layer, and the last layer's attention of the span's rows [b, h, B + shift, n] in the previous
    pass, or None where the commit rule does not go by drift."""

    layers: tuple[KV, ...]
    attention: Distribution | None


def nothing_cached(spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> Cached:
    """Zeros: an entry fills everything before it is read."""
    b, n = state.tokens.shape
    g, e = spec.n_kv_heads, spec.head_dim
    layers = tuple(KV(jnp.zeros((b, g, n, e), dtype), jnp.zeros((b, g, e, n), dtype)) for _ in range(spec.n_layers))
    return Cached(layers, nowhere(spec, wanted, state))


def nowhere(spec: ModelSpec, wanted: Wanted, state: DecodeState) -> Distribution | None:
    """The attention before the first pass, if drift is wanted."""
    if not wanted.needs.drift:
        return None
    b, n = state.tokens.shape
    shape = (b, spec.n_heads, wanted.capacity + spec.logit_shift)
    return Distribution(jnp.zeros((*shape, n), jnp.float32), jnp.zeros(shape, jnp.float32))


def computed(
    model: Denoiser, state: DecodeState, cache: tuple[KV, ...], rows: Rows | Picked
) -> tuple[jax.Array, tuple[KV, ...], jax.Array]:
    """The last-layer states of some rows [b, r, d], the cache with their keys and values for the sequences in the pass, and
    the last layer's queries [b, r, h, e].

    What is computed is written before it is attended to: these rows see each other as they are now.
    """
    spec, canvas = model.spec, state.positions
    positions, valid = rows.take(canvas), state.valid
    where = jnp.broadcast_to(state.active[:, None], rows.live.shape)
    x, new = model.embed(rows.take(state.tokens)), []
    for layer, old in zip(model.layers, cache, strict=True):
        q, k, v = layer.project(x)
        k, v = rows.write(old.k, k, where, KEYS), rows.write(old.v, v, where, VALUES)
        heads = attend(q, k, v, q_positions=positions, k_positions=canvas, theta=spec.rope_theta, valid=valid)
        x = layer.finish(x, heads)
        new.append(KV(k, v))
    return x, tuple(new), q


def drifted(
    spec: ModelSpec, wanted: Wanted, state: DecodeState, rows: Rows, q: jax.Array, k: jax.Array, previous: Distribution
) -> tuple[jax.Array, Distribution]:
    """The drift of the span's positions since the previous pass, f32 [b, G], NaN at an entry and elsewhere; and what they attend
    to now (paper section 4.2.1).

    ``q`` [b, r, h, e] are the last layer's queries of consecutive ``rows`` that hold the span's, ``k`` its keys.
    """
    block = block_rows(state, wanted.capacity, spec.logit_shift)
    here = jnp.clip(block.columns - rows.columns[:, :1], 0, q.shape[1] - 1)
    q = jnp.take_along_axis(q, here[..., None, None], axis=1)
    seen = measure(
        q, k, previous=previous, q_positions=block.take(state.positions), k_positions=state.positions,
        theta=spec.rope_theta, valid=state.valid,
    )  # fmt: skip
    drift = by_position(
        seen.drift[:, spec.logit_shift :], state.span_targets(wanted.capacity), state.gen_length, jnp.nan
    )
    return jnp.where(state.entering[:, None], jnp.nan, drift), kept(state.active, seen.distribution, previous)


def span_reads(wanted: Wanted, state: DecodeState, shift: int) -> tuple[jax.Array, jax.Array]:
    """Canvas columns whose rows score the span, and the positions they score, each i32 [b, B].

    Row i scores position i + shift, so a span's first position is read from the column before it (Dream).
    """
    column = state.prompt_columns + state.span_start[:, None] + jnp.arange(wanted.capacity)[None] - shift
    return jnp.minimum(column, state.tokens.shape[1] - 1), state.span_targets(wanted.capacity)


def every_read(state: DecodeState, shift: int) -> tuple[jax.Array, jax.Array]:
    """The same of all generated positions, each i32 [b, G]."""
    target = jnp.broadcast_to(jnp.arange(state.gen_length, dtype=jnp.int32), state.reason.shape)
    return state.prompt_columns + target - shift, target


def wanted_reads(wanted: Wanted, state: DecodeState, shift: int) -> tuple[jax.Array, jax.Array]:
    """The same of what a pass over every row scores: the span, or all generated positions where the commit rule wants more."""
    return span_reads(wanted, state, shift) if wanted.needs.rows == "span" else every_read(state, shift)


def scored_rows(
    x: jax.Array, rows: Rows | Picked, wanted: Wanted, state: DecodeState, shift: int, *, full: bool
) -> tuple[jax.Array, jax.Array]:
    """Of a pass's states x [b, r, d] those to score and their positions: of every row the wanted ones, of picked rows all."""
    if not full:
        return x, row_reads(rows, state, shift)
    read, target = wanted_reads(wanted, state, shift)
    return jnp.take_along_axis(x, read[..., None], axis=1), target


def row_reads(rows: Rows | Picked, state: DecodeState, shift: int) -> jax.Array:
    """The position that each of these rows scores, i32 [b, r], G where none."""
    target = rows.columns - state.prompt_columns + shift
    there = rows.live & (target >= 0) & (target < state.gen_length)
    return jnp.where(there, target, state.gen_length)


def live_rows(rows: Rows | Picked, state: DecodeState) -> jax.Array:
    """How many of these rows there are, i32 [b]; the canvas' padding does not count."""
    return jnp.sum(rows.live & (rows.take(state.positions) >= 0), axis=-1)
