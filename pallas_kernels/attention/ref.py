"""The definitions, in jax.numpy.

Shape letters: b sequences, r query rows, h query heads, g key/value heads, n keys, e head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SMALLEST = math.log(1e-12)  # below this, log-probabilities count as equal; a masked key has none and so adds nothing
LOWEST = -1e30  # the score of a masked key: finite, so that differences of two of them are numbers


class Distribution(NamedTuple):
    """What rows attend to: the probability of a key is exp(scores - lse).

    Attributes:
      scores: f32 [b, h, r, n], scaled; LOWEST for a masked key.
      lse: f32 [b, h, r], their log-sum-exp.
    """

    scores: jax.Array
    lse: jax.Array

    @property
    def log_probabilities(self) -> jax.Array:
        """f32 [b, h, r, n]."""
        return self.scores - self.lse[..., None]


class Measured(NamedTuple):
    """Attention that is looked at.

    Attributes:
      distribution: what the rows attend to; None where it was not asked for.
      drift: f32 [b, r], mean over heads of KL(new || previous), at least 0; None without a previous distribution.
      out: [b, r, h, e], the attention's output; None without values.
    """

    distribution: Distribution | None
    drift: jax.Array | None
    out: jax.Array | None


def tables(positions: jax.Array, e: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles at positions i32 [...]: f32 [..., e / 2] each."""
    half = e // 2
    inverse = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Half-split rotary embedding of x [..., e] at positions i32 that broadcast to x.shape[:-1]; in float32, returned in x's
    dtype."""
    half = x.shape[-1] // 2
    cos, sin = tables(positions, x.shape[-1], theta)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def scored(q: jax.Array, k: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Scaled scores, f32 [b, h, r, n], of rotated rows q [b, r, h, e] and keys k [b, g, n, e]."""
    b, r, h, e = q.shape
    g, n = k.shape[1:3]
    scores = jnp.einsum("brgqe,bgne->bgqrn", q.reshape(b, r, g, h // g, e), k, preferred_element_type=jnp.float32)
    scores = (scores * (e**-0.5)).reshape(b, h, r, n)
    if valid is None:
        return scores
    return jnp.where(valid[:, None, None, :] if valid.ndim == 2 else valid[:, None], scores, LOWEST)


def mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Values v [b, g, e, n] mixed by weights f32 [b, h, r, n]: [b, r, h, e] in v's dtype."""
    b, h, r, n = weights.shape
    g = v.shape[1]
    weights = weights.astype(v.dtype).reshape(b, g, h // g, r, n)
    # Values first: with few rows the compiler would order them so itself, with many it would transpose the cache instead.
    out = lax.dot_general(v, weights, (((3,), (4,)), ((0, 1), (0, 1))))  # [b, g, e, q, r]
    return jnp.transpose(out, (0, 4, 1, 3, 2)).reshape(b, r, h, v.shape[2])


def divergence(new: Distribution, old: Distribution) -> jax.Array:
    """Mean over heads of KL(new || old), f32 [b, r], at least 0; probabilities below 1e-12 count as that. 0 for a row without
    a valid key."""
    new_log, old_log = (jnp.maximum(each.log_probabilities, SMALLEST) for each in (new, old))
    per_head = jnp.sum(jnp.exp(new_log) * (new_log - old_log), axis=-1)
    per_head = jnp.where(jnp.all(new.scores == LOWEST, axis=-1), 0.0, per_head)
    return jnp.maximum(jnp.mean(per_head, axis=1), 0.0)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Softmax attention of rotated rows and keys, [b, r, h, e] in q's dtype."""
    return mix(jax.nn.softmax(scored(q, k, valid), axis=-1), v)


def measure(
    q: jax.Array, k: jax.Array, v: jax.Array | None, valid: jax.Array | None, previous: Distribution | None
) -> Measured:
    """The same, with the distribution and its drift."""
    scores = scored(q, k, valid)
    new = Distribution(scores, jax.nn.logsumexp(scores, axis=-1))
    drift = None if previous is None else divergence(new, previous)
    return Measured(new, drift, None if v is None else mix(jax.nn.softmax(scores, axis=-1), v))
