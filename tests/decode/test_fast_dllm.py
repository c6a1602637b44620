"""Fast-dLLM's caches and factor rule against recorded runs of independent implementations, pass for pass, in float32."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import commit, decoders
from polestar_jax.cache import PrefixCache
from polestar_jax.decode import engine
from polestar_jax.decode.state import Scores
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.generation import generate
from polestar_jax.loading import load_model
from tests.fakes import DREAM, ONE_LAYER, SPEC, lively_model

DATA = pathlib.Path(__file__).parents[1] / "data"
RUNS = json.loads((DATA / "goldens/fast_dllm/runs.json").read_text())
FAST = ("llada_fast2_prefix_p33", "dream_fast_dual_entropy_p33")
# The older of the two recorded programs runs one more pass over a block that its entry has completed.
EMPTY_PASSES = ("llada_fast_prefix_p7", "llada_fast_dual_p33")
# Two positions whose confidences differ by 1.2e-5 are committed in the other order, at this pass and the next ones.
NEAR_TIE = {"dream_fast_prefix_p33": 51}
METHODS = ("fast_dllm_prefix", "fast_dllm_dual", "fast_dllm_factor")


@dataclasses.dataclass(frozen=True)
class RecordedFactor(commit.Factor):
    """The factor rule as the recorded programs have it: where the last candidate alone fails, it is committed too."""

    def accept(self, scores, state):
        plain = super().accept(scores, state)
        left = jnp.sum(scores.eligible & ~plain, axis=-1, keepdims=True)
        return jnp.where(left == 1, scores.eligible, plain)


def decoder_for(name: str, run: dict) -> decoders.Decoder:
    method = next((method for method in METHODS if method.rpartition("_")[2] in name.split("_")), "fast_dllm_factor")
    # The recorded samplers do not bar the mask token; its logit is 0 and takes part in their softmax.
    settings = dict(gen_length=run["gen_length"], block_length=run["block_length"], exclude_mask=False)
    if run.get("threshold", 0) is None or "eps" in run:
        settings |= dict(threshold=None, steps=run["steps"])
    if "factor" in run:
        settings["factor"] = run["factor"]
    if run["checkpoint"] == "dream":
        settings["first_token"] = "force"
    decoder = decoders.METHODS[method].build(**settings)
    if "factor" in run:
        decoder = decoder.replace(commit=RecordedFactor(run["factor"]))
    if "eps" in run:
        rule = commit.Quota(
            steps_per_block=decoder.commit.rule.steps_per_block, order=run["alg"], quota="dream_floor", eps=run["eps"]
        )
        decoder = decoder.replace(commit=commit.ForcedEntry(rule))
    return decoder.replace(trace=Trace("tokens"))


@pytest.mark.parametrize("name", [pytest.param(run, marks=[] if run in FAST else pytest.mark.slow) for run in RUNS])
def test_golden_trajectory(name):
    run = RUNS[name]
    with np.load(DATA / f"goldens/fast_dllm/{name}.npz") as file:
        golden = dict(file)
    model = load_model(DATA / "checkpoints" / run["checkpoint"], dtype="float32")
    decoder, prompt = decoder_for(name, run), golden["prompt"].tolist()
    state = engine.decode(model, decoder, engine.init_state(model, decoder, prompt))
    ours = np.asarray(state.trace["tokens"])[: int(state.nfe[0]), 0]
    theirs = golden["history"][:, len(prompt) :]
    if name in EMPTY_PASSES:
        changed = np.any(theirs[1:] != theirs[:-1], axis=1)
        assert 0 < (~changed).sum() < 4
        theirs = theirs[np.concatenate([[True], changed])]
    else:
        assert len(theirs) - 1 == run["forwards"]
    assert len(ours) == len(theirs) - 1
    same = slice(NEAR_TIE.get(name, len(ours)))
    np.testing.assert_array_equal(ours[same], theirs[1:][same])
    np.testing.assert_array_equal(ours[-1], golden["tokens_final"][len(prompt) :])


@pytest.mark.parametrize("dream", [False, True])
@pytest.mark.parametrize("method", [pytest.param(METHODS[0], marks=pytest.mark.slow), *METHODS[1:]])
def test_a_batch_of_unequal_prompts_equals_single_runs(method, dream):
    model = lively_model(DREAM if dream else SPEC, 1)
    decoder = decoders.METHODS[method].build(gen_length=24, block_length=8)
    prompts = [[3, 1, 4, 1, 5], [2], list(range(1, 20))]
    together = [answer.tokens for answer in generate(model, None, prompts, decoder)]
    assert together == [generate(model, None, [prompt], decoder)[0].tokens for prompt in prompts]


@pytest.mark.parametrize("method", [pytest.param(METHODS[0], marks=pytest.mark.slow), METHODS[1]])
@pytest.mark.parametrize("dream", [False, True])
def test_one_token_a_pass_above_a_threshold_of_one_and_one_pass_a_block_at_zero(method, dream):
    model = lively_model(DREAM if dream else SPEC, 2)
    for threshold, passes in ((1.5, 16), (0.0, 2)):
        decoder = decoders.METHODS[method].build(gen_length=16, block_length=8, threshold=threshold)
        (answer,) = generate(model, None, [[1, 2, 3]], decoder)
        assert answer.stats.nfe == passes and answer.stats.full_forwards == 2


def test_prefix_passes_have_the_fewest_rows_that_hold_what_is_left():
    cache = PrefixCache(block_length=8, gen_length=40)
    assert cache.sizes == (40, 20, 10)
    state = engine.init_state(lively_model(), decoders.fast_dllm_prefix(gen_length=40, block_length=8), [[1]] * 5)
    state = state.replace(span_start=jnp.array([0, 8, 16, 24, 32]), span_passes=jnp.array([1, 1, 1, 1, 0]))
    wanted = [cache.plans[i].name for i in cache.wants(SPEC, state)]
    assert wanted == ["last 40", "last 40", "last 40", "last 20", "entry"]
    assert cache.plans[1].also == ("last 20", "last 10")


def test_factor_rule_equals_its_definition():
    rng = np.random.default_rng(0)
    for _ in range(200):
        confidence, eligible = rng.random(9) ** rng.choice([0.1, 1, 3]), rng.random(9) < 0.7
        factor = rng.choice([0.0, 0.5, 1.0, 2.0, 11.0])
        order = sorted(np.flatnonzero(eligible), key=lambda i: (-np.float32(confidence[i]), i))
        count = 0
        while count < len(order) and (count + 2) * (1 - np.float32(confidence[order[count]])) <= factor:
            count += 1
        want = np.zeros(9, bool)
        want[order[: max(1, count)]] = True
        row = jnp.asarray(confidence, jnp.float32)[None]
        scores = Scores(*[row] * 4, jnp.asarray(eligible)[None], jnp.zeros((1, 9), bool), None, None)
        got = commit.Factor(float(factor)).accept(scores, None)
        np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(steps=8), "setting steps=8 goes with threshold=none and factor=none alone"),
        (
            dict(threshold=None, steps=7, gen_length=16, block_length=8),
            "steps=7 is not accepted: a multiple of the 2 blocks",
        ),
        (dict(first_token="mask"), "first_token='mask' is not accepted: left_neighbour | force"),
        (dict(factor=-1), "factor=-1 is not accepted"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(InputError, match=message.replace("|", r"\|")):
        decoders.fast_dllm_dual(**settings)


def test_kernels_change_no_token():
    model = lively_model(ONE_LAYER, seed=3)
    routes = [decoders.fast_dllm_dual(gen_length=16, block_length=8, kernels=route) for route in ("xla", "interpret")]
    plain, kernels = (generate(model, None, [[5, 4, 3]], decoder)[0].tokens for decoder in routes)
    assert plain == kernels
