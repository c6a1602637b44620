"""What always holds (specification 8), over random models, prompts, windows, clusters, blocks and formats.

The oracle runs separate passes with dynamic shapes in float64; the decoder merges rows under static shapes in float32. A
case whose decisions are closer to a boundary than float32 can tell is not compared.
"""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import measure
from polestar_jax import decoders
from polestar_jax.decode import engine
from polestar_jax.decode.state import Scores
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.generation import generate, trace_arrays
from polestar_jax.loading import load_model
from tests.fakes import DREAM, ONE_LAYER, POLESTAR, SPEC, lively_model
from tests.oracles import numpy_model, polestar

DATA = pathlib.Path(__file__).parents[1] / "data"
MARGIN = 1e-4  # decisions nearer than this to a boundary are not float32's to tell
DRIFT_ONLY_ON_CACHE = dict(current_commit=False, suffix_commit=False)
slow_examples = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
oracle_examples = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def cases(draw):
    """(model seed, Dream or not, prompt, settings, packet capacity)."""
    block = draw(st.sampled_from([8, 16, 32]))
    blocks = draw(st.integers(1, 3 if block < 32 else 2))
    clusters = draw(st.integers(2, 10))
    values = dict(
        gen_length=block * blocks,
        block_length=block,
        window_prefix=draw(st.sampled_from([None, 0, 3, block, 3 * block])),
        window_suffix=draw(st.sampled_from([None, 1, block - 1, 2 * block])),
        clusters=clusters,
        top_clusters=draw(st.integers(1, clusters)),
        tau_static=draw(st.sampled_from([0.3, 0.6, 0.9])),
        tau_suffix=draw(st.sampled_from([0.3, 0.7])),
        alpha=draw(st.sampled_from([0.0, 0.5, 10.0])),
        history=draw(st.sampled_from([0, 1, 5])),
        refresh_step=draw(st.sampled_from([0, 1, 3, None])),
        refresh_cumulative=draw(st.sampled_from([1, 3, None])),
        full_period=draw(st.integers(1, 3)),
        full_pattern=draw(st.sampled_from(["first", "all_but_last"])),
        quantization=draw(st.sampled_from(["none", "nvfp4", "int8", "fp8", "mxfp4", "int2", "nvfp4_direct"])),
        count_eos=draw(st.booleans()),
        exclude_mask=draw(st.booleans()),
        patch_committed=draw(st.booleans()),
        kmeans=draw(st.sampled_from(["paper", "release"])),
    )
    packing = draw(st.sampled_from([None, None, 1, 5]))
    prompt = draw(st.lists(st.integers(0, 25), min_size=1, max_size=3 * block + 5))
    return draw(st.integers(0, 3)), draw(st.booleans()), prompt, values, packing


def models(seed: int, dream: bool):
    return lively_model(DREAM if dream else SPEC, seed)


def by_oracle(model, prompt, values) -> polestar.Run:
    spec = model.spec
    chosen = polestar.Settings(**values)
    return polestar.decode(
        numpy_model.of_denoiser(model), np.array(prompt), chosen, mask_id=spec.mask_id, eos_id=spec.eos_id,
        logit_shift=spec.logit_shift,
    )  # fmt: skip


def decoded(model, prompt, decoder):
    decoder = decoder.replace(trace=Trace())
    state = engine.decode(model, decoder, engine.init_state(model, decoder, prompt))
    return state, trace_arrays(state, 0, model.spec, decoder)


def assert_lawful(tokens: np.ndarray, prompt_mask: int, gen_length: int) -> None:
    """Every pass commits, nothing committed changes, passes are bounded."""
    before = np.full(gen_length, prompt_mask)
    for after in tokens:
        decided = before != prompt_mask
        np.testing.assert_array_equal(after[decided], before[decided])
        assert (after != prompt_mask).sum() > decided.sum()
        before = after
    assert len(tokens) <= gen_length and not (before == prompt_mask).any()


@oracle_examples
@given(cases())
def test_the_oracle_is_lawful(case):
    seed, dream, prompt, values, _ = case
    model = models(seed, dream)
    run = by_oracle(model, prompt, values | {"exclude_mask": True})
    assert_lawful(run.tokens, model.spec.mask_id, values["gen_length"])
    drift, moves = run.drift[~np.isnan(run.drift)], run.cluster_drift[np.isfinite(run.cluster_drift)]
    assert (drift >= 0).all() and (moves >= 0).all()


