"""Hierarchy-dLLM (dInfer, arXiv 2510.08666): each pass splits every run of undecided positions in two."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.commit.rule import Rule, rank
from polestar_jax.decode.state import DecodeState, Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hierarchy(Rule):
    """Commits every position whose confidence is above ``threshold``, and of each run of undecided neighbours in the span the
    most confident one if it is above ``low_threshold``; if there is none, the most confident one of all."""

    threshold: float
    low_threshold: float

    def accept(self, scores: Scores, state: DecodeState) -> jax.Array:
        b, g = scores.eligible.shape
        undecided = scores.eligible | (state.in_span & (state.committed_at < 0))
        begins = undecided & ~jnp.pad(undecided, ((0, 0), (1, 0)))[:, :-1]
        run = jnp.maximum(jnp.cumsum(begins, axis=-1) - 1, 0)
        place = jnp.where(scores.eligible, rank(scores.confidence, scores.eligible), g)
        best = jnp.full((b, g), g).at[jnp.arange(b)[:, None], run].min(place)
        first = place == jnp.take_along_axis(best, run, axis=1)
        c = scores.confidence
        return scores.eligible & ((c > self.threshold) | (first & (c > self.low_threshold)))
