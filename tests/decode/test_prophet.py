"""Prophet: against its rule in plain Python, with and without a known answer; its limits."""

from __future__ import annotations

import pytest

from polestar_jax import commit, decoders
from polestar_jax.errors import InputError
from polestar_jax.generation import generate
from tests.fakes import DREAM, SPEC, lively_model
from tests.oracles.tables import CountModel, by_blocks, passes, wandering

G, B = 16, 8
PROMPTS = [[1, 2, 3, 4], [5], list(range(1, 12))]
SPECS = {"llada": SPEC, "dream": DREAM}


class Prophet:
    """The rule, with ``each`` commits a pass before the answer is clear."""

    def __init__(self, thresholds, steps, each=1, answer=None):
        self.thresholds, self.steps, self.each, self.answer, self.exits = thresholds, steps, each, answer, []

    def __call__(self, view):
        gaps = []
        for i in view.undecided if self.answer is None else range(*self.answer):
            first, second = sorted(view.logits[i].tolist(), reverse=True)[:2]
            gaps.append(first - second)
        progress = view.nfe / self.steps
        enough = self.thresholds[0 if progress < 0.33 else 1 if progress < 0.67 else 2]
        if sum(gaps) / len(gaps) >= enough:
            self.exits.append(progress)
            return view.undecided
        ranked = sorted(view.eligible, key=lambda i: (-view.confidence[i], i))
        return ranked[: self.each]


def by_rule(table, prompt, rule, shift=0):
    return list(by_blocks(table, len(prompt), G, B, rule, shift))


@pytest.mark.parametrize(("family", "answer"), [("llada", None), ("dream", (9, 14))])
def test_equals_the_rule_in_plain_python(family, answer):
    """Exits happen in each third of the steps, with the answer inside and behind the block, decided and not."""
    thresholds, shift = (1.5, 1.7, 1.2), SPECS[family].logit_shift
    where = {} if answer is None else dict(answer_start=answer[0], answer_length=answer[1] - answer[0])
    names = ("gap_early", "gap_middle", "gap_late")
    decoder = decoders.prophet(gen_length=G, block_length=B, **dict(zip(names, thresholds, strict=True)), **where)
    exits = []
    for seed in range(6):
        table = wandering(seed, G, spread=3.0)
        got = passes(CountModel(table, SPECS[family]), decoder, PROMPTS)
        for prompt, run in zip(PROMPTS, got, strict=True):
            rule = Prophet(thresholds, G, answer=answer)
            assert run == by_rule(table, prompt, rule, shift)
            exits += rule.exits or [1.0]
    thirds = {min(int(exit_ * 3), 2) for exit_ in exits if exit_ < 1}
    assert thirds == {0, 1, 2}, exits


@pytest.mark.slow
def test_progress_is_the_share_of_the_steps_not_of_the_positions():
    table = wandering(2, G, spread=3.0)
    decoder = decoders.prophet(gen_length=G, block_length=B, steps=8, gap_early=1e9, gap_middle=1e9, gap_late=-1.0)
    (run,) = passes(CountModel(table), decoder, PROMPTS[:1])
    assert run == by_rule(table, PROMPTS[0], Prophet((1e9, 1e9, -1.0), 8, each=2))
    assert len(run) == 7 and len(run[5][1]) == 2, "six of eight steps are 75 %"


def test_out_of_reach_it_is_vanilla_and_at_zero_one_pass():
    table = wandering(0, G)
    model, best = CountModel(table), lambda view: [view.best(view.eligible)]
    never = decoders.prophet(gen_length=G, block_length=B, gap_early=1e9, gap_middle=1e9, gap_late=1e9)
    assert passes(model, never, PROMPTS[:1])[0] == by_rule(table, PROMPTS[0], best)
    (answer,) = generate(model, None, PROMPTS[:1], decoders.prophet(gen_length=G, block_length=B, gap_early=0.0))
    assert answer.stats.nfe == 1
    assert answer.stats.commits == {"confidence": B, "fallback": 0, "drift": 0, "suffix": G - B}


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, DREAM], ids=SPECS)
def test_a_batch_of_unequal_prompts_equals_single_runs(spec):
    decoder = decoders.prophet(gen_length=G, block_length=B, gap_early=9, gap_middle=4.5, gap_late=3)
    model = lively_model(spec, 1)
    together = passes(model, decoder, PROMPTS)
    assert together == [passes(model, decoder, [prompt])[0] for prompt in PROMPTS]
    assert len({len(run) for run in together}) > 1 and min(map(len, together)) < G


def test_what_does_not_go_together_is_refused():
    with pytest.raises(
        InputError, match="answer_start=12 and answer_length=5 are not accepted: an answer inside gen_length 16"
    ):
        decoders.prophet(gen_length=G, block_length=B, answer_start=12)
    with pytest.raises(InputError, match="Prophet goes by the scores of every generated position in every pass, and"):
        decoders.prophet(gen_length=G, block_length=B, cache="dual")
    rule = commit.Prophet(commit.threshold(0.9), steps=8, gen_length=8, gap_early=1, gap_middle=1, gap_late=1)
    with pytest.raises(InputError, match="Prophet is for gen_length 8, not 16"):
        decoders.parallel(gen_length=G, block_length=B).replace(commit=rule)