@pytest.mark.slow
@slow_examples
@given(cases())
def test_merged_rows_equal_separate_passes(case):
    seed, dream, prompt, values, packing = case
    model = models(seed, dream)
    run = by_oracle(model, prompt, values)
    assume(run.margin > MARGIN and not (run.tokens[-1] == model.spec.mask_id).any())
    _state, ours = decoded(model, prompt, decoders.polestar(**values, packet_capacity=packing))
    for field in ("tokens", "kind", "block", "reason", "step", "cluster_selected", "token_selected", "labels"):
        np.testing.assert_array_equal(ours[field], getattr(run, field), err_msg=field)
    for field in ("drift", "delta", "cluster_drift"):
        np.testing.assert_allclose(ours[field], getattr(run, field), rtol=0, atol=5e-3, err_msg=field)
    assert_lawful(ours["tokens"], model.spec.mask_id, values["gen_length"])


@pytest.mark.slow
def test_without_commits_by_drift_and_refreshes_it_is_a_dual_cache():
    """Entered fully at every block, with confidence alone: the recorded run of Fast-dLLM's dual cache, pass for pass."""
    with np.load(DATA / "goldens/fast_dllm/llada_fast2_dual_p33.npz") as file:
        golden = dict(file)
    model, prompt = load_model(DATA / "checkpoints/llada", dtype="float32"), golden["prompt"].tolist()
    decoder = decoders.polestar(
        gen_length=128, block_length=32, refresh=False, full_period=1, exclude_mask=False, **DRIFT_ONLY_ON_CACHE
    )
    state, ours = decoded(model, prompt, decoder)
    assert int(state.nfe[0]) == len(golden["history"]) - 1 == 40
    assert int(state.full_forwards[0]) == 4 and int(state.refreshes[0]) == 0
    np.testing.assert_array_equal(ours["tokens"], golden["history"][1:, len(prompt) :])


@pytest.mark.parametrize("dream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sparse_equals_dense(dream):
    """Every cluster, no loss in storage, a refresh at every step, committed tokens patched, the window over everything: full
    recomputation, which is confidence-threshold decoding."""
    model = models(1, dream)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    everything = decoders.polestar(
        gen_length=32, block_length=8, window_prefix=48, window_suffix=48, clusters=5, top_clusters=5, quantization="none",
        refresh_step=-1, patch_committed=True, tau_static=0.55, **DRIFT_ONLY_ON_CACHE,
    )  # fmt: skip
    state, ours = decoded(model, prompt, everything)
    plain, theirs = decoded(model, prompt, decoders.parallel(gen_length=32, block_length=8, threshold=0.55))
    assert int(state.nfe[0]) == int(plain.nfe[0]) and int(state.refreshes[0]) > 4
    np.testing.assert_array_equal(ours["tokens"], theirs["tokens"])
    masked = ~np.isnan(ours["confidence"]) & ~np.isnan(theirs["confidence"])
    np.testing.assert_allclose(ours["confidence"][masked], theirs["confidence"][masked], atol=1e-5)


def test_a_batch_of_unequal_prompts_equals_single_runs():
    """Neighbours enter blocks and refresh at other times, and change nothing: tokens, passes and reasons."""
    model = lively_model(ONE_LAYER, 2)
    prompts = [[5] * 3, list(range(20)), [7, 8, 9, 10] * 10, [1]]
    decoder = decoders.polestar(**POLESTAR)
    together = generate(model, None, prompts, decoder, batch_size=4)
    for prompt, answer in zip(prompts, together, strict=True):
        (alone,) = generate(model, None, [prompt], decoder)
        assert answer.tokens == alone.tokens
        same = lambda stats: (stats.nfe, stats.full_forwards, stats.refreshes, stats.commits)  # noqa: E731
        assert same(answer.stats) == same(alone.stats)
    assert len({answer.stats.nfe for answer in together}) > 1  # they did go different ways
    assert sum(answer.stats.refreshes for answer in together) > 0


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [4, 13])
def test_packed_packets_equal_whole_windows(capacity):
    """Layers that select up to 13 rows of 24 and layers that select more; 4 hold the rows of hardly any."""
    model, values = (
        models(1, False),
        dict(gen_length=24, block_length=8, tau_static=0.9, refresh_step=0, top_clusters=3),
    )
    whole = decoded(model, [1, 2, 3] * 5, decoders.polestar(**values))[1]
    ours = decoded(model, [1, 2, 3] * 5, decoders.polestar(**values, packet_capacity=capacity))[1]
    sizes = whole["token_selected"].sum(-1)[whole["kind"] == 3]
    assert (sizes > 13).any() and (sizes <= 13).any()
    for field in ("tokens", "kind", "reason", "cluster_selected", "token_selected"):
        np.testing.assert_array_equal(ours[field], whole[field])
    np.testing.assert_allclose(ours["drift"], whole["drift"], atol=1e-5)


