"""Dynamic-dLLM's cache (DCU) and commit rule (APD) against NumPy oracles of their specification, pass for pass, and their own
properties."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import commit, decoders
from polestar_jax.cache import DynamicCache
from polestar_jax.decode import engine
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from tests.fakes import DREAM, MASK, SPEC, lively_model
from tests.oracles.numpy_model import of_denoiser
from tests.oracles.sublayers import Passes, distance, largest, probabilities
from tests.oracles.tables import CountModel, View, by_blocks, passes, wandering

PROMPTS = [[3, 1, 4, 1, 5], [2], list(range(1, 20))]
G, BLOCK = 16, 8
DEEP = dataclasses.replace(SPEC, n_layers=4)
DEFAULTS = dict(window_budget=2, layer_budget=2, budget_scale=200.0, alpha=0.001, beta=0.0008, threshold=0.9)


class Thresholds:
    """APD's thresholds of every generated position."""

    def __init__(self, threshold: float, alpha: float, beta: float):
        self.values, self.alpha, self.beta, self.last = np.full(G, threshold), alpha, beta, None

    def see(self, p: np.ndarray) -> np.ndarray:
        """The thresholds after probabilities [G, v]."""
        if self.last is not None:
            second = np.sort(p, axis=1)[:, -2]
            self.values = self.values - self.alpha * (1 - second) + self.beta * distance(p, self.last)
        self.last = p
        return self.values


def budgets(moved: np.ndarray, average: int, scale: float) -> list[int]:
    """Rows outside the window of layers that moved by ``moved`` [L - 1]."""
    weights = np.exp(scale * (moved - moved.max()))
    return [int(np.floor(average * len(moved) * weight / weights.sum() + 1e-3)) for weight in weights]


