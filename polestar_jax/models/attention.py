"""Attention of some rows over given keys and values, with half-split rotary embedding.

Keys are cached before rotation and rotated where they are used: the drift proxy compares content without positions
(paper section 4.1), and a cached key never depends on where padding puts its column. Keys lie as [b, g, n, e] and values as
[b, g, e, n]: what a product sums over comes last, so that it reads them as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of x [..., e] at positions i32 that broadcast to x.shape[:-1]; in float32, returned in x's dtype."""
    half = x.shape[-1] // 2
    inverse = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention_weights(
    q: jax.Array,
    k: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    valid: jax.Array | None,
    theta: float,
) -> jax.Array:
    """What rows attend to: softmax over keys, f32 [b, h, r, n]; arguments as in :func:`attend`."""
    b, r, h, e = q.shape
    g, n = k.shape[1:3]
    q = rotate(q, q_positions[:, :, None], theta).reshape(b, r, g, h // g, e)
    k = rotate(k, k_positions[:, None], theta)
    scores = jnp.einsum("brgqe,bgne->bgqrn", q, k, preferred_element_type=jnp.float32) * (e**-0.5)
    if valid is not None:
        keep = valid[:, None, None, None, :] if valid.ndim == 2 else valid[:, None, None, :, :]
        scores = jnp.where(keep, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1).reshape(b, h, r, n)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    valid: jax.Array | None,
    theta: float,
) -> jax.Array:
    """Softmax attention of rows over keys; grouped query heads share a key/value head.

    Args:
      q: [b, r, h, e], unrotated; k: [b, g, n, e], unrotated; v: [b, g, e, n].
      q_positions: i32 [b, r]; k_positions: i32 [b, n].
      valid: bool [b, n] keys that exist, or [b, r, n], or None for all. A row with no valid key returns a finite mean.
      theta: rotary base.

    Returns:
      [b, r, h, e] in q's dtype. Scores and softmax are float32.
    """
    return mix(attention_weights(q, k, q_positions, k_positions, valid, theta), v)


def mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Values v [b, g, e, n] mixed by weights f32 [b, h, r, n]: [b, r, h, e] in v's dtype."""
    b, h, r, n = weights.shape
    g = v.shape[1]
    weights = weights.astype(v.dtype).reshape(b, g, h // g, r, n)
    # Values first: with few rows the compiler would order them so itself, with many it would transpose the cache instead.
    out = lax.dot_general(v, weights, (((3,), (4,)), ((0, 1), (0, 1))))  # [b, g, e, q, r]
    return jnp.transpose(out, (0, 4, 1, 3, 2)).reshape(b, r, h, v.shape[2])


def as_keys(rows: jax.Array) -> jax.Array:
    """Keys of rows [b, r, g, e] as [b, g, r, e]."""
    return jnp.moveaxis(rows, 1, 2)


def as_values(rows: jax.Array) -> jax.Array:
    """Values of rows [b, r, g, e] as [b, g, e, r]."""
    return jnp.moveaxis(rows, 1, 3)
