"""dLLM-Cache against a NumPy oracle of its specification, pass for pass, and its own properties."""

from __future__ import annotations

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from polestar_jax import decoders
from polestar_jax.cache import DLLMCache
from polestar_jax.decode import engine
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from tests.fakes import DREAM, MASK, SPEC, lively_model
from tests.oracles.numpy_model import of_denoiser
from tests.oracles.sublayers import Passes, largest, probabilities

PROMPTS = [[3, 1, 4, 1, 5], [2], list(range(1, 20))]
G, BLOCK = 16, 8
BOTH = [SPEC, pytest.param(DREAM, id="dream")]


def oracle(model, prompt: list[int], interval: tuple[int | None, int | None], rho: float) -> tuple[list, float]:
    """The generated tokens after each pass of one token a pass, and the rows of all passes (mean over layers) that are read."""
    spec = model.spec
    passes = Passes(of_denoiser(model), prompt, G, spec.logit_shift)
    tokens, history, rows = np.array(prompt + [MASK] * G), [], 0.0
    count = int(fractions.Fraction(str(rho)) * G)
    while MASK in tokens:
        due = [len(history) % k == 0 if k else not history for k in interval]
        logits, _, computed = passes.forward(
            tokens, prompt=due[0], response=due[1], pick=lambda i, moved: largest(moved, count, range(G))
        )
        p = probabilities(logits, MASK)
        start = next(i for i in range(G) if tokens[len(prompt) + i] == MASK) // BLOCK * BLOCK
        open_ = [i for i in range(start, start + BLOCK) if tokens[len(prompt) + i] == MASK]
        best = largest(p.max(axis=1), 1, open_)[0]
        tokens[len(prompt) + best] = np.argmax(p[best])
        history.append(tokens[len(prompt) :].copy())
        least = 0 if due[0] else len(prompt) - spec.logit_shift  # the first layer's other rows are read by nobody
        rows += np.mean([sum(row >= least for row in layer) for layer in computed])
    return history, rows


def decoded(model, decoder, prompts=PROMPTS, pads: int | None = None):
    """(the final state, the generated tokens after each pass of each sequence)."""
    decoder = decoder.replace(trace=Trace("tokens"))
    state = engine.init_state(model, decoder, prompts)
    if pads is not None:
        tokens = jnp.where(state.positions < 0, pads, state.tokens)
        state = state.replace(tokens=tokens)
    state = engine.decode(model, decoder, state)
    return state, [np.asarray(state.trace["tokens"])[: int(state.nfe[i]), i] for i in range(len(prompts))]


# Intervals of 3 and 2: none divides the other, so that there are all four kinds of passes.
RUNS = [
    (SPEC, (4, 4), 0.3, "full step"),
    *(
        pytest.param(spec, interval, rho, plans, marks=pytest.mark.slow)
        for spec, interval, rho, plans in (
            (DREAM, (3, 2), 0.3, "full prompt response step"),
            (SPEC, (50, 7), 0.25, "full prompt response step"),
            (DREAM, (None, 5), 0.0, "full response step"),
            (SPEC, (4, None), 0.6, "full prompt step"),
        )
    ),
]


@pytest.mark.parametrize(("spec", "interval", "rho", "plans"), RUNS)
def test_every_pass_equals_the_oracle_in_a_batch_whatever_its_padding(spec, interval, rho, plans):
    decoder = decoders.dllm_cache(
        gen_length=G, block_length=BLOCK, prompt_interval=interval[0], response_interval=interval[1], rho=rho
    )
    assert [plan.name for plan in decoder.cache.plans] == plans.split()
    for seed, pads in ((1, None), (2, MASK)):
        model = lively_model(spec, seed)
        state, ours = decoded(model, decoder, pads=pads)
        full, refreshes = passes_of(interval)
        assert state.full_forwards.tolist() == [full] * 3 and state.refreshes.tolist() == [refreshes] * 3
        for i, prompt in enumerate(PROMPTS):
            theirs, rows = oracle(model, prompt, interval, rho)
            np.testing.assert_array_equal(ours[i], theirs)
            assert float(state.rows[i]) == pytest.approx(rows)


