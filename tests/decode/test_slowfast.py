"""SlowFast: its cycles against plain Python, on tables and on a model whose sequence the oracle really cuts off."""

from __future__ import annotations

import numpy as np
import pytest

from polestar_jax import commit, decoders
from polestar_jax.cache import NoCache, Truncated
from polestar_jax.errors import InputError
from polestar_jax.schedule import Cycles
from tests.fakes import DREAM, MASK, SPEC, TableModel, lively_model, table_for
from tests.oracles import numpy_model
from tests.oracles.tables import CountModel, View, answers, passes, wandering

G = 24
PROMPTS = [[1, 2, 3, 4], [5], list(range(1, 12))]
SPECS = {"llada": SPEC, "dream": DREAM}


def slow_fast(logits, gen_length, block_length, slow_passes, threshold, *, certain=0.3, truncate=True):
    """[(tokens, committed, phase)] pass by pass; ``logits(tokens, end)`` are [.., v] of the generated positions of a sequence
    that is cut off behind ``end`` of them."""
    tokens, run = [MASK] * gen_length, []

    def step(phase, start, end, visible):
        view = View(logits(list(tokens), visible), list(tokens), start, end, 0, len(run))
        sure = [i for i in view.eligible if view.confidence[i] >= threshold]
        chosen = sure if len(sure) >= 2 else [view.best(view.eligible)]
        for i in chosen:
            tokens[i] = int(view.token[i])
        run.append((list(tokens), chosen, phase))
        return [i for i in view.eligible if view.confidence[i] >= certain]

    for begin in range(0, gen_length, block_length):
        behind, start = begin + block_length, begin
        while MASK in tokens[begin:behind]:
            history, end, settled = [], None, False
            for _ in range(slow_passes):
                if MASK not in tokens[begin:behind]:
                    break
                far = step("slow", start, behind, gen_length)
                if settled:
                    continue
                history = [*history, min(max(far, default=start) + 1 - begin, block_length)][-2:]
                settled = len(history) == 2 and bool(np.std(history) < 1)
                end = begin + (history[-1] if settled else int(np.mean(history)))
            visible = gen_length
            while MASK in tokens[start:end]:
                step("fast", start, end, visible)
                visible = end if truncate else gen_length
            start = end
    return run


def of_table(table, prompt, shift):
    return lambda tokens, end: answers(table, prompt, tokens, shift)


def of_model(model, prompt):
    """Logits of a model's shortened sequence; what is cut off has none that matter."""
    reference, shift = numpy_model.of_denoiser(model), model.spec.logit_shift

    def logits(tokens, end):
        rows = numpy_model.logits(reference, np.array([*prompt, *tokens[:end]]))
        rows[:, MASK] = -np.inf
        seen = np.full((len(tokens), rows.shape[1]), 0.0)
        seen[:end] = rows[len(prompt) - shift : len(prompt) - shift + end]
        return seen

    return logits


def without_phase(run):
    return [(tokens, chosen) for tokens, chosen, _ in run]


def phases(run) -> str:
    return "".join(phase[0] for _, _, phase in run)


@pytest.mark.parametrize(
    ("family", "block_length", "slow_passes"),
    [
        ("llada", G, 2),
        pytest.param("dream", 12, 3, marks=pytest.mark.slow),
        pytest.param("llada", G, 6, marks=pytest.mark.slow),
    ],
)
def test_cycles_equal_plain_python(family, block_length, slow_passes):
    settings = dict(threshold=0.7, end_threshold=0.6)
    decoder = decoders.slowfast(gen_length=G, slow_passes=slow_passes, block_length=block_length, **settings)
    seen = []
    for seed in range(5):
        table = wandering(seed, G, spread=2.5)
        got = passes(CountModel(table, SPECS[family]), decoder, PROMPTS)
        for prompt, run in zip(PROMPTS, got, strict=True):
            logits = of_table(table, len(prompt), SPECS[family].logit_shift)
            want = slow_fast(logits, G, block_length, slow_passes, 0.7, certain=0.6)
            assert run == without_phase(want)
            seen.append(phases(want))
    for cycles in ("ff", "fs", "s" * (slow_passes + 1)):  # the last one: complete before it was fast
        assert any(cycles in phase for phase in seen), cycles


@pytest.mark.parametrize("truncate", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("spec", "block_length"), [pytest.param(SPEC, G, marks=pytest.mark.slow), (DREAM, 12)], ids=SPECS
)
def test_truncated_passes_equal_a_sequence_that_is_cut_off(spec, block_length, truncate):
    """Token for token, in a batch of unequal prompts, against the NumPy transformer on each prompt's own shortened sequence."""
    settings = dict(gen_length=G, block_length=block_length, slow_passes=2, threshold=0.6)
    decoder = decoders.slowfast(truncate=truncate, end_threshold=0.7, **settings)
    differ = 0
    for seed in (1, 2):
        model = lively_model(spec, seed)
        got = passes(model, decoder, PROMPTS)
        for prompt, run in zip(PROMPTS, got, strict=True):
            logits = of_model(model, prompt)
            want = slow_fast(logits, *settings.values(), certain=0.7, truncate=truncate)
            assert run == without_phase(want)
            other = slow_fast(logits, *settings.values(), certain=0.7, truncate=not truncate)
            differ += without_phase(other) != run
    assert differ, "cutting off must matter for the test to mean anything"


@pytest.mark.slow
def test_above_one_it_is_one_token_a_pass():
    table = table_for([5] * G, [0.2 + 0.03 * i for i in range(G)])
    (run,) = passes(TableModel(table), decoders.slowfast(gen_length=G, threshold=1.5), PROMPTS[:1])
    assert [len(chosen) for _, chosen in run] == [1] * G


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, DREAM], ids=SPECS)
def test_a_batch_of_unequal_prompts_equals_single_runs(spec):
    decoder = decoders.slowfast(gen_length=G, slow_passes=2, threshold=0.6, guidance=0.5)
    model = lively_model(spec, 1)
    together = passes(model, decoder, PROMPTS)
    assert together == [passes(model, decoder, [prompt])[0] for prompt in PROMPTS]


def test_a_block_is_the_whole_generation_by_default():
    decoder = decoders.slowfast(gen_length=40)
    assert decoder.schedule == Cycles(block_length=40, slow_passes=6, end_threshold=0.3)
    assert decoder.settings()["block_length"] == 40 and decoder.commit == commit.threshold(0.9)
    assert decoders.parallel(gen_length=64).schedule.capacity == 32


def test_what_does_not_go_together_is_refused():
    message = "cache Truncated goes with schedule Cycles, not Blocks"
    with pytest.raises(InputError, match=message):
        decoders.parallel(cache="truncated")
    with pytest.raises(InputError, match=message):
        decoders.parallel().replace(cache=Truncated(inside=NoCache()))
    with pytest.raises(InputError, match="setting slow_passes=0 is not accepted: a whole number >= 1"):
        decoders.slowfast(slow_passes=0)
    with pytest.raises(InputError, match="slow_passes 0 is not accepted"):
        Cycles(block_length=8, slow_passes=0)
    with pytest.raises(InputError, match="gen_length 24 is not a multiple of block_length 16"):
        decoders.slowfast(gen_length=24, block_length=16)
