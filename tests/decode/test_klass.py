"""KLASS: against its rule in plain Python on tables that move, and its limits."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import decoders
from polestar_jax.cache import NoCache
from polestar_jax.commit.klass import Klass as Rule
from polestar_jax.commit.klass import Stability
from polestar_jax.decode import engine
from polestar_jax.errors import InputError
from tests.fakes import DREAM, SPEC, TableModel, lively_model, table_for
from tests.oracles.tables import CountModel, View, by_blocks, passes, scores_of, wandering

G, B = 16, 8
PROMPTS = [[1, 2, 3, 4], [5], list(range(1, 12))]
SPECS = {"llada": SPEC, "dream": DREAM}


class Klass:
    """The rule, position by position."""

    def __init__(self, family, threshold, kl_threshold, history, gate=True):
        self.strict, self.gate = family == "llada", gate and family == "llada"
        self.threshold, self.kl_threshold, self.length = threshold, kl_threshold, history
        self.previous, self.moves, self.parallel = {}, {}, 0

    def __call__(self, view: View) -> list[int]:
        for i in range(len(view.tokens)):
            p, old = view.p[i], self.previous.get(i, np.zeros(view.p.shape[1]))
            moved = sum(a * np.log((a + 1e-12) / (b + 1e-12)) for a, b in zip(p, old, strict=True))
            self.moves[i] = [moved, *self.moves.get(i, [0.0] * self.length)][: self.length]
            self.previous[i] = p
        ready = [i for i in view.eligible if self.sure(view.confidence[i])]
        ready = [i for i in ready if all(move < self.kl_threshold for move in self.moves[i])]
        if self.gate and view.step < self.length - 1:
            ready = []
        self.parallel += len(ready) > 1
        return ready or [view.best(view.eligible)]

    def sure(self, confidence):
        return confidence > self.threshold if self.strict else confidence >= self.threshold


@pytest.mark.parametrize(
    ("family", "history"), [("llada", 2), ("dream", 2), pytest.param("llada", 3, marks=pytest.mark.slow)]
)
def test_equals_the_rule_in_plain_python(family, history):
    settings = dict(threshold=0.5, kl_threshold=0.02, kl_history=history)
    decoder, shift = decoders.klass(gen_length=G, block_length=B, **settings), SPECS[family].logit_shift
    parallel = 0
    for seed in range(4):
        table = wandering(seed, G)
        got = passes(CountModel(table, SPECS[family]), decoder, PROMPTS)
        for prompt, run in zip(PROMPTS, got, strict=True):
            rule = Klass(family, *settings.values())
            assert run == list(by_blocks(table, len(prompt), G, B, rule, shift))
            parallel += rule.parallel
    assert parallel > 5, "some passes must commit several for the test to mean anything"


def commits_a_pass(table, **settings):
    (run,) = passes(TableModel(table), decoders.klass(gen_length=8, **settings), PROMPTS[:1])
    return [len(chosen) for _, chosen in run]


def test_nothing_is_stable_before_the_third_pass():
    assert commits_a_pass(table_for([5] * 8, [0.95] * 7 + [0.5]), block_length=8) == [1, 1, 5, 1]
    # The history goes on from block to block; LLaDA's gate starts again with each.
    assert commits_a_pass(table_for([5] * 8, [0.95] * 8), block_length=4) == [1, 1, 2, 1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(kl_threshold=0.0, threshold=0.0), dict(kl_threshold=100, threshold=1.0)])
def test_no_tolerance_or_a_threshold_of_one_is_one_token_a_pass(settings):
    table = wandering(0, G)
    got = passes(CountModel(table), decoders.klass(gen_length=G, block_length=B, **settings), PROMPTS)
    for prompt, run in zip(PROMPTS, got, strict=True):
        assert run == list(by_blocks(table, len(prompt), G, B, lambda view: [view.best(view.eligible)]))


@pytest.mark.slow
def test_any_tolerance_is_the_threshold_rule_behind_the_gate():
    table = wandering(1, G)
    decoder = decoders.klass(gen_length=G, block_length=B, kl_threshold=1000, threshold=0.5)

    def rule(view):
        sure = [i for i in view.eligible if view.confidence[i] > 0.5] if view.step else []
        return sure or [view.best(view.eligible)]

    assert passes(CountModel(table), decoder, PROMPTS[:1])[0] == list(by_blocks(table, 4, G, B, rule))


@dataclasses.dataclass(frozen=True)
class EntriesAndSpans(NoCache):
    """Scores every position when a span is entered and the span's inside it, as caches do that compute no suffix."""

    def forward(self, model, wanted, state, plan):
        result = super().forward(model, wanted, state, plan)
        start, end = state.span_start[:, None], state.span_end[:, None]
        scored = state.entering[:, None] | ((result.targets >= start) & (result.targets < end))
        return result._replace(targets=jnp.where(scored, result.targets, state.gen_length))


