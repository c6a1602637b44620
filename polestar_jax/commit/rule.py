"""What commit rules are made of: ranks, independent sets, the defaults of a rule, combinations, and rules from plain functions.

Ranks are by descending score, ties to the lowest position.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from polestar_jax.decode.policy import CommitRule, Needs
from polestar_jax.decode.sampling import ORDER_NOISE
from polestar_jax.decode.state import CONFIDENCE, FALLBACK, DecodeState, Scores
from polestar_jax.errors import InputError


def rank(score: jax.Array, eligible: jax.Array) -> jax.Array:
    """Rank of each position among the eligible ones, i32 [b, G], 0 for the best; ineligible ones come after all others."""
    # Two stable sorts: by score, then eligible first. A score of -inf (commit last) still beats an ineligible position.
    order = jnp.lexsort((-score, ~eligible))
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def independent(nodes: jax.Array, conflict: jax.Array, weight: jax.Array) -> jax.Array:
    """Of ``nodes`` bool [b, r] the heaviest, then the heaviest of those that it is in no ``conflict`` bool [b, r, r] with, and so
    on; the first of equal ones."""
    place = rank(weight, nodes)

    def taken(i: int | jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, chosen = carry
        one = left & (place == i)
        return left & ~one & ~jnp.any(conflict & one[:, None], axis=-1), chosen | one

    return lax.fori_loop(0, nodes.shape[1], taken, (nodes, jnp.zeros_like(nodes)))[1]


class Rule:
    """Defaults of a rule: no state, always progress."""

    may_stall: bool = False
    needs: Needs = Needs()

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
class AtLeastOne(Rule):
    """``rule``, and where it accepts nothing in the span the position with the highest confidence (reason "fallback")."""

    rule: CommitRule

    @property
    def needs(self) -> Needs:
        return self.rule.needs

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


def noise(draw: Callable, scores: Scores, state: DecodeState) -> jax.Array:
    """f32 [b, G] of noise by ``draw``, the same for a sequence alone and in a batch."""
    return jax.vmap(lambda key: draw(key, scores.eligible.shape[1:], jnp.float32))(state.pass_key(ORDER_NOISE))
