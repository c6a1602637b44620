"""How far attention moved: of clusters (through their centroids) and of tokens (paper equations 3 and 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Below this, probabilities count as equal; padded keys have none and so add nothing.
SMALLEST = 1e-12
DRIFT_TIE = 1e-6


def proxy_attention(q: jax.Array, k: jax.Array, valid: jax.Array) -> jax.Array:
    """What centroids attend to, by content alone: a centroid has no position, so neither side is rotated.

    Args:
      q: [b, K, h, e] queries of the centroids; k: [b, g, n, e] cached keys before rotation.
      valid: bool [b, n].

    Returns:
      f32 [b, h, K, n], rows sum to 1.
    """
    b, c, h, e = q.shape
    g, n = k.shape[1:3]
    scores = jnp.einsum("bcgqe,bgne->bgqcn", q.reshape(b, c, g, h // g, e), k, preferred_element_type=jnp.float32)
    scores = jnp.where(valid[:, None, None, None], scores * (e**-0.5), jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1).reshape(b, h, c, n)


def divergence(new: jax.Array, old: jax.Array) -> jax.Array:
    """Mean over heads of KL(new || old) of distributions f32 [b, h, r, n]: f32 [b, r], at least 0."""
    new, old = jnp.maximum(new, SMALLEST), jnp.maximum(old, SMALLEST)
    per_head = jnp.sum(new * (jnp.log(new) - jnp.log(old)), axis=-1)
    return jnp.maximum(jnp.mean(per_head, axis=1), 0.0)


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
