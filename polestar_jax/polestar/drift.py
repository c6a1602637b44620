"""Which clusters drifted most (paper section 4.1); how far is :func:`pallas_kernels.attention.measure`'s to say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

DRIFT_TIE = 1e-6
WRITTEN_OUT = 16


def most_drifted(drift: jax.Array, count: int) -> jax.Array:
    """The ``count`` clusters of largest drift, bool [b, K]; ties within DRIFT_TIE go to the lowest id. A cluster without members
    (-inf) comes last, and selecting it means nothing."""
    index = jnp.arange(drift.shape[-1])

    def one_more(_: int, chosen: jax.Array) -> jax.Array:
        best = jnp.max(jnp.where(chosen, -jnp.inf, drift), axis=-1, keepdims=True)
        first = jnp.argmax(~chosen & (drift >= best - DRIFT_TIE), axis=-1, keepdims=True)
        return chosen | (index == first)

    # A few are written out, since a loop would end a CUDA graph; many would make a program as long.
    return lax.fori_loop(0, count, one_more, jnp.zeros(drift.shape, bool), unroll=count <= WRITTEN_OUT)
