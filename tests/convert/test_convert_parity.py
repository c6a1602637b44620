"""Loaded models against golden logits and against an independent NumPy forward pass of the same files."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.attention import attend
from polestar_jax.loading import load_model
from polestar_jax.models.attention import as_keys, as_values
from polestar_jax.models.denoiser import RMSNorm
from tests.convert.checkpoints import (
    CHECKPOINTS,
    DATA,
    checkpoint,
    random_tensors,
    small_dream,
    small_llada,
    write_checkpoint,
)
from tests.oracles import numpy_model

GOLDENS = ("llada", "llada_gqa", "dream")


def relative_gap(a, b) -> float:
    """Largest difference over the scale of ``b``."""
    return float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max())


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("prompt", range(3))
def test_logits_equal_the_goldens(name, prompt, forward):
    golden = np.load(DATA / "goldens" / f"{name}_logits.npz")
    ours = forward(load_model(checkpoint(name), dtype="float32"), golden[f"input{prompt}"])
    gap = relative_gap(ours, golden[f"logits{prompt}"])
    print(f"{name} prompt {prompt}: relative error {gap:.2e}")
    assert gap < 2e-4
    assert gap < 1e-5  # what float32 gives; 2e-4 is the promise


@pytest.mark.parametrize("name", GOLDENS)
def test_the_numpy_reference_equals_the_goldens(name):
    golden = np.load(DATA / "goldens" / f"{name}_logits.npz")
    reference = numpy_model.logits(numpy_model.load(checkpoint(name)), golden["input1"])
    assert relative_gap(reference, golden["logits1"]) < 1e-5


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_the_numpy_reference(name, forward):
    tokens = np.random.default_rng(3).integers(0, 260, 50)
    ours = forward(load_model(checkpoint(name), dtype="float32"), tokens)
    assert relative_gap(ours, numpy_model.logits(numpy_model.load(checkpoint(name)), tokens)) < 1e-5


def square_llada(**changes):
    """A LLaDA whose every matrix is square: no shape tells a transposed or swapped tensor."""
    return (
        small_llada(d_model=40, n_heads=2, n_kv_heads=2, mlp_hidden_size=40, vocab_size=40, embedding_size=40) | changes
    )


def test_b20_a_square_transpose_is_caught(tmp_path, forward):
    model, tokens = square_llada(), np.arange(12)
    tensors = random_tensors(model)
    ours = forward(load_model(write_checkpoint(tmp_path / "right", model, tensors), dtype="float32"), tokens)
    assert relative_gap(ours, numpy_model.logits(numpy_model.from_tensors(model, tensors), tokens)) < 1e-5
    for name in [name for name, array in tensors.items() if array.ndim == 2]:
        turned = tensors | {name: np.ascontiguousarray(tensors[name].T)}
        wrong = numpy_model.logits(numpy_model.from_tensors(model, turned), tokens)
        assert relative_gap(ours, wrong) > 1e-3, name


def test_b28_head_and_down_projection_are_told_apart_by_full_path(tmp_path, forward):
    model, tokens = square_llada(), np.arange(12)
    tensors = random_tensors(model)
    head, down = "model.transformer.ff_out.weight", "model.transformer.blocks.0.ff_out.weight"
    swapped = tensors | {head: tensors[down], down: tensors[head]}
    right = numpy_model.logits(numpy_model.from_tensors(model, tensors), tokens)
    for prefix in ("model.", ""):  # some repositories leave the prefix out
        stored = {prefix + name.removeprefix("model."): array for name, array in tensors.items()}
        directory = write_checkpoint(tmp_path / f"right{prefix}", model, stored)
        assert relative_gap(forward(load_model(directory, dtype="float32"), tokens), right) < 1e-5
    directory = write_checkpoint(tmp_path / "swapped", model, swapped)
    assert relative_gap(forward(load_model(directory, dtype="float32"), tokens), right) > 1e-2


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_b19_rotary_lanes_are_half_split(tmp_path, kv_heads, family):
    """One layer, head dimension 8, 24 positions, MHA and GQA 4:1: hidden states against the reference to 1e-5."""
    model = (
        small_llada(d_model=32, n_layers=1, n_heads=4, n_kv_heads=kv_heads)
        if family == "llada"
        else small_dream(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=kv_heads)
    )
    tensors, tokens = random_tensors(model), np.random.default_rng(1).integers(0, 40, 24)
    loaded = load_model(write_checkpoint(tmp_path / "m", model, tensors), dtype="float32")
    reference = numpy_model.from_tensors(model, tensors)
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(loaded(tokens[None], np.arange(24)[None]))[0]
    right = numpy_model.hidden_states(reference, tokens)[-1]
    wrong = numpy_model.hidden_states(reference, tokens, interleaved=True)[-1]
    assert np.abs(ours - right).max() < 1e-5
    assert np.abs(ours - wrong).max() > 1e-2


@pytest.mark.parametrize("name", ["llada_gqa", "dream"])
def test_b71_a_window_over_unrotated_keys_equals_the_full_pass(name):
    """Rows 5... alone, over keys and values cached from the full pass, at their own positions."""
    model, start = load_model(checkpoint(name), dtype="float32"), 5
    theta, tokens = model.spec.rope_theta, np.random.default_rng(2).integers(0, 256, (1, 24))
    positions = np.arange(24)[None]
    with jax.default_matmul_precision("highest"):
        full = model(tokens, positions)
        x, window = model.embed(tokens), model.embed(tokens[:, start:])
        for layer in model.layers:
            q, k, v = layer.project(x)
            x = layer.finish(
                x, attend(q, as_keys(k), as_values(v), q_positions=positions, k_positions=positions, theta=theta)
            )
            rows = layer.project(window)
            heads = attend(
                rows.q, as_keys(k), as_values(v), q_positions=positions[:, start:], k_positions=positions, theta=theta
            )
            window = layer.finish(window, heads)
    assert np.abs(np.asarray(window - full[:, start:])).max() < 1e-4
    reference = numpy_model.hidden_states(numpy_model.load(checkpoint(name)), tokens[0])[-1]
    assert relative_gap(np.asarray(window)[0], reference[start:]) < 1e-5


@pytest.mark.parametrize("name", ["llada_gqa", "dream"])
def test_b71_left_padding_moves_columns_not_positions(name, forward):
    model, pad = load_model(checkpoint(name), dtype="float32"), 5
    tokens = np.random.default_rng(4).integers(0, 256, 19)
    canvas = np.concatenate([np.full(pad, 3), tokens])
    column = np.arange(pad + 19)
    padded = forward(model, canvas, positions=np.maximum(column - pad, 0), valid=column >= pad)
    assert relative_gap(padded[pad:], numpy_model.logits(numpy_model.load(checkpoint(name)), tokens)) < 1e-5


@pytest.mark.parametrize("jit", [False, True])
def test_b22_rms_norm_rounds_before_it_scales(jit):
    """bf16: variance in float32, back to bf16, then times the weight in bf16, bit for bit."""
    rng = np.random.default_rng(0)
    width = 512
    x = np.where(rng.random((64, width)) < 0.5, 1e2, 1e-2) * rng.standard_normal((64, width))
    x, weight = x.astype(ml_dtypes.bfloat16), rng.standard_normal(width).astype(ml_dtypes.bfloat16)
    norm = RMSNorm(width, 1e-5, dtype=jnp.bfloat16)
    norm.weight.set_value(jnp.asarray(weight))
    graph, state = nnx.split(norm)
    apply = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    ours = np.asarray((jax.jit(apply) if jit else apply)(state, jnp.asarray(x)))
    reference = numpy_model.rms_norm(x, weight, 1e-5)
    assert ours.dtype == reference.dtype == ml_dtypes.bfloat16
    unequal = ours.view(np.uint16) != reference.view(np.uint16)
    assert not unequal.any(), f"{unequal.sum()} of {unequal.size} differ"
    wide = x.astype(np.float32)
    scaled_first = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-5)) * weight.astype(np.float32)
    narrow = x * x
    for other in (
        scaled_first.astype(ml_dtypes.bfloat16),
        x / np.sqrt(narrow.mean(-1, keepdims=True) + ml_dtypes.bfloat16(1e-5)) * weight,
    ):
        assert (other.view(np.uint16) != reference.view(np.uint16)).any()  # the orders can be told apart here
