"""d2Cache's certainty prior (arXiv 2509.23094): a position counts for more where its neighbours are decided."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polestar_jax.commit.rule import AtLeastOne
from polestar_jax.decode.state import DecodeState, Scores
from polestar_jax.errors import InputError

NARROWEST, WIDEST = 0.5, 1e4  # below, an undecided position hardly sees its neighbours


@dataclasses.dataclass(frozen=True)
class Certainty(AtLeastOne):
    """``rule``, on confidences times the density of decided positions around each; at least the best by that product.

    Attributes:
      rule: the rule.
      certainty_sigma: see :func:`density`.

    Raises:
      InputError: too narrow a density.
    """

    certainty_sigma: float = 10.0

    def __post_init__(self):
        check_sigma("certainty_sigma", self.certainty_sigma)

    @property
    def may_stall(self) -> bool:
        return False

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
        weight = density(state.reason >= 0, self.certainty_sigma)
        # What is to come last does so however near it is to what is decided.
        confidence = jnp.where(jnp.isfinite(scores.confidence), scores.confidence * weight, scores.confidence)
        return super().select(scores._replace(confidence=confidence), state)


def density(decided: jax.Array, sigma: float) -> jax.Array:
    """How densely decided positions lie around each one, f32 [b, G] in [0, 1], from ``decided`` bool [b, G].

    That is the indicator of decided positions smoothed by a Gaussian of deviation ``sigma`` positions. What lies before the
    generation counts as decided, what lies behind it does when the last position is.
    """
    g = decided.shape[1]
    around, before, behind = _kernel(g, sigma)
    inside = jnp.matmul(decided.astype(jnp.float32), around, precision=lax.Precision.HIGHEST)
    return inside + before + jnp.where(decided[:, -1:], behind, 0.0)


def check_sigma(name: str, sigma: float) -> None:
    """InputError for a density that is too narrow, or too wide to be summed."""
    if not NARROWEST <= sigma <= WIDEST:
        raise InputError(f"{name} {sigma} is not accepted: a number >= {NARROWEST} and <= {WIDEST:g}")


def _kernel(g: int, sigma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weights f32 of the positions on each other [G, G], and on each of all before and of all behind them [G]."""
    farthest = g + math.ceil(9 * sigma)  # beyond that nothing is left of a weight in float32
    weight = np.exp(-0.5 * (np.arange(farthest) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    beyond = np.cumsum(weight[::-1])[::-1]  # of all at least so far away
    before = beyond[1 : g + 1]
    around = weight[np.abs(np.arange(g)[:, None] - np.arange(g)[None])]
    return around.astype(np.float32), before.astype(np.float32), before[::-1].astype(np.float32)
