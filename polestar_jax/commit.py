"""Commit rules: which of the scored, undecided positions of the span are written in this pass.

A rule is a frozen dataclass; a rule without state can be written as a plain function::

    @commit_rule
    def low_entropy(scores, state, *, tau=0.3):
        return -scores.neg_entropy < tau

    decoder = decoders.parallel(gen_length=256).replace(commit=low_entropy(tau=0.2))

Ranks are by descending score, ties to the lowest position.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax.decode.policy import CommitRule
from polestar_jax.decode.sampling import ORDER_NOISE
from polestar_jax.decode.state import CONFIDENCE, FALLBACK, DecodeState, Scores
from polestar_jax.errors import InputError


def rank(score: jax.Array, eligible: jax.Array) -> jax.Array:
    """Rank of each position among the eligible ones, i32 [b, G], 0 for the best; ineligible ones come after all others."""
    # Two stable sorts: by score, then eligible first. A score of -inf (commit last) still beats an ineligible position.
    order = jnp.lexsort((-score, ~eligible))
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


class Rule:
    """Defaults of a rule: no state, always progress."""

    may_stall: bool = False
    needs_drift: bool = False

    def init(self, batch: int, gen_length: int) -> Any:
        return ()

    def max_passes(self, gen_length: int, spans: int) -> int:
        return gen_length  # every pass commits at least one token

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, Any]:
        accept = self.accept(scores, state)
        return accept, jnp.full(accept.shape, CONFIDENCE, jnp.int8), state.commit

    def recorded(self, own: Any) -> dict[str, jax.Array]:
        return {}

    def accept(self, scores: Scores, state: DecodeState) -> jax.Array:
        """For rules without state or reasons of their own: accept bool [b, G]."""
        raise TypeError(f"{type(self).__name__} must define accept or select")


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
            score = _noise(jax.random.uniform, scores, state)
        else:
            score = getattr(scores, ORDERS[self.order])
            if self.order_temperature:
                score = score / self.order_temperature + _noise(jax.random.gumbel, scores, state)
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
        return _noise(jax.random.uniform, scores, state)

    def max_passes(self, gen_length: int, spans: int) -> int:
        return max(gen_length, spans * self.steps_per_block)


def times(steps: int, eps: float) -> np.ndarray:
    """Ratios t[i+1] / t[i] of ``steps`` + 1 evenly spaced times from 1 to ``eps``, f32 [steps]."""
    t = np.linspace(1, eps, steps + 1, dtype=np.float32)
    return t[1:] / t[:-1]


@dataclasses.dataclass(frozen=True)
class AtLeastOne(Rule):
    """``rule``, and where it accepts nothing in the span the position with the highest confidence (reason "fallback")."""

    rule: CommitRule

    @property
    def needs_drift(self) -> bool:
        return self.rule.needs_drift

    def init(self, batch: int, gen_length: int) -> Any:
        return self.rule.init(batch, gen_length)

    def max_passes(self, gen_length: int, spans: int) -> int:
        return self.rule.max_passes(gen_length, spans)

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, Any]:
        accept, reason, own = self.rule.select(scores, state)
        none = ~jnp.any(accept & scores.eligible, axis=-1, keepdims=True)
        best = none & scores.eligible & (rank(scores.confidence, scores.eligible) == 0)
        return accept | best, jnp.where(best, FALLBACK, reason).astype(jnp.int8), own

    def recorded(self, own: Any) -> dict[str, jax.Array]:
        return self.rule.recorded(own)


@dataclasses.dataclass(frozen=True)
class ForcedEntry(AtLeastOne):
    """``rule``, and at a span's entry the one position that is scored, if it is one, whatever the rule says."""

    @property
    def may_stall(self) -> bool:
        return self.rule.may_stall

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, Any]:
        accept, reason, own = self.rule.select(scores, state)
        alone = jnp.sum(scores.eligible, axis=-1) == 1
        forced = scores.eligible & (state.entering & alone)[:, None] & ~accept
        return accept | forced, jnp.where(forced, FALLBACK, reason).astype(jnp.int8), own


@dataclasses.dataclass(frozen=True)
class Combined(Rule):
    """Stateless rules joined by "any" or "all" of their acceptances."""

    rules: tuple[Rule, ...]
    how: str

    def accept(self, scores: Scores, state: DecodeState) -> jax.Array:
        votes = jnp.stack([rule.accept(scores, state) for rule in self.rules])
        return scores.eligible & (jnp.any(votes, 0) if self.how == "any" else jnp.all(votes, 0))


def threshold(value: float) -> Threshold:
    """Commit every position with confidence >= ``value``."""
    return Threshold(value)


def at_least_one(rule: CommitRule) -> AtLeastOne:
    """Add the progress guarantee to a rule; once is enough."""
    return rule if type(rule) is AtLeastOne else AtLeastOne(rule)


def any_of(*rules: Rule) -> Combined:
    """Positions that any of the stateless rules accepts."""
    _check_stateless(rules)
    return Combined(rules, "any")


def all_of(*rules: Rule) -> Combined:
    """Positions that all of the stateless rules accept."""
    _check_stateless(rules)
    return Combined(rules, "all")


def _check_stateless(rules: tuple[Rule, ...]) -> None:
    if not rules:
        raise InputError("no rules to combine; give at least one")
    for rule in rules:
        if type(rule).accept is Rule.accept:
            raise InputError(
                f"{type(rule).__name__} cannot be combined: it has state or reasons of its own; wrap the combination"
            )


def commit_rule(function: Callable[..., jax.Array]) -> Callable[..., Rule]:
    """Make a rule from ``function(scores, state, *, settings...) -> accept bool [b, G]``."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    fields = [(p.name, Any) if p.default is p.empty else (p.name, Any, p.default) for p in parameters]

    def accept(self: Rule, scores: Scores, state: DecodeState) -> jax.Array:
        return function(scores, state, **{p.name: getattr(self, p.name) for p in parameters})

    namespace = {"accept": accept, "__doc__": function.__doc__}
    return dataclasses.make_dataclass(
        function.__name__, fields, bases=(Rule,), namespace=namespace, frozen=True, kw_only=True
    )


def _noise(draw: Callable, scores: Scores, state: DecodeState) -> jax.Array:
    """f32 [b, G] of noise by ``draw``, the same for a sequence alone and in a batch."""
    return jax.vmap(lambda key: draw(key, scores.eligible.shape[1:], jnp.float32))(state.pass_key(ORDER_NOISE))
