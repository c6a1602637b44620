"""Shape-only audit of the published models: names, counts and bytes through abstract construction, no memory used."""

import math
import resource

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from convert.keymap import expected_tensors, pieces
from polestar_jax.config import spec_from_config
from polestar_jax.models.denoiser import Denoiser
from tests.convert.checkpoints import CHECKPOINTS, config


def abstract_shapes(spec):
    """Path -> shape of every weight of the denoiser, none of them made."""
    _, state = nnx.split(Denoiser.abstract(spec, jnp.bfloat16))
    return {path: (leaf.shape, leaf.dtype) for path, leaf in nnx.to_flat_state(state)}


@pytest.mark.parametrize(
    ("name", "tensors", "gigabytes"), [("llada_8b_instruct", 291, 16.03), ("dream_v0_instruct_7b", 339, 15.23)]
)
def test_published_models_have_the_published_tensors(name, tensors, gigabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spec = spec_from_config(config(name), source=name)
    weights = abstract_shapes(spec)
    slots = {slot.path: slot for piece in pieces(spec) for slot in piece.slots}
    assert {path: (slot.shape, jnp.bfloat16) for path, slot in slots.items()} == weights
    expected = expected_tensors(spec)
    assert len(expected) == tensors == sum(len(slot.sources) for slot in slots.values())
    size = 2 * sum(math.prod(shape) for shape in expected.values())
    assert size == 2 * sum(math.prod(shape) for shape, _ in weights.values())
    assert round(size / 1e9, 2) == gigabytes
    if name == "llada_8b_instruct":
        assert size == 16_031_162_368
    assert not [array for array in jax.live_arrays() if array.nbytes > 1 << 20]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB; the weights are 16,000,000


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_weight_has_exactly_one_source(name):
    spec = spec_from_config(config(name), source=name)
    slots = [slot for piece in pieces(spec) for slot in piece.slots]
    assert {slot.path: slot.shape for slot in slots} == {
        path: shape for path, (shape, _) in abstract_shapes(spec).items()
    }
    names = [tensor.name for slot in slots for tensor in slot.sources]
    assert len(names) == len(set(names)) == {"llada_1layer": 12, "dream": 39}.get(name, 30)
    for slot in slots:
        assert math.prod(slot.shape) == sum(math.prod(tensor.shape) for tensor in slot.sources)


def test_llada_names_as_published():
    expected = expected_tensors(spec_from_config(config("llada_8b_instruct"), source="x"))
    assert expected["model.transformer.wte.weight"] == expected["model.transformer.ff_out.weight"] == (126464, 4096)
    assert expected["model.transformer.blocks.31.ff_out.weight"] == (4096, 12288)
    assert expected["model.transformer.blocks.0.ff_proj.weight"] == (12288, 4096)
    assert expected["model.transformer.blocks.0.attn_out.weight"] == (4096, 4096)


def test_dream_names_as_published():
    expected = expected_tensors(spec_from_config(config("dream_v0_instruct_7b"), source="x"))
    assert expected["lm_head.weight"] == expected["model.embed_tokens.weight"] == (152064, 3584)
    assert expected["model.layers.27.self_attn.k_proj.weight"] == (512, 3584)
    assert expected["model.layers.27.self_attn.v_proj.bias"] == (512,)
    assert "model.layers.0.self_attn.o_proj.bias" not in expected
