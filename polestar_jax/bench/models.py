"""Random models and prompts: a pass takes the time it takes whatever the weights and tokens say."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from polestar_jax.bench.sizes import random_spec
from polestar_jax.models.denoiser import Block, Denoiser
from polestar_jax.spec import ModelSpec


def random_model(sizes: dict[str, Any], *, seed: int, dtype: str) -> Denoiser:
    """A denoiser with random weights of these sizes in ``dtype``."""
    return random_denoiser(random_spec(sizes), seed=seed, dtype=dtype)


def random_denoiser(spec: ModelSpec, *, seed: int, dtype: str) -> Denoiser:
    """A denoiser with random weights in ``dtype``, made on the device layer by layer: one small program makes them all, and no
    layer is ever there in another dtype."""
    kind = jnp.dtype(dtype)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Block(spec, nnx.Rngs(0), dtype=kind)))
    make = jax.jit(lambda key: nnx.split(Block(spec, nnx.Rngs(key), dtype=kind))[1])
    shallow = dataclasses.replace(spec, n_layers=1)
    model = nnx.jit(lambda rngs: Denoiser(shallow, rngs, dtype=kind))(nnx.Rngs(seed))
    keys = jax.random.split(jax.random.key(seed), spec.n_layers)
    model.layers = nnx.List([nnx.merge(graph, make(key)) for key in keys])
    model.spec = spec
    return jax.block_until_ready(model)


def random_prompts(spec: ModelSpec, count: int, length: int, *, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids, none of them special."""
    special = {spec.mask_id, spec.eos_id, spec.bos_id, *spec.stop_ids}
    plain = np.setdiff1d(np.arange(spec.vocab_size), [token for token in special if token is not None])
    return np.random.default_rng(seed).choice(plain, (count, length)).tolist()
