"""d2Cache (arXiv 2509.23094): after one full pass, only promising, new and influential rows are computed, in all layers.

*Promising*: of the undecided positions those with the highest confidence, as last known, times the density of decided positions
around them. *New*: the tokens that the last pass decided. *Influential*: those that the attention of the last pass's rows,
followed through the layers (attention rollout), led to most.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import Distribution, measure
from polestar_jax.cache.base import KV, Cache, every_read, live_rows, nothing_cached, row_reads
from polestar_jax.commit.certainty import check_sigma, density
from polestar_jax.commit.rule import rank
from polestar_jax.decode.policy import Plan, Wanted
from polestar_jax.decode.rows import KEYS, VALUES, Picked, Rows, every_row, picked
from polestar_jax.decode.state import FULL_ENTRY, STEP, DecodeState, Pass, Scores, kept
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec

ENTRY = "entry"


class D2State(NamedTuple):
    """What is kept between passes.

    Attributes:
      layers: keys and values of every column.
      confidence: f32 [b, G], of each undecided position when it was last scored.
      influence: f32 [b, n], what the rollout of the last pass gives each column; they add up to the number of columns.
      waiting: bool [b, G], decided positions whose keys and values are still those of the mask token.
      dropped: i32 [b], rows for which there was no room so far.
    """

    layers: tuple[KV, ...]
    confidence: jax.Array
    influence: jax.Array
    waiting: jax.Array
    dropped: jax.Array


class _Rollout(NamedTuple):
    """Attention followed through the layers below: of the computed rows, f32 [b, r, n]; every other row leads to itself."""

    rows: Rows | Picked
    there: jax.Array  # bool [b, n], the columns of the computed rows
    led: jax.Array

    def through(self, seen: Distribution) -> _Rollout:
        """With one layer more, whose rows attend so and, by the residual connection, as much to themselves."""
        attended = jnp.mean(jnp.exp(seen.log_probabilities), axis=1)
        live = self.rows.live[:, None, :]
        among = jnp.where(live, jnp.take_along_axis(attended, self.rows.columns[:, None, :], axis=2), 0.0)
        onward = jnp.einsum("brs,bsn->brn", among, self.led, precision=lax.Precision.HIGHEST)
        return self._replace(led=0.5 * (onward + jnp.where(self.there[:, None], 0.0, attended) + self.led))

    def total(self, valid: jax.Array) -> jax.Array:
        """What all rows lead to each column, f32 [b, n]."""
        return jnp.sum(jnp.where(self.rows.live[..., None], self.led, 0.0), axis=1) + (valid & ~self.there)


@dataclasses.dataclass(frozen=True, kw_only=True)
class D2Cache(Cache):
    """Every row in the first pass, then a chosen few.

    Beyond ``row_capacity`` the least important are dropped: of the promising all but the best, of the influential, and new ones,
    which wait for the next pass.

    Attributes:
      candidates: k, promising undecided positions.
      influential: p, the share of the influence of the columns not chosen otherwise that is chosen too; at least one of them.
      inflation: gaps of at most so many columns between chosen ones are filled.
      density_sigma: see :func:`polestar_jax.commit.certainty.density`.
      conf_update: whether a position's confidence is that of the last pass that scored it, or of the first.
      row_capacity: rows that a pass may compute; None: as many as there can be while a pass commits at most k tokens.

    Raises:
      InputError: too narrow a density.
    """

    candidates: int = 32
    influential: float = 0.1
    inflation: int = 0
    density_sigma: float = 10.0
    conf_update: bool = True
    row_capacity: int | None = None

    plans = (Plan(ENTRY), Plan("step"))

    def __post_init__(self):
        check_sigma("density_sigma", self.density_sigma)

    def capacity(self, columns: int) -> int:
        """Rows of a pass."""
        if self.row_capacity is not None:
            return min(self.row_capacity, columns)
        # Of columns in the order of their influence, the first so many have at least that share of it.
        most = 2 * self.candidates + max(1, int(self.influential * columns))
        return min(most * (1 + self.inflation), columns)

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> D2State:
        layers = nothing_cached(spec, wanted, state, dtype).layers
        confidence, waiting = jnp.zeros(state.reason.shape, jnp.float32), jnp.zeros(state.reason.shape, bool)
        influence = jnp.zeros(state.tokens.shape, jnp.float32)
        return D2State(layers, confidence, influence, waiting, jnp.zeros_like(state.nfe))

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return jnp.where(state.nfe == 0, 0, 1)

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        spec, own, entry = model.spec, state.cache, plan == ENTRY
        rows, dropped = (every_row(state), 0) if entry else self.chosen(wanted, state, spec)
        rows = rows._replace(live=rows.live & state.active[:, None] & rows.take(state.valid))
        there = rows.put(jnp.zeros(state.tokens.shape, bool), rows.live)
        rollout = _Rollout(rows, there, jax.nn.one_hot(rows.columns, state.tokens.shape[1], dtype=jnp.float32))
        x, layers = model.embed(rows.take(state.tokens)), []
        for layer, old in zip(model.layers, own.layers, strict=True):
            q, k, v = layer.project(x)
            k, v = rows.write(old.k, k, rows.live, KEYS), rows.write(old.v, v, rows.live, VALUES)
            seen = measure(
                q, k, v, q_positions=rows.take(state.positions), k_positions=state.positions, theta=spec.rope_theta,
                valid=state.valid,
            )  # fmt: skip
            x, rollout = layer.finish(x, seen.out), rollout.through(seen.distribution)
            layers.append(KV(k, v))
        influence = kept(state.active, rollout.total(state.valid), own.influence)
        waiting = own.waiting & ~there[:, state.prompt_columns :]
        if entry:
            read, target = every_read(state, spec.logit_shift)
            x = jnp.take_along_axis(x, read[..., None], axis=1)
        else:
            target = row_reads(rows, state, spec.logit_shift)
        return Pass(
            rows=x,
            targets=target,
            kind=jnp.full(state.done.shape, FULL_ENTRY if entry else STEP),
            full=jnp.full(state.done.shape, entry),
            computed=live_rows(rows, state),
            cache=D2State(tuple(layers), own.confidence, influence, waiting, own.dropped + dropped),
        )

    def observe(self, own: D2State, scores: Scores, accept: jax.Array, state: DecodeState) -> D2State:
        scored = scores.eligible | scores.ahead
        if not self.conf_update:
            scored = scored & (state.nfe == 0)[:, None]
        return own._replace(
            confidence=jnp.where(scored, scores.confidence, own.confidence), waiting=own.waiting | accept
        )

    def chosen(self, wanted: Wanted, state: DecodeState, spec: ModelSpec) -> tuple[Picked, jax.Array]:
        """The rows to compute, and for how many more there is no room, i32 [b]."""
        own, (b, n) = state.cache, state.tokens.shape
        place = self.promising(wanted, state, state.generated == spec.mask_id)
        canvas = lambda values, shift: jnp.pad(values, ((0, 0), (state.prompt_columns - shift, shift)))  # noqa: E731
        # A position is scored by the row before it, under a shift.
        promising = canvas(jnp.where(place < self.candidates, 1 - place / state.gen_length, 0.0), spec.logit_shift)
        waiting = canvas(own.waiting, 0)
        free = state.valid & (promising == 0) & ~waiting
        influence = own.influence
        if wanted.guided:  # both halves compute the same rows
            influence = jnp.tile(influence[: b // 2] + influence[b // 2 :], (2, 1))
        influence = jnp.where(free, influence, 0.0)
        order = rank(influence, free)
        gathered = jnp.cumsum(-jnp.sort(-influence, axis=1), axis=1)
        share = jnp.take_along_axis(gathered, order, axis=1) / jnp.maximum(gathered[:, -1:], 1e-30)
        influential = free & ((share <= self.influential) | (order == 0))
        core = (promising > 0) | waiting | influential
        # The best of the promising first: without it nothing could be committed.
        priority = jnp.where(influential, 1 - share, 0.0) + jnp.where(promising > 0, 1 + promising, 0.0)
        priority = jnp.where(promising == 1, 4.0, jnp.where(waiting, 3.0, priority))
        chosen = core | (_gaps(core, self.inflation) & state.valid)
        rows = picked(chosen, self.capacity(n), priority)
        dropped = jnp.sum(chosen, axis=1) - jnp.sum(rows.live, axis=1)
        return rows, jnp.where(state.active, dropped, 0)

    def promising(self, wanted: Wanted, state: DecodeState, open_: jax.Array) -> jax.Array:
        """The rank of each undecided position among those that may be chosen, i32 [b, G], at least G for all others.

        That is from the span's start up to the first whole block that holds k of them with those before it; the span's own
        come first.
        """
        g, start = state.gen_length, state.span_start[:, None]
        score = jnp.where(open_, jnp.maximum(state.cache.confidence, 0.0) * density(~open_, self.density_sigma), 0.0)
        score = score + jnp.where(state.in_span, jnp.max(score, axis=1, keepdims=True), 0.0)
        index = jnp.arange(g)[None]
        open_ = open_ & (index >= start)
        kth = jnp.sum(jnp.cumsum(open_, axis=1) < self.candidates, axis=1, keepdims=True)
        end = start + ((kth - start) // wanted.capacity + 1) * wanted.capacity
        open_ = open_ & (index < end)
        return jnp.where(open_, rank(score, open_), g)


def _gaps(chosen: jax.Array, longest: int) -> jax.Array:
    """The columns of gaps between chosen ones that are at most so long, bool [b, n]."""
    n = chosen.shape[1]
    index = jnp.arange(n)[None]
    before = lax.cummax(jnp.where(chosen, index, -1), axis=1)
    behind = lax.cummin(jnp.where(chosen, index, n), axis=1, reverse=True)
    return ~chosen & (before >= 0) & (behind < n) & (behind - before - 1 <= longest)