def test_a_position_keeps_its_history_where_a_pass_does_not_score_it():
    settings = dict(threshold=0.5, kl_threshold=0.02, step_gate=False)
    table, rule, plain = wandering(3, G), *(Klass("llada", 0.5, 0.02, 2, gate=False) for _ in range(2))

    def restricted(view):
        hidden = [i for i in range(G) if view.step and not view.start <= i < view.end]
        kept = {i: (rule.previous[i], rule.moves[i]) for i in hidden}
        chosen = rule(view)
        for i in hidden:
            rule.previous[i], rule.moves[i] = kept[i]
        return chosen

    decoder = decoders.klass(gen_length=G, block_length=B, **settings)
    (run,) = passes(CountModel(table), decoder.replace(cache=EntriesAndSpans()), PROMPTS[:1])
    assert run == list(by_blocks(table, 4, G, B, restricted))
    assert run != list(by_blocks(table, 4, G, B, plain)), "the table must tell the two apart"


@pytest.mark.parametrize(
    ("settings", "accepted"), [({}, [3]), (dict(inclusive=True), [2, 3]), (dict(kl_threshold=0.0), [])]
)
def test_a_confidence_of_exactly_the_threshold(settings, accepted):
    rule = Rule(**dict(threshold=0.5, kl_threshold=0.1, inclusive=False, step_gate=False, vocab_size=4) | settings)
    logits = jnp.zeros((1, 4, 4))
    scores = scores_of([[0.2, 0.4, 0.5, 0.6]], [[True] * 4], logits=logits, targets=jnp.arange(4)[None])
    before = Stability(jnp.full((1, 4, 4), 0.25), jnp.zeros((1, 4, 2)))
    state = engine.init_state(TableModel(np.zeros((8, 30))), decoders.parallel(gen_length=4), [1]).replace(
        commit=before
    )
    accept, _, own = rule.select(scores, state)
    assert np.flatnonzero(accept[0]).tolist() == accepted and not own.kl.any()


def test_each_family_has_its_defaults():
    decoder = decoders.klass(gen_length=G)
    for spec, values in ((SPEC, (0.6, 0.01, False, True)), (DREAM, (0.9, 0.005, True, False))):
        rule = decoder.for_model(spec).commit
        assert (rule.threshold, rule.kl_threshold, rule.inclusive, rule.step_gate) == values
        assert rule.vocab_size == spec.vocab_size
        assert decoder.for_model(spec).settings()["threshold"] == values[0]
    given = decoders.klass(gen_length=G, threshold=0.7, inclusive=True).for_model(SPEC).commit
    assert (given.threshold, given.inclusive, given.step_gate) == (0.7, True, True)


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "spec"), [("none", SPEC), ("dual", DREAM), ("polestar", SPEC)])
def test_a_batch_of_unequal_prompts_equals_single_runs(cache, spec):
    more = dict(clusters=2, top_clusters=1) if cache == "polestar" else {}
    decoder = decoders.klass(gen_length=G, block_length=B, cache=cache, threshold=0.4, kl_threshold=0.5, **more)
    model = lively_model(spec, 1)
    together = passes(model, decoder, PROMPTS)
    assert together == [passes(model, decoder, [prompt])[0] for prompt in PROMPTS]
    assert any(len(chosen) > 1 for run in together for _, chosen in run)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(kl_history=0), "setting kl_history=0 is not accepted: a whole number >= 1"),
        (dict(kl_threshold=-1.0), "setting kl_threshold=-1.0 is not accepted"),
        (dict(threshold="high"), "setting threshold='high' is not accepted"),
        (dict(inclusive=1), "setting inclusive=1 is not accepted: true | false"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message.replace("|", r"\|")):
        decoders.klass(**settings)
