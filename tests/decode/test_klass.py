"""KLASS: against its rule in plain Python on tables that move, and its limits."""

from __future__ import annotations

import numpy as np
import pytest

from polestar_jax import decoders
from polestar_jax.errors import InputError
from polestar_jax.generation import generate
from tests.fakes import DREAM, MASK, SPEC, TableModel, lively_model, table_for
from tests.oracles.tables import CountModel, View, by_blocks, passes, wandering

G, B = 16, 8
PROMPTS = [[1, 2, 3, 4], [5], list(range(1, 12))]
SPECS = {"llada": SPEC, "dream": DREAM}


class Klass:
    """The rule, position by position."""

    def __init__(self, family, threshold, kl_threshold, history):
        self.strict, self.gate = family == "llada", family == "llada"
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


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("history", [2, 3])
def test_equals_the_rule_in_plain_python(family, history):
    settings = dict(threshold=0.5, kl_threshold=0.02, kl_history=history)
    decoder = decoders.klass(gen_length=G, block_length=B, **settings)
    parallel = 0
    for seed in range(4):
        table = wandering(seed, G)
        got = passes(CountModel(table, SPECS[family]), decoder, PROMPTS)
        for prompt, run in zip(PROMPTS, got, strict=True):
            rule = Klass(family, *settings.values())
            shift = SPECS[family].logit_shift
            assert run == list(by_blocks(table, len(prompt), G, B, rule, shift))
            parallel += rule.parallel
    assert parallel > 5, "some passes must commit several for the test to mean anything"


def commits_a_pass(table, **settings):
    return [len(chosen) for _, chosen in passes(TableModel(table), decoders.klass(gen_length=8, **settings), PROMPTS[:1])[0]]


def test_nothing_is_stable_before_the_third_pass():
    table = table_for([5] * 8, [0.95] * 7 + [0.5])
    assert commits_a_pass(table, block_length=8) == [1, 1, 5, 1]
    assert commits_a_pass(table, block_length=8, kl_history=3) == [1, 1, 1, 4, 1]
    # The history goes on from block to block, and LLaDA's gate starts again with each.
    table = table_for([5] * 8, [0.95] * 8)
    assert commits_a_pass(table, block_length=4) == [1, 1, 2, 1, 3]
    assert commits_a_pass(table, block_length=4, step_gate=False) == [1, 1, 2, 4]


def test_no_tolerance_or_a_threshold_of_one_is_one_token_a_pass():
    table = wandering(0, G)
    model, vanilla = CountModel(table), decoders.vanilla(gen_length=G, block_length=B)
    slow = passes(model, vanilla, PROMPTS)
    assert passes(model, decoders.klass(gen_length=G, block_length=B, kl_threshold=0.0, threshold=0.0), PROMPTS) == slow
    assert passes(model, decoders.klass(gen_length=G, block_length=B, kl_threshold=100, threshold=1.0), PROMPTS) == slow


def test_any_tolerance_is_the_threshold_rule_after_the_gate():
    table = wandering(1, G)
    decoder = decoders.klass(gen_length=G, block_length=B, kl_threshold=1000, threshold=0.5)

    def rule(view):
        sure = [i for i in view.eligible if view.confidence[i] > 0.5] if view.step else []
        return sure or [view.best(view.eligible)]

    assert passes(CountModel(table), decoder, PROMPTS[:1])[0] == list(by_blocks(table, 4, G, B, rule))


def test_each_family_has_its_defaults():
    decoder = decoders.klass(gen_length=G)
    for spec, values in ((SPEC, (0.6, 0.01, False, True)), (DREAM, (0.9, 0.005, True, False))):
        rule = decoder.for_model(spec).commit
        assert (rule.threshold, rule.kl_threshold, rule.inclusive, rule.step_gate) == values
        assert rule.vocab_size == spec.vocab_size
        assert decoder.for_model(spec).settings()["threshold"] == values[0]
    given = decoders.klass(gen_length=G, threshold=0.7, inclusive=True).for_model(SPEC).commit
    assert (given.threshold, given.inclusive, given.step_gate) == (0.7, True, True)


@pytest.mark.parametrize("cache", ["none", pytest.param("dual", marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", [SPEC, DREAM], ids=SPECS)
def test_a_batch_of_unequal_prompts_equals_single_runs(cache, spec):
    model = lively_model(spec, 1)
    decoder = decoders.klass(gen_length=G, block_length=B, cache=cache, threshold=0.4, kl_threshold=0.5)
    together = passes(model, decoder, PROMPTS)
    assert together == [passes(model, decoder, [prompt])[0] for prompt in PROMPTS]
    assert any(len(chosen) > 1 for run in together for _, chosen in run)


@pytest.mark.slow
def test_a_position_keeps_its_history_where_a_pass_does_not_score_it():
    """Under the dual cache the second block's positions are scored by the two entries alone, then by every pass."""
    table = wandering(3, G)
    rule = Klass("llada", 0.5, 0.02, 2)

    class Known(View):
        """The block's positions, and all of them at an entry."""

        @property
        def scored(self):
            return range(len(self.tokens)) if not self.step else range(self.start, self.end)

    def restricted(view):
        known = Known(view.logits, view.tokens, view.start, view.end, view.step, view.nfe)
        kept = {i: (rule.previous.get(i), rule.moves.get(i)) for i in range(G) if i not in known.scored}
        chosen = rule(view)
        for i, (p, moves) in kept.items():
            rule.previous[i], rule.moves[i] = p, moves
        return chosen

    from polestar_jax.cache import NoCache

    class OnlyComputed(NoCache):
        def forward(self, model, wanted, state, plan):
            import jax.numpy as jnp

            result = super().forward(model, wanted, state, plan)
            inside = state.entering[:, None] | jnp.isin(result.targets, jnp.arange(0)) | (
                (result.targets >= state.span_start[:, None]) & (result.targets < state.span_end[:, None])
            )
            return result._replace(targets=jnp.where(inside, result.targets, state.gen_length))

    decoder = decoders.klass(gen_length=G, block_length=B, threshold=0.5, kl_threshold=0.02).replace(cache=OnlyComputed())
    assert passes(CountModel(table), decoder, PROMPTS[:1])[0] == list(by_blocks(table, 4, G, B, restricted))


def test_on_the_polestar_cache_it_decodes():
    (answer,) = generate(
        lively_model(), None, [[1, 2, 3]], decoders.polestar(gen_length=G, block_length=B, commit="klass", clusters=2, top_clusters=1)
    )
    assert MASK not in answer.tokens


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
