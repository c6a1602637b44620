"""KLASS (arXiv 2511.05664): tokens that are confident, and whose distribution has come to rest."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from polestar_jax.commit.rule import Rule
from polestar_jax.decode.policy import Needs
from polestar_jax.decode.state import CONFIDENCE, DecodeState, Scores

TINY = 1e-12  # added to probabilities under the logarithm


class Stability(NamedTuple):
    """What the passes before said of each position; a pass that does not score a position leaves its part as it is.

    Attributes:
      p: f32 [b, G, v], its distribution in the last pass that scored it; zeros before the first.
      kl: f32 [b, G, h], how far it moved in the last h such passes, KL(new || old) in nats, the newest first; zeros before.
    """

    p: jax.Array
    kl: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Klass(Rule):
    """Commits the positions whose confidence is above ``threshold`` and whose last ``kl_history`` divergences are all below
    ``kl_threshold``; if there is none, the most confident one.

    The first divergence of a position, from nothing, is about 27 nats: it is stable at its ``kl_history`` + 1st pass at the
    earliest. The authors' (threshold, kl_threshold) by task: LLaDA GSM8K (0.6, 0.015), MATH (0.6, 0.010), HumanEval (0.9, 0.010),
    MBPP (0.7, 0.010); Dream GSM8K (0.9, 0.001), MATH (0.9, 0.005), HumanEval (0.8, 0.001), MBPP (0.9, 0.001).

    Attributes:
      threshold: None: 0.6 for LLaDA, 0.9 for Dream.
      kl_threshold: nats; None: 0.010 for LLaDA, 0.005 for Dream.
      kl_history: how many divergences must be small.
      inclusive: whether a confidence of exactly the threshold is enough; None: for Dream.
      step_gate: whether the first ``kl_history`` - 1 passes on a span commit by fallback alone; None: for LLaDA.
      vocab_size: v; None: the model's.
    """

    threshold: float | None = None
    kl_threshold: float | None = None
    kl_history: int = 2
    inclusive: bool | None = None
    step_gate: bool | None = None
    vocab_size: int | None = None

    needs = Needs(logits=True, rows="computed")
    of_model: ClassVar = ("vocab_size",)
    per_family: ClassVar = {
        "threshold": {"llada": 0.6, "dream": 0.9},
        "kl_threshold": {"llada": 0.010, "dream": 0.005},
        "inclusive": {"llada": False, "dream": True},
        "step_gate": {"llada": True, "dream": False},
    }

    def init(self, batch: int, gen_length: int) -> Stability:
        sizes = self.vocab_size, self.kl_history
        return Stability(*(jnp.zeros((batch, gen_length, size), jnp.float32) for size in sizes))

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, Stability]:
        own = self._advanced(scores, state.commit)
        c = scores.confidence
        sure = (c >= self.threshold) if self.inclusive else (c > self.threshold)
        ready = scores.eligible & sure & jnp.all(own.kl < self.kl_threshold, axis=-1)
        if self.step_gate:
            ready = ready & (state.span_passes >= self.kl_history - 1)[:, None]
        return ready, jnp.full(ready.shape, CONFIDENCE, jnp.int8), own

    def _advanced(self, scores: Scores, old: Stability) -> Stability:
        """What is known after a pass that scored ``scores.targets``."""
        at = (jnp.arange(old.kl.shape[0])[:, None], scores.targets)
        p = jax.nn.softmax(scores.logits, axis=-1)
        before, history = (x.at[at].get(mode="fill", fill_value=0) for x in old)
        moved = jnp.sum(p * (jnp.log(p + TINY) - jnp.log(before + TINY)), axis=-1)
        history = jnp.concatenate([jnp.maximum(moved, 0.0)[..., None], history[..., :-1]], axis=-1)
        return Stability(old.p.at[at].set(p, mode="drop"), old.kl.at[at].set(history, mode="drop"))