def window(centre: int, size: int, shift: int) -> list[int]:
    """Rows of the positions around ``centre``, of which there are ``size`` // 2 to each side, moved into 0 .. G - 1."""
    count = min(2 * (size // 2) + 1, G)
    start = min(max(centre - size // 2, 0), G - count)
    return list(range(max(start - shift, 0), start + count))


def oracle(model, prompt: list[int], settings: dict, intervals=(None, None)) -> tuple[list, float, set]:
    """The generated tokens after each pass, the rows of all passes (mean over layers) that are read, and all budgets that were
    given."""
    spec = model.spec
    walk = Passes(of_denoiser(model), prompt, G, spec.logit_shift)
    rule = Thresholds(*(settings[name] for name in ("threshold", "alpha", "beta")))
    tokens, history, rows, centre = np.array(prompt + [MASK] * G), [], 0.0, -1
    before, given = np.zeros(spec.n_layers - 1), set()
    while MASK in tokens:
        share = budgets(before, settings["layer_budget"], settings["budget_scale"])
        due = [len(history) % k == 0 if k else not history for k in intervals]

        def pick(i: int, moved: np.ndarray, share: list[int] = share, centre: int = centre) -> list[int]:
            near = window(centre, settings["window_budget"], spec.logit_shift)
            size = 2 * (settings["window_budget"] // 2) + 1 + spec.logit_shift
            count = min(share[i - 1], min(G, size + 4 * settings["layer_budget"]) - len(near))
            given.add(share[i - 1])
            return near + largest(moved, count, [row for row in range(G) if row not in near])

        logits, moved, computed = walk.forward(tokens, prompt=due[0], response=due[1], pick=pick)
        before = moved[1:].mean(axis=1)
        p = probabilities(logits, MASK)
        sure = p.max(axis=1) >= rule.see(p)
        start = next(i for i in range(G) if tokens[len(prompt) + i] == MASK) // BLOCK * BLOCK
        open_ = [i for i in range(start, start + BLOCK) if tokens[len(prompt) + i] == MASK]
        chosen = [i for i in open_ if sure[i]] or largest(p.max(axis=1), 1, open_)
        for i in chosen:
            tokens[len(prompt) + i] = np.argmax(p[i])
        centre = max(chosen)
        history.append(tokens[len(prompt) :].copy())
        least = 0 if due[0] else len(prompt) - spec.logit_shift  # the first layer's other rows are read by nobody
        rows += np.mean([sum(row >= least for row in layer) for layer in computed])
    return history, rows, given


def decoded(model, decoder, pads: int | None = None):
    """(the final state, the generated tokens after each pass of each sequence)."""
    decoder = decoder.replace(trace=Trace("tokens"))
    state = engine.init_state(model, decoder, PROMPTS)
    if pads is not None:
        state = state.replace(tokens=jnp.where(state.positions < 0, pads, state.tokens))
    state = engine.decode(model, decoder, state)
    return state, [np.asarray(state.trace["tokens"])[: int(state.nfe[i]), i] for i in range(len(PROMPTS))]


LIVELY = dict(threshold=0.7, alpha=0.02, beta=0.05, window_budget=3)  # thresholds that matter within 16 positions
RUNS = [
    (DREAM, {}, (None, None)),
    *(
        pytest.param(spec, settings, intervals, marks=pytest.mark.slow)
        for spec, settings, intervals in (
            (DEEP, LIVELY, (None, None)),
            (DREAM, LIVELY | dict(budget_scale=0.0, layer_budget=3), (3, 2)),
            (DEEP, LIVELY | dict(layer_budget=0, window_budget=4), (None, 3)),
        )
    ),
]


@pytest.mark.parametrize(("spec", "settings", "intervals"), RUNS)
def test_every_pass_equals_the_oracle_in_a_batch_whatever_its_padding(spec, settings, intervals):
    decoder = decoders.dynamic_dllm(
        gen_length=G, block_length=BLOCK, prompt_interval=intervals[0], response_interval=intervals[1], **settings
    )
    assert settings or {name: decoder.settings()[name] for name in DEFAULTS} == DEFAULTS
    uneven = False
    for seed, pads in ((1, None), (2, MASK)):
        model = lively_model(spec, seed)
        state, ours = decoded(model, decoder, pads)
        for i, prompt in enumerate(PROMPTS):
            theirs, rows, given = oracle(model, prompt, DEFAULTS | settings, intervals)
            np.testing.assert_array_equal(ours[i], theirs)
            assert float(state.rows[i]) == pytest.approx(rows)
            uneven |= len(given) > 1
    assert uneven == (spec.n_layers > 2 and decoder.cache.budget_scale > 0 and decoder.cache.layer_budget > 0)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, pytest.param(DREAM, id="dream")])
def test_intervals_of_one_are_no_cache(spec):
    cached = decoders.dynamic_dllm(gen_length=G, block_length=BLOCK, prompt_interval=1, response_interval=1, **LIVELY)
    plain = decoders.dynamic_dllm(
        gen_length=G,
        block_length=BLOCK,
        cache="none",
        **{name: LIVELY[name] for name in ("threshold", "alpha", "beta")},
    )
    for seed in (0, 6):
        model = lively_model(spec, seed)
        (state, ours), (other, theirs) = (decoded(model, decoder) for decoder in (cached, plain))
        for one, two in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(state.rows, other.rows)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, pytest.param(DREAM, id="dream")])
def test_a_window_of_all_leaves_only_the_prompt_stale(spec):
    """With the prompt fresh, nothing is stale."""
    settings = dict(gen_length=G, block_length=BLOCK, window_budget=G, **{k: LIVELY[k] for k in ("threshold", "alpha")})
    fresh = decoders.dynamic_dllm(prompt_interval=1, **settings)
    assert [plan.name for plan in fresh.cache.plans] == ["full", "prompt"]
    del settings["window_budget"]
    model = lively_model(spec, 3)
    ours, theirs = (decoded(model, decoder)[1] for decoder in (fresh, decoders.dynamic_dllm(cache="none", **settings)))
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, two)


