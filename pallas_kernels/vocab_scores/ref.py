"""The definition of the vocabulary scores, in jax.numpy."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Ranges = tuple[tuple[int, int], ...]
EPSILON = 1e-10  # Dream's "entropy" order takes the logarithm of p + 1e-10


class VocabScores(NamedTuple):
    """What decoding needs to know of each row's distribution over the vocabulary; every field is [...].

    Attributes:
      token: int32, the most probable id, the lowest on ties.
      confidence: float32, its probability.
      margin: float32, its probability less that of the runner-up (0 on a tie).
      neg_entropy: float32, sum of p log(p + 1e-10), in nats.
      lse: float32, log-sum-exp of the logits that take part.
    """

    token: jax.Array
    confidence: jax.Array
    margin: jax.Array
    neg_entropy: jax.Array
    lse: jax.Array


def in_ranges(ids: jax.Array, ranges: Ranges) -> jax.Array:
    """Which ids lie in one of the half-open ranges: bool, in the shape of ids."""
    inside = jnp.zeros(ids.shape, bool)
    for start, stop in ranges:
        inside |= (ids >= start) & (ids < stop)
    return inside


def vocab_scores(logits: jax.Array, *, barred: Ranges, first_allowed: int) -> VocabScores:
    """Scores of logits [..., v]. ``barred`` ids take no part; ``first_allowed`` is the lowest id outside them."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    scores = jnp.where(in_ranges(ids, barred), -jnp.inf, logits.astype(jnp.float32))
    p = jax.nn.softmax(scores, axis=-1)
    # A row without a distribution (no finite logit) still names an allowed id.
    has_top = jnp.max(scores, axis=-1) > -jnp.inf
    token = jnp.where(has_top, jnp.argmax(scores, axis=-1).astype(jnp.int32), first_allowed)
    lse = jax.nn.logsumexp(scores, axis=-1)
    confidence = jnp.where(jnp.isfinite(lse), jnp.max(p, axis=-1), jnp.nan)  # XLA's maximum may drop a NaN
    runner_up = jnp.max(jnp.where(ids == token[..., None], 0.0, p), axis=-1)
    return VocabScores(
        token=token,
        confidence=confidence,
        margin=confidence - runner_up,
        neg_entropy=jnp.sum(p * jnp.log(p + EPSILON), axis=-1),
        lse=lse,
    )
