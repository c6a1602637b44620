"""Rules by confidence: a threshold, Fast-dLLM's factor, and Dream's allowance."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from polestar_jax.commit.rule import Rule, rank
from polestar_jax.decode.state import CONFIDENCE, FALLBACK, DecodeState, Scores
from polestar_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Threshold(Rule):
    """Every position whose confidence is at least ``threshold`` (Fast-dLLM, arXiv 2505.22618)."""

    threshold: float

    def accept(self, scores: Scores, state: DecodeState) -> jax.Array:
        return scores.eligible & (scores.confidence >= self.threshold)


@dataclasses.dataclass(frozen=True)
class Factor(Rule):
    """The n most confident positions, n the largest number such that each of the first n passes: the i-th highest confidence c
    with (i + 1)(1 - c) <= ``factor``; at least one (Fast-dLLM's dynamic factor, arXiv 2505.22618)."""

    factor: float

    def accept(self, scores: Scores, state: DecodeState) -> jax.Array:
        place = rank(scores.confidence, scores.eligible)
        fails = scores.eligible & ((place + 2) * (1 - scores.confidence) > self.factor)
        first = jnp.min(jnp.where(fails, place, place.shape[-1]), axis=-1, keepdims=True)
        return scores.eligible & (place < jnp.maximum(first, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allowance(Rule):
    """The threshold rule with at most (masks at entry) / ``steps`` commits a pass plus what earlier passes left unused;
    past ``steps`` passes only unused allowance is left (Dream's form of the threshold in Fast-dLLM)."""

    threshold: float
    steps: int

    def __post_init__(self):
        if self.steps < 1:
            raise InputError(f"{type(self).__name__}: steps {self.steps} is not accepted: a whole number >= 1")

    def init(self, batch: int, gen_length: int) -> Any:
        return jnp.zeros(batch, jnp.int32)

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, Any]:
        left_over = jnp.where(state.entering, 0, state.commit)
        fresh = jnp.where(state.span_passes < self.steps, jnp.maximum(1, state.span_masks // self.steps), 0)
        allowed = jnp.maximum(fresh + left_over, 1)
        place = rank(scores.confidence, scores.eligible)
        sure = scores.confidence >= self.threshold
        accept = scores.eligible & (place < allowed[:, None]) & (sure | (place == 0))
        reason = jnp.where(sure, CONFIDENCE, FALLBACK).astype(jnp.int8)
        return accept, reason, allowed - jnp.sum(accept, axis=-1)


def threshold(value: float) -> Threshold:
    """Commit every position with confidence >= ``value``."""
    return Threshold(value)