def test_streaming_equals_the_loop():
    model = lively_model(dataclasses.replace(DREAM, n_layers=1))
    decoder = decoders.polestar(**POLESTAR)
    whole = engine.decode(model, decoder, engine.init_state(model, decoder, [[1, 2, 3], [4] * 9]))
    *_, last = engine.steps(model, decoder, engine.init_state(model, decoder, [[1, 2, 3], [4] * 9]))
    for field in ("tokens", "nfe", "refreshes", "reason", "committed_at"):
        np.testing.assert_array_equal(getattr(last, field), getattr(whole, field))


def test_a_period_of_one_enters_every_block_fully():
    model = models(0, False)
    for pattern in ("first", "all_but_last"):
        decoder = decoders.polestar(gen_length=12, block_length=4, full_period=1, full_pattern=pattern, tau_static=0.3)
        state = engine.init_state(model, decoder, [1, 2])
        for block in range(3):
            entering = dataclasses.replace(state, span_index=jnp.array([block]))
            assert int(engine.needed(decoder, entering, model.spec)) == 0


def test_policies_that_do_not_go_together_are_refused():
    decoder = decoders.polestar(gen_length=8, block_length=4)
    with pytest.raises(InputError, match="holds blocks of 4"):
        decoder.replace(schedule=decoders.parallel(gen_length=8, block_length=8).schedule)
    with pytest.raises(InputError, match="gives none"):
        decoder.replace(cache=decoders.dkv_cache(gen_length=8, block_length=4).cache)
    with pytest.raises(InputError, match="setting top_clusters=0 is not accepted"):
        dataclasses.replace(decoder.cache, top_clusters=0)
    with pytest.raises(InputError, match="setting history=-1 is not accepted"):
        dataclasses.replace(decoder.commit, history=-1)
    with pytest.raises(InputError, match=r"setting preset=\['paper'\] is not accepted: paper | release"):
        decoders.polestar(preset=["paper"])
    with pytest.raises(InputError, match="at most clusters=2"):
        decoders.polestar(clusters=2, top_clusters=3)
    with pytest.raises(InputError, match="leave no window"):
        decoders.polestar(window_prefix=0, window_suffix=0)


def test_threshold_above_one_commits_one_token_a_pass():
    model = lively_model(ONE_LAYER, 3)
    decoder = decoders.polestar(**POLESTAR | {"tau_static": 1.5} | DRIFT_ONLY_ON_CACHE)
    state = engine.decode(model, decoder, engine.init_state(model, decoder, [2, 3]))
    assert int(state.nfe[0]) == 16 and sorted(state.committed_at[0].tolist()) == list(range(16))


def test_distributions_and_divergence():
    key = jax.random.split(jax.random.key(0), 3)
    q, k = jax.random.normal(key[0], (2, 5, 4, 8)), jax.random.normal(key[1], (2, 2, 11, 8))
    valid = jnp.arange(11)[None] >= jnp.array([[0], [4]])
    before = measure(q + 0.3 * jax.random.normal(key[2], q.shape), k, valid=valid).distribution
    after, moves, _ = measure(q, k, previous=before, valid=valid)
    new, old = (jnp.exp(each.log_probabilities) for each in (after, before))
    np.testing.assert_allclose(jnp.sum(new, -1), 1, rtol=1e-6)
    assert not np.asarray(new)[1, :, :, :4].any()
    assert (np.asarray(moves) > 0).all() and not np.asarray(measure(q, k, previous=after, valid=valid).drift).any()
    by_hand = np.sum(np.asarray(new)[0] * (np.log(np.asarray(new)[0]) - np.log(np.asarray(old)[0])), -1).mean(0)
    np.testing.assert_allclose(moves[0], by_hand, rtol=1e-4)


def test_delta_of_attention_that_did_not_move_is_minus_the_history():
    rule = decoders.polestar(gen_length=4, block_length=4).commit
    model = models(0, False)
    decoder = decoders.polestar(gen_length=4, block_length=4)
    state = engine.init_state(model, decoder, [1, 2])
    drifts = jnp.zeros((1, 5, 4)).at[0, :2].set(jnp.array([[0.2, 0.4, 0.6, 0.8], [0.4, 0.4, 0.4, 0.4]]))
    own = state.commit._replace(drifts=drifts, count=jnp.array([2]))
    state = dataclasses.replace(state, commit=own, span_passes=jnp.array([3]))
    none, number = jnp.zeros((1, 4), bool), jnp.zeros((1, 4))
    scores = Scores(
        token=jnp.zeros((1, 4), jnp.int32), confidence=number, margin=number, neg_entropy=number, eligible=none, ahead=none,
        near_tie=none, finite=jnp.ones(1, bool), drift=jnp.zeros((1, 4)),
    )  # fmt: skip
    _, _, new = rule.select(scores, state)
    np.testing.assert_allclose(new.delta[0], [-0.3, -0.4, -0.5, -0.6], rtol=1e-6)
    assert int(new.count[0]) == 3 and not np.asarray(new.drifts[0, 0]).any()
