"""DAWN (arXiv 2602.06953): a graph of who attends to whom says which less confident tokens may be committed together."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from polestar_jax.commit.rule import Rule, independent
from polestar_jax.decode.policy import Needs
from polestar_jax.decode.state import DecodeState, Scores, by_position
from polestar_jax.errors import InputError

SURE = 0.9  # commits by itself, and anchors others; fixed in the authors' code
ADJACENCIES = ("both", "either")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dawn(Rule):
    """Commits, of the span: (1) what is SURE; (2) what an anchor supports, if its confidence is at least ``induced_threshold``;
    (3) of the rest from ``low_threshold`` on, the most confident ones of which no two depend on each other.

    Position q depends on k where it attends to k, averaged over the heads of the last four layers, by at least
    ``edge_threshold``; k is none that all rows attend to by more than ``sink_threshold`` on average. An anchor is a position up
    to the span's end that is decided and whose own token would be SURE now.

    Attributes:
      block_length: the longest span that the schedule gives.
      low_threshold, sink_threshold, edge_threshold, induced_threshold: None: 0.75, 0.01, 0.07, 0.7 for LLaDA, 0.8, 0.03, 0.10,
        0.75 for Dream.
      adjacency: a candidate of (3) may not depend on a position that is in both (1) and (2), or in "either".

    Raises:
      InputError: an unknown adjacency.
    """

    block_length: int
    low_threshold: float | None = None
    sink_threshold: float | None = None
    edge_threshold: float | None = None
    induced_threshold: float | None = None
    adjacency: str = ADJACENCIES[0]

    needs = Needs(attention=4, rows="canvas")
    per_family: ClassVar = {
        "low_threshold": {"llada": 0.75, "dream": 0.8},
        "sink_threshold": {"llada": 0.01, "dream": 0.03},
        "edge_threshold": {"llada": 0.07, "dream": 0.10},
        "induced_threshold": {"llada": 0.7, "dream": 0.75},
    }

    def __post_init__(self):
        if self.adjacency not in ADJACENCIES:
            raise InputError(f"adjacency {self.adjacency!r} is not accepted: {' | '.join(ADJACENCIES)}")

    def accept(self, scores: Scores, state: DecodeState) -> jax.Array:
        target, p = state.span_targets(self.block_length), state.prompt_columns
        at = (jnp.arange(target.shape[0])[:, None], target)
        open_, c = (x.at[at].get(mode="fill", fill_value=0) for x in (scores.eligible, scores.confidence))
        column = p + jnp.minimum(target, state.gen_length - 1)
        on = self.depends(scores.attention, column, state)
        reached = jnp.arange(on.shape[2])[None] < p + state.span_end[:, None]
        anchor = reached & ~jnp.pad(scores.eligible, ((0, 0), (p, 0))) & (scores.canvas >= SURE)
        sure = open_ & (c >= SURE)
        induced = open_ & (c >= self.induced_threshold) & jnp.any(on & anchor[:, None], axis=-1)
        on = jnp.take_along_axis(on, column[:, None], axis=2)  # [b, B, B], inside the span
        first = (sure & induced) if self.adjacency == "both" else (sure | induced)
        left = open_ & (c >= self.low_threshold) & ~(sure | induced | jnp.any(on & first[:, None], axis=-1))
        free = independent(left, on | jnp.swapaxes(on, 1, 2), c)
        return by_position(sure | induced | free, target, state.gen_length, False)

    def depends(self, attention: jax.Array, column: jax.Array, state: DecodeState) -> jax.Array:
        """Which of the canvas' columns the rows ``column`` i32 [b, B] depend on, bool [b, B, n]; that a row may depend on itself
        decides nothing: it is neither an anchor nor its own rival."""
        real = state.positions >= 0
        mean = jnp.sum(jnp.where(real[:, :, None], attention, 0.0), axis=1) / jnp.sum(real, axis=-1, keepdims=True)
        seen = jnp.take_along_axis(attention, column[..., None], axis=1)
        return (seen >= self.edge_threshold) & (mean <= self.sink_threshold)[:, None]
