"""Commit rules: which of the scored, undecided positions of the span are written in this pass.

A rule is a frozen dataclass; a rule without state can be written as a plain function::

    @commit_rule
    def low_entropy(scores, state, *, tau=0.3):
        return -scores.neg_entropy < tau

    decoder = decoders.parallel(gen_length=256).replace(commit=low_entropy(tau=0.2))
"""

from polestar_jax.commit.adaptive import Adaptive
from polestar_jax.commit.certainty import Certainty
from polestar_jax.commit.dawn import Dawn
from polestar_jax.commit.hierarchy import Hierarchy
from polestar_jax.commit.klass import Klass
from polestar_jax.commit.prophet import Prophet
from polestar_jax.commit.quota import ORDERS, Origin, Quota, times
from polestar_jax.commit.rule import (
    AtLeastOne,
    Combined,
    ForcedEntry,
    Rule,
    all_of,
    any_of,
    at_least_one,
    commit_rule,
    independent,
    rank,
)
from polestar_jax.commit.threshold import Allowance, Factor, Threshold, threshold

__all__ = [
    "ORDERS",
    "Adaptive",
    "Allowance",
    "AtLeastOne",
    "Certainty",
    "Combined",
    "Dawn",
    "Factor",
    "ForcedEntry",
    "Hierarchy",
    "Klass",
    "Origin",
    "Prophet",
    "Quota",
    "Rule",
    "Threshold",
    "all_of",
    "any_of",
    "at_least_one",
    "commit_rule",
    "independent",
    "rank",
    "threshold",
    "times",
]
