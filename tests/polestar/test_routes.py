"""Which kernels run and where states stay change no token."""

from __future__ import annotations

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from polestar_jax import decoders
from polestar_jax.decode import engine
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.generation import generate, trace_arrays
from polestar_jax.loading import load_model
from polestar_jax.polestar import residency
from tests.fakes import DREAM, ONE_LAYER, lively_model
from tests.polestar.test_goldens import DATA, GOLDENS, settings_of

SMALL = dict(gen_length=16, block_length=8, clusters=4, top_clusters=2, tau_static=0.6, refresh_step=0)
EXACT = ("tokens", "kind", "reason", "step", "cluster_selected", "token_selected", "labels")


def decoded(model, prompt, **settings):
    decoder = decoders.polestar(**settings).replace(trace=Trace())
    state = engine.decode(model, decoder, engine.init_state(model, decoder, prompt))
    return state, trace_arrays(state, 0, model.spec, decoder)


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("llada_1layer", "llada1l_polestar_skip_p33_g128_b8"),
        pytest.param("llada", "llada_paper_default_p20", marks=pytest.mark.slow),
        pytest.param("dream", "dream_paper_default_p7", marks=pytest.mark.slow),
        pytest.param("llada_gqa", "llada_gqa_paper_default_p7", marks=pytest.mark.slow),
        pytest.param("llada", "llada_paper_every_step_p33", marks=pytest.mark.slow),
        pytest.param("llada_gqa", "llada_gqa_paper_nvfp4_direct_p33", marks=pytest.mark.slow),
        pytest.param("dream", "dream_paper_quant_none_p33", marks=pytest.mark.slow),
    ],
)
def test_b62_interpreted_kernels_reproduce_the_recorded_run(checkpoint, name):
    """Every kernel of the loop, interpreted: the recorded tokens, selections and commits, with a drift at every step."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        golden = dict(file)
    model = load_model(DATA / "checkpoints" / checkpoint, dtype="float32")
    settings = settings_of(golden) | dict(kernels="interpret", strict_kernels=True)
    state, ours = decoded(model, golden["prompt"].tolist(), **settings)
    assert int(state.nfe[0]) == int(golden["nfe"])
    for field in EXACT:
        np.testing.assert_array_equal(ours[field], golden[field], err_msg=field)
    for field in {"drift", "delta", "cluster_drift"} & set(golden):
        np.testing.assert_allclose(ours[field], golden[field], rtol=0, atol=5e-3, err_msg=field)


@pytest.mark.parametrize("method", [pytest.param("vanilla", marks=pytest.mark.slow), "parallel"])
def test_interpreted_kernels_change_no_token_without_a_cache(method):
    model = lively_model(DREAM, 1)
    build = decoders.METHODS[method].build
    plain, kernels = (
        generate(model, None, [[1, 2, 3], [4, 5, 6, 7, 8]], build(gen_length=16, block_length=8, kernels=route))
        for route in ("xla", "interpret")
    )
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in kernels]


@pytest.mark.slow
def test_strict_kernels_refuse_what_cannot_be_had_and_others_fall_back(caplog, monkeypatch):
    model = lively_model()
    with pytest.raises(InputError, match=r"kernels=pallas cannot be had: \w+: Pallas kernels need CUDA.*cpu"):
        generate(model, None, [[1]], decoders.polestar(**SMALL, kernels="pallas", strict_kernels=True))
    monkeypatch.setattr(dispatch, "_reported", set())
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        asked = generate(model, None, [[1]], decoders.polestar(**SMALL, kernels="pallas"))
    ops = {record.getMessage().partition(" runs as plain XLA")[0] for record in caplog.records}
    assert ops == {"attention", "head_scores", "residual_patched", "residual_quantised"}
    assert len(caplog.records) == len(ops)  # one notice each
    assert asked[0].tokens == generate(model, None, [[1]], decoders.polestar(**SMALL, kernels="xla"))[0].tokens


def test_kernels_that_the_environment_or_a_context_names_make_a_program_of_their_own(monkeypatch):
    model = lively_model(ONE_LAYER)
    decoder = decoders.parallel(gen_length=8, block_length=8)
    engine.forget_programs()
    plain = generate(model, None, [[1, 2]], decoder)[0].tokens
    assert generate(model, None, [[1, 2]], decoder)[0].tokens == plain and len(engine._compiled) == 1
    with dispatch.using("interpret"):
        assert generate(model, None, [[1, 2]], decoder)[0].tokens == plain
    assert len(engine._compiled) == 2
    strict = decoders.parallel(gen_length=8, block_length=8, strict_kernels=True)
    monkeypatch.setenv(dispatch.ENVIRONMENT, "pallas")
    with pytest.raises(InputError, match="kernels=pallas cannot be had"):
        generate(model, None, [[1, 2]], strict)
    monkeypatch.setenv(dispatch.ENVIRONMENT, "bogus")
    with pytest.raises(InputError, match="POLESTAR_KERNELS='bogus' is no kernel backend; accepted: auto, xla"):
        generate(model, None, [[1, 2]], decoder)


@pytest.mark.slow
def test_a_state_from_a_file_goes_on_wherever_it_was_loaded_to():
    model = lively_model()
    decoder = decoders.polestar(**SMALL, residency="pinned_host")
    start = engine.init_state(model, decoder, [1, 2, 3])
    loaded = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, start.cache))
    assert memory_kinds(start.replace(cache=loaded)) == {"device"}
    done = engine.decode(model, decoder, start.replace(cache=loaded))
    assert memory_kinds(done) == {"pinned_host"}
    plain = decoders.polestar(**SMALL)
    other = engine.decode(model, plain, engine.init_state(model, decoder, [1, 2, 3]))
    assert memory_kinds(other) == {"device"}
    np.testing.assert_array_equal(done.tokens, other.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["nvfp4", "int8", "none"])
def test_b57_host_memory_changes_nothing(quantization):
    model, prompts = lively_model(seed=2), [[1, 2, 3], [7, 8, 9, 10, 11, 12]]
    states = {}
    for where in residency.RESIDENCIES:
        decoder = decoders.polestar(**SMALL, quantization=quantization, residency=where)
        start = engine.init_state(model, decoder, prompts)
        assert memory_kinds(start) == {where}
        done = states[where] = engine.decode(model, decoder, start)
        assert memory_kinds(done) == {where}
        (*_, last) = engine.steps(model, decoder, engine.init_state(model, decoder, prompts))
        np.testing.assert_array_equal(last.tokens, done.tokens)
    device, host = states.values()
    assert int(device.refreshes.min()) > 0
    for field in dataclasses.fields(device):
        if field.name not in ("key", "cache"):
            jax.tree.map(np.testing.assert_array_equal, getattr(device, field.name), getattr(host, field.name))
    jax.tree.map(np.testing.assert_array_equal, device.cache, host.cache)


def memory_kinds(state) -> set[str]:
    return {
        array.sharding.memory_kind for layer in state.cache.layers for array in layer.hidden[:2] if array is not None
    }


@pytest.mark.slow
def test_b57_without_host_memory_states_stay_on_the_device_with_a_notice(monkeypatch, caplog):
    class Bare:
        def addressable_memories(self):
            return [types.SimpleNamespace(kind="device")]

    bare = Bare()
    monkeypatch.setattr(residency, "_has_host_memory", lambda: residency._device_has_host_memory(bare))
    residency._device_has_host_memory.cache_clear()
    model = lively_model()
    decoder = decoders.polestar(**SMALL, residency="pinned_host")
    with caplog.at_level(logging.WARNING, "polestar_jax"):
        start = engine.init_state(model, decoder, [1, 2, 3])
        assert memory_kinds(start) == {"device"}
        done = engine.decode(model, decoder, start)
    assert len(caplog.records) == 1 and "has only device memory" in caplog.text
    plain = decoders.polestar(**SMALL)
    np.testing.assert_array_equal(
        done.tokens, engine.decode(model, plain, engine.init_state(model, plain, [1, 2, 3])).tokens
    )


def test_copies_to_and_from_the_host_are_whole_arrays():
    """B57: in the traced loop nothing but copies of whole arrays touches host memory."""
    model = lively_model()
    decoder = decoders.polestar(**SMALL, residency="pinned_host")
    state = engine.init_state(model, decoder, [1, 2, 3])
    text = str(jax.make_jaxpr(lambda s: engine.decode(model, decoder, s))(state))
    lines = [line for line in text.splitlines() if "<host>" in line and " = " in line]
    touched = {
        line.partition(" = ")[2].split("[")[0].split(" ")[0] for line in lines if "<host>" in line.partition(" = ")[0]
    }
    assert "device_put" in touched
    assert touched <= {"device_put", "while", "cond", "jit", "pjit"}, touched
