"""Rules with a fixed number of passes a span: LLaDA's and Dream's own samplers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax.commit.rule import Rule, noise, rank
from polestar_jax.decode.state import DecodeState, Scores
from polestar_jax.errors import InputError

# What positions are ranked by -> the field of Scores.
ORDERS = {
    "low_confidence": "confidence",
    "maskgit_plus": "confidence",
    "topk_margin": "margin",
    "entropy": "neg_entropy",
    "random": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quota(Rule):
    """A fixed number of commits a pass, the best by ``order`` (LLaDA's and Dream's own samplers).

    Attributes:
      steps_per_block: passes a span takes.
      order: what positions are ranked by: the confidence (LLaDA's low_confidence, Dream's maskgit_plus: the same), the margin
        between the two best tokens, the negative entropy, or nothing (random).
      quota: "uniform": masks at entry / steps, the remainder one each to the first passes. "dream_floor": the floor of
        (masks left)(1 - t[i+1] / t[i]) over times from 1 to ``eps``, all that is left at the last pass; its first pass
        may commit nothing.
      eps: last time of "dream_floor".
      order_temperature: above 0, positions are drawn without replacement from softmax(score / order_temperature).
    """

    steps_per_block: int
    order: str = "low_confidence"
    quota: str = "uniform"
    eps: float = 1e-3
    order_temperature: float = 0.0

    def __post_init__(self):
        if self.steps_per_block < 1:
            raise InputError(
                f"{type(self).__name__}: steps_per_block {self.steps_per_block} is not accepted: a whole number >= 1"
            )

    @property
    def may_stall(self) -> bool:
        return self.quota == "dream_floor"

    def accept(self, scores: Scores, state: DecodeState) -> jax.Array:
        if self.order == "random":
            score = noise(jax.random.uniform, scores, state)
        else:
            score = getattr(scores, ORDERS[self.order])
            if self.order_temperature:
                score = score / self.order_temperature + noise(jax.random.gumbel, scores, state)
        return scores.eligible & (rank(score, scores.eligible) < self.count(scores, state)[:, None])

    def count(self, scores: Scores, state: DecodeState) -> jax.Array:
        """Commits of this pass, i32 [b]."""
        if self.quota == "uniform":
            extra = state.span_passes < state.span_masks % self.steps_per_block
            return state.span_masks // self.steps_per_block + extra
        left = jnp.sum(scores.eligible, axis=-1)
        share = (
            1
            - jnp.asarray(times(self.steps_per_block, self.eps))[
                jnp.minimum(state.span_passes, self.steps_per_block - 1)
            ]
        )
        return jnp.where(state.span_passes < self.steps_per_block - 1, jnp.floor(left * share).astype(jnp.int32), left)

    def max_passes(self, gen_length: int, spans: int) -> int:
        return max(gen_length, spans * self.steps_per_block)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin(Rule):
    """Each position on its own with probability 1 - t[i+1] / t[i]; all that is left at the last pass (Dream's ``origin``)."""

    steps_per_block: int
    eps: float = 1e-3
    may_stall = True

    def __post_init__(self):
        if self.steps_per_block < 1:
            raise InputError(
                f"{type(self).__name__}: steps_per_block {self.steps_per_block} is not accepted: a whole number >= 1"
            )

    def accept(self, scores: Scores, state: DecodeState) -> jax.Array:
        keep = jnp.asarray(times(self.steps_per_block, self.eps))[
            jnp.minimum(state.span_passes, self.steps_per_block - 1)
        ]
        keep = jnp.where(state.span_passes < self.steps_per_block - 1, keep, 0.0)
        return scores.eligible & (self.uniform(scores, state) < 1 - keep[:, None])

    def uniform(self, scores: Scores, state: DecodeState) -> jax.Array:
        """The draw of each position, f32 [b, G] in [0, 1)."""
        return noise(jax.random.uniform, scores, state)

    def max_passes(self, gen_length: int, spans: int) -> int:
        return max(gen_length, spans * self.steps_per_block)


def times(steps: int, eps: float) -> np.ndarray:
    """Ratios t[i+1] / t[i] of ``steps`` + 1 evenly spaced times from 1 to ``eps``, f32 [steps]."""
    t = np.linspace(1, eps, steps + 1, dtype=np.float32)
    return t[1:] / t[:-1]
