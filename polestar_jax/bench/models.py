"""Random models and prompts: a pass takes the time it takes whatever the weights and tokens say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from polestar_jax.bench.sizes import random_spec
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec


def random_model(sizes: dict[str, Any], *, seed: int, dtype: str) -> Denoiser:
    """A denoiser with random weights of these sizes in ``dtype``."""
    make = nnx.jit(lambda rngs: Denoiser(random_spec(sizes), rngs, dtype=jnp.dtype(dtype)))
    return jax.block_until_ready(make(nnx.Rngs(seed)))


def random_prompts(spec: ModelSpec, count: int, length: int, *, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids, none of them special."""
    special = {spec.mask_id, spec.eos_id, spec.bos_id, *spec.stop_ids}
    plain = np.setdiff1d(np.arange(spec.vocab_size), [token for token in special if token is not None])
    return np.random.default_rng(seed).choice(plain, (count, length)).tolist()
