"""The definition of the vocabulary scores, in jax.numpy."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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


def as_ranges(barred: tuple[int, ...], vocab: int) -> tuple[Ranges, int]:
    """Barred ids as half-open ranges in rising order, and the lowest id outside them.

    Raises:
      ValueError: a barred id outside the vocabulary, or all ids barred.
    """
    ranges: list[tuple[int, int]] = []
    first_allowed = 0
    for token in sorted({int(token) for token in barred}):
        if not 0 <= token < vocab:
            raise ValueError(f"barred id {token} is outside the vocabulary of {vocab} ids")
        first_allowed += token == first_allowed
        if ranges and ranges[-1][1] == token:
            ranges[-1] = (ranges[-1][0], token + 1)
        else:
            ranges.append((token, token + 1))
    if first_allowed == vocab:
        raise ValueError(f"barred: all {vocab} ids are barred")
    return tuple(ranges), first_allowed


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
    top = jnp.max(scores, axis=-1)
    found = top > -jnp.inf  # a row without a distribution still names an allowed id
    token = jnp.where(found, jnp.argmax(scores, axis=-1).astype(jnp.int32), first_allowed)
    relative = jnp.exp(scores - jnp.where(found, top, 0.0)[..., None])  # to the most probable id
    mass = jnp.where(found, _sum(relative), jnp.nan)
    p = relative / mass[..., None]
    return VocabScores(
        token=token,
        confidence=1.0 / mass,
        margin=(1.0 - jnp.max(jnp.where(ids == token[..., None], 0.0, relative), axis=-1)) / mass,
        neg_entropy=_sum(p * jnp.log(p + EPSILON)),
        lse=jnp.where(top == -jnp.inf, top, top + jnp.log(mass)),
    )


def _sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis in two stages: one running float32 sum of 126,464 terms is off by up to 1e-4 on a CPU."""
    stage = 256
    *lead, count = x.shape
    padded = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -count % stage)])
    partial = jnp.sum(padded.reshape(*lead, -(-count // stage), stage), axis=-1)
    return jnp.sum(lax.optimization_barrier(partial), axis=-1)  # or the compiler joins the two stages
