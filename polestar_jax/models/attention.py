"""Attention of some rows over given keys and values, with half-split rotary embedding.

Keys are cached before rotation and rotated where they are used: the drift proxy compares content without positions
(paper section 4.1), and a cached key never depends on where padding puts its column.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of x [b, r, h, e] at positions i32 [b, r], computed in float32, returned in x's dtype."""
    half = x.shape[-1] // 2
    inverse = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


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
      q: [b, r, h, e], unrotated; k, v: [b, n, g, e], keys unrotated.
      q_positions: i32 [b, r]; k_positions: i32 [b, n].
      valid: bool [b, n] keys that exist, or [b, r, n], or None for all. A row with no valid key returns a finite mean.
      theta: rotary base.

    Returns:
      [b, r, h, e] in q's dtype. Scores and softmax are float32.
    """
    b, r, h, e = q.shape
    g = k.shape[2]
    q = rotate(q, q_positions, theta).reshape(b, r, g, h // g, e)
    k = rotate(k, k_positions, theta)
    scores = jnp.einsum("brgqe,bnge->bgqrn", q, k, preferred_element_type=jnp.float32) * (e**-0.5)
    if valid is not None:
        keep = valid[:, None, None, None, :] if valid.ndim == 2 else valid[:, None, None, :, :]
        scores = jnp.where(keep, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgqrn,bnge->brgqe", weights, v).reshape(b, r, h, e)
