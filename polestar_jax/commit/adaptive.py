"""Dynamic-dLLM's commit rule (APD, arXiv 2606.26120): a threshold of confidence for each position, which its predictions move."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from polestar_jax.commit.rule import Rule
from polestar_jax.decode.policy import Needs
from polestar_jax.decode.state import CONFIDENCE, DecodeState, Scores, by_position
from polestar_jax.errors import InputError


class Predictions(NamedTuple):
    """The thresholds f32 [b, G]; the last probabilities of each position f32 [b, G, v]; whether it has any, bool [b, G]."""

    threshold: jax.Array
    probabilities: jax.Array
    known: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(Rule):
    """Every position whose confidence is at least its threshold.

    Whenever a position is scored again, decided or not, its threshold falls by ``alpha`` (1 - p2), p2 the second largest
    probability, and rises by ``beta`` (1 - cosine of its probabilities and those before). Thresholds are kept over the whole
    generation; positions that a pass does not score keep theirs.

    Attributes:
      threshold: the thresholds at first.
      alpha, beta: see above.
      vocab_size: v, the model's.

    Raises:
      InputError: a negative alpha or beta.
    """

    threshold: float
    alpha: float
    beta: float
    vocab_size: int | None = None

    needs = Needs(logits=True, rows="computed")
    of_model: ClassVar = ("vocab_size",)

    def __post_init__(self):
        for name in ("alpha", "beta"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} {getattr(self, name)} is not accepted: a number >= 0")

    def init(self, batch: int, gen_length: int) -> Predictions:
        threshold = jnp.full((batch, gen_length), self.threshold, jnp.float32)
        probabilities = jnp.zeros((batch, gen_length, self.vocab_size), jnp.float32)
        return Predictions(threshold, probabilities, jnp.zeros((batch, gen_length), bool))

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, Predictions]:
        old, g = state.commit, state.gen_length
        put = lambda values: by_position(values, scores.targets, g, 0)  # noqa: E731
        here = jnp.arange(state.done.shape[0])[:, None], scores.targets
        p = jax.nn.softmax(scores.logits, axis=-1)
        before = old.probabilities.at[here].get(mode="clip")
        best = jnp.argmax(p, axis=-1, keepdims=True)
        second = jnp.max(jnp.where(jnp.arange(p.shape[-1]) == best, 0.0, p), axis=-1)
        norms = jnp.linalg.norm(p, axis=-1) * jnp.linalg.norm(before, axis=-1)
        turned = 1 - jnp.sum(p * before, axis=-1) / jnp.maximum(norms, 1e-12)
        moved = put(self.beta * turned - self.alpha * (1 - second))
        threshold = old.threshold + jnp.where(old.known, moved, 0.0)
        accept = scores.eligible & (scores.confidence >= threshold)
        own = Predictions(
            threshold,
            old.probabilities.at[here].set(p, mode="drop"),
            old.known | put(jnp.ones_like(second)).astype(bool),
        )
        return accept, jnp.full(accept.shape, CONFIDENCE, jnp.int8), own