def passes_of(interval: tuple[int | None, int | None]) -> tuple[int, int]:
    """How many of G passes compute all rows, and how many after the first refresh something."""
    due = [[i % k == 0 if k else i == 0 for k in interval] for i in range(G)]
    return sum(map(all, due)), sum(map(any, due[1:]))


@pytest.mark.parametrize("spec", [SPEC, pytest.param(DREAM, id="dream", marks=pytest.mark.slow)])
def test_intervals_of_one_are_vanilla(spec):
    cached = decoders.dllm_cache(gen_length=G, block_length=BLOCK, prompt_interval=1, response_interval=1)
    assert [plan.name for plan in cached.cache.plans] == ["full"]
    for seed in (0, 6):
        model = lively_model(spec, seed)
        (state, ours), (plain, theirs) = (
            decoded(model, decoder) for decoder in (cached, decoders.vanilla(gen_length=G, block_length=BLOCK))
        )
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(state.rows, plain.rows)


@pytest.mark.slow
@pytest.mark.parametrize("spec", BOTH)
def test_only_the_prompt_is_stale_when_all_is_recomputed(spec):
    """rho=1: a prompt whose tokens change after the first pass is not seen again, unless it is refreshed."""
    model = lively_model(spec, 7)
    graph, weights = engine.split(model)

    def finished(decoder, change: int | None) -> np.ndarray:
        step = jax.jit(lambda weights, state: engine.step(nnx.merge(graph, weights), decoder, state))
        state = engine.init_state(model, decoder, PROMPTS[2])
        for i in range(G):
            state = step(weights, state)
            if i == 0 and change is not None:  # not the last token: its row is Dream's, and is computed in every pass
                state = state.replace(tokens=state.tokens.at[0, state.prompt_columns - 3].set(change))
        assert bool(state.done[0])
        return np.asarray(state.generated[0])

    settings = dict(gen_length=G, block_length=BLOCK, response_interval=None, rho=1.0)
    stale, fresh = (decoders.dllm_cache(prompt_interval=k, **settings) for k in (None, 1))
    np.testing.assert_array_equal(finished(stale, None), finished(stale, 20))
    unchanged = finished(fresh, None)
    np.testing.assert_array_equal(unchanged, oracle(model, PROMPTS[2], (1, 1), 0.0)[0][-1])  # as without a cache
    assert np.any(unchanged != finished(fresh, 20))


def test_which_passes_refresh():
    cache = DLLMCache(prompt_interval=50, response_interval=7, rho=0.25)
    state = engine.init_state(lively_model(), decoders.dllm_cache(gen_length=8), [[1]] * 6)
    names = [plan.name for plan in cache.plans]
    wanted = cache.wants(SPEC, state.replace(nfe=jnp.array([0, 1, 7, 50, 51, 350])))
    assert [names[i] for i in wanted] == ["full", "step", "response", "prompt", "step", "full"]
    for pair, plans in (
        ((None, None), "full step"),
        ((50, 1), "full response"),
        ((1, 4), "full prompt"),
        ((8, 4), "full response step"),
        ((None, 4), "full response step"),
        ((4, 4), "full step"),
    ):
        cache = DLLMCache(prompt_interval=pair[0], response_interval=pair[1], rho=0.0)
        assert [plan.name for plan in cache.plans] == plans.split()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(rho=1.5), "setting rho=1.5 is not accepted: a number >= 0 and <= 1"),
        (dict(prompt_interval=0), "setting prompt_interval=0 is not accepted: a whole number >= 1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        decoders.dllm_cache(**settings)
    with pytest.raises(InputError, match=f"{next(iter(settings))} .* is not accepted"):
        DLLMCache(**dict(prompt_interval=1, response_interval=1, rho=0.5) | settings)
