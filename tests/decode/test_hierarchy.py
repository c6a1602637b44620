"""Hierarchy-dLLM's rule: against plain Python, on random runs and decoding from tables; its limits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import commit, decoders
from polestar_jax.decode import engine
from tests.fakes import DREAM, SPEC, TableModel, lively_model
from tests.oracles.tables import CountModel, by_blocks, passes, scores_of, wandering

G, B = 16, 8
PROMPTS = [[1, 2, 3, 4], [5], list(range(1, 12))]
SPECS = {"llada": SPEC, "dream": DREAM}


def runs_of(positions: list[int]) -> list[list[int]]:
    """Neighbours together."""
    runs: list[list[int]] = []
    for i in positions:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def chosen(undecided, scored, confidence, threshold, low) -> list[int]:
    """The rule in plain Python; ``scored``: those of the undecided positions that may be committed."""
    found = {i for i in scored if confidence[i] > threshold}
    for run in runs_of(undecided):
        run = [i for i in run if i in scored]
        if run:
            best = min(run, key=lambda i: (-confidence[i], i))
            found |= {best} if confidence[best] > low else set()
    return sorted(found)


def test_equals_the_rule_in_plain_python_on_random_runs():
    rng, n = np.random.default_rng(0), 300
    confidence = np.float32(rng.choice([0.1, 0.3, 0.35, 0.5, 0.7, 0.8, 0.95], size=(n, G)))  # ties, and the thresholds
    undecided = rng.random((n, G)) < rng.choice([0.3, 0.7, 1.0], size=(n, 1))
    scored = undecided & (rng.random((n, G)) < rng.choice([0.6, 1.0], size=(n, 1)))
    decoder = decoders.hierarchy(gen_length=G, block_length=G)
    state = engine.init_state(TableModel(np.zeros((64, 30))), decoder, [[1]] * n)
    state = state.replace(committed_at=jnp.asarray(np.where(undecided, -1, 0), jnp.int32))
    for settings in (dict(threshold=0.8, low_threshold=0.35), dict(threshold=2.0, low_threshold=0.0)):
        rule = commit.Hierarchy(**settings)
        got = np.asarray(jax.jit(rule.accept)(scores_of(confidence, scored), state))
        for i in range(n):
            parts = (np.flatnonzero(undecided[i]).tolist(), set(np.flatnonzero(scored[i]).tolist()), confidence[i])
            assert np.flatnonzero(got[i]).tolist() == chosen(*parts, *settings.values()), i


@pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.slow)])
def test_decodes_as_the_rule_in_plain_python(family):
    decoder, shift = decoders.hierarchy(gen_length=G, block_length=B), SPECS[family].logit_shift
    counts = []
    for seed in range(4):
        table = wandering(seed, G, spread=2.0)
        got = passes(CountModel(table, SPECS[family]), decoder, PROMPTS)

        def rule(view):
            found = chosen(view.eligible, set(view.eligible), view.confidence, 0.9, 0.4)
            counts.append(len(found))
            return found or [view.best(view.eligible)]

        for prompt, run in zip(PROMPTS, got, strict=True):
            assert run == list(by_blocks(table, len(prompt), G, B, rule, shift))
    assert {0, 1} < set(counts), "passes that commit none, one and several must occur"


@pytest.mark.slow
def test_above_one_it_is_the_threshold_rule():
    table = wandering(1, G, spread=2.0)
    decoder = decoders.hierarchy(gen_length=G, block_length=B, low_threshold=1.5, threshold=0.5)
    parallel = lambda view: [i for i in view.eligible if view.confidence[i] > 0.5] or [view.best(view.eligible)]  # noqa: E731
    assert passes(CountModel(table), decoder, PROMPTS[:1])[0] == list(by_blocks(table, 4, G, B, parallel))


def test_one_a_run_splits_a_block_in_about_log_passes():
    """tau > 1, tau_low = 0: a pass commits one of each run. Best in the middle first: five passes for 31 positions."""
    order = np.array(
        [math.log2(i & -i) for i in range(1, 32)]
    )  # 0 1 0 2 0 1 0 3 ...: largest in the middle of each run
    table = np.zeros((35, 30), np.float32)
    table[4:, 5] = 1 + order
    decoder = decoders.hierarchy(gen_length=31, block_length=31, threshold=2.0, low_threshold=0.0)
    (run,) = passes(TableModel(table), decoder, PROMPTS[:1])
    assert [len(found) for _, found in run] == [1, 2, 4, 8, 16]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "spec"), [("none", DREAM), ("prefix", SPEC), ("dual", DREAM)])
def test_a_batch_of_unequal_prompts_equals_single_runs(cache, spec):
    decoder = decoders.hierarchy(gen_length=G, block_length=B, cache=cache)
    model = lively_model(spec, 1)
    together = passes(model, decoder, PROMPTS)
    assert together == [passes(model, decoder, [prompt])[0] for prompt in PROMPTS]
    assert any(len(found) > 1 for run in together for _, found in run)
