"""Which clusters drifted most (paper section 4.1); how far is :func:`pallas_kernels.attention.measure`'s to say."""

from __future__ import annotations

import jax
import jax.numpy as jnp

DRIFT_TIE = 1e-6


def most_drifted(drift: jax.Array, count: int) -> jax.Array:
    """The ``count`` clusters of largest drift, bool [b, K]; ties within DRIFT_TIE go to the lowest id. A cluster without members
    (-inf) comes last, and selecting it means nothing."""
    index = jnp.arange(drift.shape[-1])
    chosen = jnp.zeros(drift.shape, bool)
    for _ in range(count):
        best = jnp.max(jnp.where(chosen, -jnp.inf, drift), axis=-1, keepdims=True)
        first = jnp.argmax(~chosen & (drift >= best - DRIFT_TIE), axis=-1, keepdims=True)
        chosen = chosen | (index == first)
    return chosen