def test_budgets_add_up_and_even_ones_are_whole():
    rng = np.random.default_rng(0)
    for average in (0, 3, 32):
        for scale in (0.0, 20.0, 200.0):
            cache = DynamicCache(
                prompt_interval=None, response_interval=None, window_budget=3, layer_budget=average, budget_scale=scale
            )
            moved = (rng.random((50, 27)) ** 3 * 0.1).astype(np.float32)
            ours = np.asarray(cache.budgets(jnp.asarray(moved)))
            assert np.all(ours.sum(axis=1) <= average * 27) and np.all(ours >= 0)
            for one, row in zip(ours, moved, strict=True):
                np.testing.assert_array_equal(one, budgets(row.astype(np.float64), average, scale))
            assert np.all(np.asarray(cache.budgets(jnp.zeros((1, 27)))) == average)
            assert scale or np.all(ours == average)


def test_the_window_follows_the_last_commit():
    state = engine.init_state(lively_model(), decoders.dynamic_dllm(gen_length=G, block_length=BLOCK), [[1]] * 5)
    at = np.full((5, G), -1)
    at[1, 3], at[2, [2, 9]], at[3, 15], at[4, [4, 5]] = 0, 4, 2, (7, 6)
    centres = [-1, 3, 9, 15, 4]
    for size in (1, 4, 5, G):
        for shift in (0, 1):
            cache = DynamicCache(
                prompt_interval=None, response_interval=None, window_budget=size, layer_budget=1, budget_scale=200.0
            )
            count = min(2 * (size // 2) + 1, G)
            ours = cache.window(state.replace(committed_at=jnp.asarray(at, jnp.int32)), count, shift)
            for one, centre in zip(np.asarray(ours), centres, strict=True):
                assert np.flatnonzero(one).tolist() == window(centre, size, shift)


def test_a_layer_takes_the_window_and_what_moved_most_up_to_four_times_the_average():
    cache = DynamicCache(
        prompt_interval=None, response_interval=None, window_budget=3, layer_budget=2, budget_scale=200.0
    )
    state = engine.init_state(lively_model(), decoders.dynamic_dllm(gen_length=G, block_length=BLOCK), [1])
    state = state.replace(committed_at=state.committed_at.at[0, 5].set(0))
    state = state.replace(cache=state.cache._replace(moved=jnp.zeros((1, 9)).at[0, 4].set(0.5)))  # ten layers
    moved = np.random.default_rng(0).random((1, G)).astype(np.float32)
    moved[0, [0, 15, 8]] = 2, 2, 3  # equal ones from left to right
    order = largest(moved[0], G, [row for row in range(G) if row not in (4, 5, 6)])
    assert order[:3] == [8, 0, 15]
    for layer, outside in ((1, 0), (5, 8), (9, 0)):  # the fifth would have all 18
        chosen = cache.pick(SPEC, state, layer, jnp.asarray(moved))
        assert chosen.columns[0][chosen.live[0]].tolist() == [4, 5, 6, *order[:outside]]
    even = state.replace(cache=state.cache._replace(moved=jnp.zeros((1, 9))))
    chosen = cache.pick(DREAM, even, 3, jnp.asarray(moved))
    assert chosen.columns[0][chosen.live[0]].tolist() == [3, 4, 5, 6, 8, 0]


# The commit rule alone, without a cache.


@pytest.mark.parametrize("shift", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_apd_equals_its_definition_on_tables(shift):
    spec = DREAM if shift else SPEC
    settings = dict(threshold=0.95, alpha=0.02, beta=0.03)
    decoder = decoders.parallel(gen_length=G, block_length=BLOCK, commit="adaptive", **settings)
    plain = 0
    for seed in range(4):
        table = wandering(seed, G)
        thresholds = [Thresholds(**settings) for _ in PROMPTS]
        ours = passes(CountModel(table, spec), decoder, PROMPTS)
        for i, prompt in enumerate(PROMPTS):
            rule = lambda view, own=thresholds[i]: above(view, own.see(view.p))  # noqa: E731
            theirs = list(by_blocks(table, len(prompt), G, BLOCK, rule, shift))
            assert ours[i] == theirs
            plain += theirs == list(by_blocks(table, len(prompt), G, BLOCK, lambda view: above(view, 0.95), shift))
    assert plain < 12  # the thresholds moved, and that mattered


def test_apd_without_movement_is_the_threshold():
    table, settings = wandering(5, G), dict(gen_length=G, block_length=BLOCK, threshold=0.8)
    decoder = decoders.parallel(commit="adaptive", alpha=0.0, beta=0.0, **settings)
    for prompt, ours in zip(PROMPTS, passes(CountModel(table), decoder, PROMPTS), strict=True):
        assert ours == list(by_blocks(table, len(prompt), G, BLOCK, lambda view: above(view, 0.8)))


def above(view: View, threshold: float | np.ndarray) -> list[int]:
    """The positions of the span at or above a threshold, else the best one."""
    sure = view.confidence >= threshold
    return [i for i in view.eligible if sure[i]] or [view.best(view.eligible)]


def test_thresholds_of_positions_that_a_pass_does_not_score_stay():
    """As behind a block's cache: in turn, some positions are scored, others not; and what was seen before is what counts."""
    rng = np.random.default_rng(1)
    rule = commit.Adaptive(threshold=0.9, alpha=0.1, beta=0.5, vocab_size=6)
    decoder = decoders.parallel(gen_length=G, block_length=BLOCK, commit="adaptive")
    state = engine.init_state(lively_model(), decoder, [[1]]).replace(commit=rule.init(1, G))
    want, last = np.full(G, 0.9), {}
    for _ in range(6):
        here = rng.permutation(G)[:7]
        logits = rng.normal(size=(1, 8, 6)).astype(np.float32) * 2
        targets = jnp.asarray([[*here, G]], jnp.int32)  # the last row scores nothing
        p = probabilities(logits[0].astype(np.float64), mask_id=-1)
        for row, i in enumerate(here):
            if i in last:
                want[i] += 0.5 * distance(p[row : row + 1], last[i])[0] - 0.1 * (1 - np.sort(p[row])[-2])
            last[i] = p[row : row + 1]
        row = jnp.ones((1, G), jnp.float32)
        scores = engine.Scores(
            token=row, confidence=row * 0.85, margin=row, neg_entropy=row, eligible=row > 0, ahead=row < 0, near_tie=row < 0,
            finite=jnp.array([True]), logits=jnp.asarray(logits), targets=targets,
        )  # fmt: skip
        accept, _, own = rule.select(scores, state)
        np.testing.assert_allclose(own.threshold[0], want, atol=1e-6)
        np.testing.assert_array_equal(accept[0], want <= 0.85)
        assert np.flatnonzero(own.known[0]).tolist() == sorted(last)
        state = state.replace(commit=own)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(window_budget=0), "setting window_budget=0 is not accepted: a whole number >= 1"),
        (dict(layer_budget=-1), "setting layer_budget=-1 is not accepted: a whole number >= 0"),
        (dict(budget_scale=-0.5), "setting budget_scale=-0.5 is not accepted: a number >= 0"),
        (dict(alpha=-1), "setting alpha=-1 is not accepted: a number >= 0"),
        (dict(response_interval=0), "setting response_interval=0 is not accepted: a whole number >= 1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        decoders.dynamic_dllm(**settings)
    whole = dict(prompt_interval=1, response_interval=1, window_budget=1, layer_budget=1, budget_scale=1.0)
    build = commit.Adaptive if "alpha" in settings else DynamicCache
    defaults = dict(threshold=0.9, alpha=0.1, beta=0.1) if "alpha" in settings else whole
    with pytest.raises(InputError, match=f"{next(iter(settings))} .* is not accepted: a (whole )?number >= "):
        build(**defaults | settings)
