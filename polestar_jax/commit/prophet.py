"""Prophet (arXiv 2508.19982): once the answer is clear, everything that is left is committed at once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.commit.rule import AtLeastOne
from polestar_jax.decode.policy import Needs
from polestar_jax.decode.state import CONFIDENCE, SUFFIX, DecodeState, Scores, by_position
from polestar_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prophet(AtLeastOne):
    """``rule``, until the two best logits are far enough apart: then all that is undecided is committed, and decoding ends.

    The gap is the mean over the answer's positions, decided or not, of the best logit minus the second best. What is enough
    depends on the share of ``steps`` that has been spent: ``gap_early`` before 33 %, ``gap_late`` from 67 %.

    Attributes:
      rule: what is committed before that (the authors: a fixed number a pass).
      steps: passes that this rule takes for the whole generation.
      gen_length: G.
      gap_early, gap_middle, gap_late: differences of logits.
      answer_start, answer_length: the answer's positions; None: not known, all that are undecided.

    Raises:
      InputError: an answer outside the generation.
    """

    steps: int
    gen_length: int
    gap_early: float
    gap_middle: float
    gap_late: float
    answer_start: int | None = None
    answer_length: int = 5

    def __post_init__(self):
        if self.answer_start is not None and self.answer_start + self.answer_length > self.gen_length:
            raise InputError(
                f"answer_start={self.answer_start} and answer_length={self.answer_length} are not accepted: "
                f"an answer inside gen_length {self.gen_length}"
            )

    @property
    def may_stall(self) -> bool:
        return self.rule.may_stall

    @property
    def needs(self) -> Needs:
        return self.rule.needs._replace(logits=True, rows="every")

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
        accept, reason, own = self.rule.select(scores, state)
        spent = 100 * state.nfe
        enough = jnp.where(spent < 67 * self.steps, self.gap_middle, self.gap_late)
        enough = jnp.where(spent < 33 * self.steps, self.gap_early, enough)
        clear = (self.gap(scores) >= enough)[:, None]
        accept = accept | (clear & (scores.eligible | scores.ahead))
        reason = jnp.where(clear, jnp.where(scores.ahead, SUFFIX, CONFIDENCE), reason)
        return accept, reason.astype(jnp.int8), own

    def gap(self, scores: Scores) -> jax.Array:
        """The mean difference of the two best logits, f32 [b]."""
        logits = scores.logits
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        others = jnp.where(jnp.arange(logits.shape[-1]) == best, -jnp.inf, logits)
        gap = by_position(jnp.max(logits, axis=-1) - jnp.max(others, axis=-1), scores.targets, self.gen_length, 0.0)
        counts = scores.eligible | scores.ahead
        if self.answer_start is not None:
            offset = jnp.arange(self.gen_length) - self.answer_start
            counts = jnp.broadcast_to((offset >= 0) & (offset < self.answer_length), gap.shape)
        return jnp.sum(jnp.where(counts, gap, 0.0), axis=-1) / jnp.maximum(jnp.sum(counts, axis=-1), 1)
