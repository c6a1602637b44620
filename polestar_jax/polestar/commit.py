"""Polestar-Commit: confident tokens, tokens whose drift jumps above its history, and early ones of the suffix (section 4.2)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from polestar_jax.commit.rule import Rule, rank
from polestar_jax.decode.policy import Needs
from polestar_jax.decode.state import CONFIDENCE, DRIFT, FALLBACK, SUFFIX, DecodeState, Scores
from polestar_jax.polestar.presets import SETTINGS


class History(NamedTuple):
    """Drifts of the block's last steps.

    Attributes:
      drifts: f32 [b, h, G], the newest first; only the first ``count`` rows, and the positions of the block, count.
      count: i32 [b].
      delta: f32 [b, G], the last step's drift above its history, NaN outside steps.
    """

    drifts: jax.Array
    count: jax.Array
    delta: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolestarCommit(Rule):
    """Commits positions of the block by confidence or by drift, and of the suffix by confidence.

    Attributes:
      tau_static: commit what is more confident than this.
      current_commit: whether drift commits too: a position whose drift is more than alpha (tau_static - confidence)^2 above
        the mean of its last ``history`` drifts in this block (equation 5); history 0 compares the drift itself.
      early_min_confidence, early_max_delta: and whose confidence is above the one, its rise below the other (None: no bound).
      inclusive_gate: whether a rise of exactly the bound is enough.
      eager_fallback: whether the most confident position is committed whenever confidence alone commits none, whatever drift
        commits; else only when drift commits none either.
      suffix_commit: whether positions past the block that the last layer recomputed are committed above tau_suffix.
    """

    tau_static: float
    current_commit: bool
    alpha: float
    history: int
    early_min_confidence: float
    early_max_delta: float | None
    inclusive_gate: bool
    eager_fallback: bool
    suffix_commit: bool
    tau_suffix: float

    def __post_init__(self):
        for name in SETTINGS.keys() & {field.name for field in dataclasses.fields(self)}:
            SETTINGS[name].check(name, getattr(self, name))

    @property
    def needs(self) -> Needs:
        return Needs(drift=self.current_commit)

    def init(self, batch: int, gen_length: int) -> History:
        drifts = jnp.zeros((batch, self.history, gen_length), jnp.float32)
        return History(drifts, jnp.zeros(batch, jnp.int32), jnp.full((batch, gen_length), jnp.nan, jnp.float32))

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, History]:
        sure = scores.eligible & (scores.confidence > self.tau_static)
        accept, reason, own = sure, jnp.full(sure.shape, CONFIDENCE, jnp.int8), state.commit
        if scores.drift is not None:
            own = self._advanced(scores.drift, state)
        if self.current_commit:
            early = scores.eligible & ~sure & self._jumped(own.delta, scores.confidence)
            accept, reason = accept | early, jnp.where(early, DRIFT, reason)
        if self.eager_fallback:
            first = scores.eligible & (rank(scores.confidence, scores.eligible) == 0)
            first = first & ~jnp.any(sure, axis=-1, keepdims=True)
            accept, reason = accept | first, jnp.where(first, FALLBACK, reason)
        if self.suffix_commit:
            ahead = scores.ahead & (scores.confidence > self.tau_suffix)
            accept, reason = accept | ahead, jnp.where(ahead, SUFFIX, reason)
        return accept, reason.astype(jnp.int8), own

    def recorded(self, own: History) -> dict[str, jax.Array]:
        return {"delta": own.delta}

    def _advanced(self, drift: jax.Array, state: DecodeState) -> History:
        """The history after a pass: emptied by an entry, one drift longer after a step."""
        old = state.commit
        entry = state.entering
        counted = (jnp.arange(self.history)[None] < old.count[:, None])[..., None]
        mean = jnp.sum(jnp.where(counted, old.drifts, 0.0), axis=1) / jnp.maximum(old.count, 1)[:, None]
        drifts = jnp.concatenate([drift[:, None], old.drifts], axis=1)[:, : self.history]
        return History(
            drifts=drifts,
            count=jnp.where(entry, 0, jnp.minimum(old.count + 1, self.history)),
            delta=jnp.where(entry[:, None], jnp.nan, drift - mean),
        )

    def _jumped(self, delta: jax.Array, confidence: jax.Array) -> jax.Array:
        bound = self.alpha * jnp.maximum(self.tau_static - confidence, 0.0) ** 2
        jumped = (delta >= bound) if self.inclusive_gate else (delta > bound)  # false where delta is NaN
        jumped = jumped & (confidence > self.early_min_confidence)
        return jumped if self.early_max_delta is None else jumped & (delta < self.early_max_delta)
