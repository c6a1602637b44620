"""Elastic-Cache (arXiv 2510.14973): a sliding window of rows is computed, and where attention drifts every row from there on up.

A pass computes the window, the tokens that the last pass decided, and a few *tracked* ones: the decided tokens that each layer's
window attended to most. Where what a layer's tracked tokens attend to no longer resembles what it was, the layers above it
compute every row, from what they were last given at each.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import attend, measure
from polestar_jax.cache.base import KV, Cache, live_rows, nothing_cached
from polestar_jax.decode.policy import Plan, Wanted
from polestar_jax.decode.rows import KEYS, VALUES, Picked, picked
from polestar_jax.decode.state import FULL_ENTRY, REFRESH_STEP, STEP, DecodeState, Pass, kept
from polestar_jax.errors import InputError
from polestar_jax.models.attention import as_keys, as_values
from polestar_jax.models.denoiser import Block, Denoiser
from polestar_jax.spec import ModelSpec

ENTRY = "entry"
AXES = ("keys", "heads")
SMALLEST = 1e-8  # the least norm that a cosine divides by


class ElasticLayer(NamedTuple):
    """What is kept of a layer. Queries are not: the layer's inputs give them again.

    Attributes:
      kv: keys and values of every column.
      x: what the layer was last given at each column, [b, n, d] in the model's dtype.
      tracked: the decided columns that the window attended to most, [b, r].
    """

    kv: KV
    x: jax.Array
    tracked: Picked


class _Frame(NamedTuple):
    """What is the same at every layer of a pass.

    Attributes:
      state: the state before the pass.
      window: the window's rows [b, w].
      rows: the rows of a layer that does not compute all, [b, m].
      place: where each column is among them, i32 [b, n]; 0 where it is not.
      theta: rotary base.
    """

    state: DecodeState
    window: Picked
    rows: Picked
    place: jax.Array
    theta: float

    @property
    def keys(self) -> dict[str, jax.Array | float]:
        """What attention is told of the keys."""
        return dict(k_positions=self.state.positions, theta=self.theta, valid=self.state.valid)

    def at(self, values: jax.Array, columns: jax.Array) -> jax.Array:
        """Values [b, m, ...] of the rows, at columns i32 [b, r] that are among theirs."""
        place = jnp.take_along_axis(self.place, columns, axis=1)
        return jnp.take_along_axis(values, place.reshape(*place.shape, *[1] * (values.ndim - 2)), axis=1)

    def attended(self, q: jax.Array, k: jax.Array, columns: jax.Array) -> jax.Array:
        """What queries [b, r, h, e] of rows at columns i32 [b, r] attend to: probabilities f32 [b, h, r, n]."""
        positions = jnp.take_along_axis(self.state.positions, columns, axis=1)
        return jnp.exp(measure(q, k, q_positions=positions, **self.keys).distribution.log_probabilities)


class _Flow(NamedTuple):
    """What a layer hands to the next one.

    Attributes:
      x: the rows [b, m, d].
      wide: every row [b, n, d], of sequences that the layer computed at full width.
      was_wide, is_wide: which these are, and which the next layer computes so, bool [b].
    """

    x: jax.Array
    wide: jax.Array
    was_wide: jax.Array
    is_wide: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticCache(Cache):
    """Every row in the first pass; then the window's, the new and the tracked ones, and every row above a layer that drifted.

    The window is the first undecided positions of the span; for Dream, the rows before them. In a batch a layer is computed at
    full width when any sequence needs it; of the others only the rows that they would have computed alone are kept.

    Attributes:
      sliding_window: positions of the window, the only ones that are scored.
      gamma: a layer has drifted when the mean cosine between what its tracked tokens attended to and what they attend to now is
        less; above 1: always, 0: never.
      tracked: tracked tokens a layer.
      sim_axis: what a cosine is taken across: "keys" (averaged over heads) or "heads" (averaged over keys).

    Raises:
      InputError: an unknown sim_axis.
    """

    sliding_window: int = 32
    gamma: float = 0.9
    tracked: int = 1
    sim_axis: str = AXES[0]

    plans = (Plan(ENTRY), Plan("step"))

    def __post_init__(self):
        if self.sim_axis not in AXES:
            raise InputError(f"sim_axis {self.sim_axis!r} is not accepted: {' | '.join(AXES)}")

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> tuple[ElasticLayer, ...]:
        b, n = state.tokens.shape
        shape = b, min(self.tracked, n)
        return tuple(
            ElasticLayer(
                kv, jnp.zeros((b, n, spec.d_model), dtype), Picked(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
            )
            for kv in nothing_cached(spec, wanted, state, dtype).layers
        )

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return jnp.where(state.nfe == 0, 0, 1)

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        spec, entry, (b, n) = model.spec, plan == ENTRY, state.tokens.shape
        window, target = self.window(wanted, state, spec)
        rows = window if entry else self.chosen(window, state)
        place = rows.put(
            jnp.zeros((b, n), jnp.int32), jnp.broadcast_to(jnp.arange(rows.live.shape[1]), rows.live.shape)
        )
        frame = _Frame(state, window, rows, place, spec.rope_theta)
        wide = model.embed(state.tokens) if entry else state.cache[0].x
        all_wide = state.active & entry
        flow, layers, widths = _Flow(model.embed(rows.take(state.tokens)), wide, all_wide, all_wide), [], []
        for i, (layer, old) in enumerate(zip(model.layers, state.cache, strict=True)):
            widths.append(flow.is_wide)
            # The first layer's inputs are embeddings: none of them is stale.
            flow, new = self.layer(layer, old, flow, frame, spec, width=entry if entry or not i else None)
            layers.append(new)
        widths = jnp.stack(widths)
        refreshed = jnp.where(jnp.any(widths, axis=0), REFRESH_STEP, STEP)
        counts = jnp.where(widths, jnp.sum(state.positions >= 0, axis=-1), live_rows(rows, state))
        return Pass(
            rows=frame.at(flow.x, window.columns),
            targets=target,
            kind=jnp.full(refreshed.shape, FULL_ENTRY) if entry else refreshed,
            full=jnp.full(refreshed.shape, entry),
            computed=jnp.mean(counts.astype(jnp.float32), axis=0),
            cache=tuple(layers),
        )

    def window(self, wanted: Wanted, state: DecodeState, spec: ModelSpec) -> tuple[Picked, jax.Array]:
        """The window's rows, of the sequences in the pass, and the positions that they score, i32 [b, w], G where none."""
        open_ = (state.generated == spec.mask_id) & state.in_span & state.active[:, None]
        place = picked(open_, min(self.sliding_window, wanted.capacity))
        target = jnp.where(place.live, place.columns, state.gen_length)
        return place._replace(columns=state.prompt_columns + place.columns - spec.logit_shift), target

    def chosen(self, window: Picked, state: DecodeState) -> Picked:
        """The window's rows, those of the tokens that the last pass decided, and every layer's tracked ones."""
        chosen = jnp.pad(state.committed_at == state.nfe[:, None] - 1, ((0, 0), (state.prompt_columns, 0)))
        for some in (window, *(layer.tracked for layer in state.cache)):
            chosen = some.put(chosen, some.live)
        capacity = 2 * window.live.shape[1] + len(state.cache) * self.tracked
        return picked(chosen & state.active[:, None], min(capacity, chosen.shape[1]))

    def layer(
        self, layer: Block, old: ElasticLayer, flow: _Flow, frame: _Frame, spec: ModelSpec, *, width: bool | None
    ) -> tuple[_Flow, ElasticLayer]:
        """One layer, at full ``width``, at that of the rows, or as the sequences need it: what it hands on and what is kept."""
        state, rows, window = frame.state, frame.rows, frame.window
        m, w, n = rows.live.shape[1], window.live.shape[1], state.tokens.shape[1]
        known, before = rows.put(old.x, flow.x), old.tracked.take(old.x)

        def narrow() -> tuple[jax.Array, ...]:
            q, k, v = layer.project(jnp.concatenate([flow.x, before], axis=1))
            k = rows.write(old.kv.k, k[:, :m], rows.live, KEYS)
            v = rows.write(old.kv.v, v[:, :m], rows.live, VALUES)
            heads = attend(q[:, :m], k, v, q_positions=rows.take(state.positions), **frame.keys)
            return layer.finish(flow.x, heads), flow.wide, known, q[:, :m], q[:, m:], k, v

        def full() -> tuple[jax.Array, ...]:
            x = jnp.where(flow.was_wide[:, None, None], flow.wide, known)
            q, k, v = layer.project(jnp.concatenate([x, before], axis=1))
            here = rows.put(jnp.broadcast_to(flow.is_wide[:, None], state.tokens.shape), rows.live)
            k = jnp.where(here[:, None, :, None], as_keys(k[:, :n]), old.kv.k)
            v = jnp.where(here[:, None, None, :], as_values(v[:, :n]), old.kv.v)
            wide = layer.finish(x, attend(q[:, :n], k, v, q_positions=state.positions, **frame.keys))
            return rows.take(wide), wide, x, rows.take(q), q[:, n:], k, v

        run = lax.cond(jnp.any(flow.is_wide), full, narrow) if width is None else full() if width else narrow()
        x, wide, known, q, q_before, k, v = run
        columns = jnp.concatenate([window.columns, old.tracked.columns], axis=1)
        seen = frame.attended(frame.at(q, columns), k, columns)
        seen_before = frame.attended(q_before, old.kv.k, old.tracked.columns)
        alike = self.alike(seen_before, seen[:, :, w:], old.tracked.live, state.valid)
        is_wide = flow.is_wide | (state.active & (alike < self.gamma))
        weight = jnp.sum(seen[:, :, :w] * window.live[:, None, :, None], axis=(1, 2))
        decided = jnp.pad(state.generated != spec.mask_id, ((0, 0), (state.prompt_columns, 0)), constant_values=True)
        tracked = picked(decided & state.valid, self.tracked, weight)
        kept_ = ElasticLayer(KV(k, v), known, kept(state.active, tracked, old.tracked))
        return _Flow(x, wide, flow.is_wide, is_wide), kept_

    def alike(self, before: jax.Array, now: jax.Array, live: jax.Array, valid: jax.Array) -> jax.Array:
        """Mean cosine of what rows attended to and attend to, f32 [b].

        Args:
          before, now: probabilities f32 [b, h, r, n].
          live: bool [b, r], rows that count.
          valid: bool [b, n], keys that count, if the cosine is across heads.
        """
        axis = 3 if self.sim_axis == "keys" else 1
        norm = lambda x: jnp.maximum(jnp.sqrt(jnp.sum(x * x, axis=axis)), SMALLEST)  # noqa: E731
        cosine = jnp.sum(before * now, axis=axis) / (norm(before) * norm(now))
        counted = live[:, None, :] if axis == 3 else live[:, :, None] & valid[:, None, :]
        counted = jnp.broadcast_to(counted, cosine.shape)
        return jnp.sum(cosine * counted, axis=(1, 2)) / jnp.maximum(jnp.sum(counted, axis=(1, 2)), 1)
