"""Parts of a row's scores, and the rule that merges them: what every kernel over the vocabulary has in common.

Plain jax.numpy, used inside kernels and after them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.vocab_scores.ref import Ranges, VocabScores, in_ranges

LOWEST = -1e30  # stands for -inf: finite, so that differences of two of them are numbers; no real logit lies below
NO_TOKEN = 2**31 - 1
MAX_RANGES = 16  # of barred ids; each costs two comparisons per logit


class Partial(NamedTuple):
    """What a share of a row contributes; shares merge in any order.

    ``top`` and ``second`` float32: the two largest logits, with multiplicity; ``token`` int32: the lowest id of the
    largest; ``mass`` float32: sum of e^(s - top); ``slope`` float32: sum of e^(s - top) (s - top). ``top`` is never
    NaN: a NaN logit shows in ``mass``.
    """

    top: jax.Array
    second: jax.Array
    token: jax.Array
    mass: jax.Array
    slope: jax.Array


PARTIAL_DTYPES = Partial(jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.float32)


def clipped(s: jax.Array, ids: jax.Array, vocab: int, barred: Ranges) -> jax.Array:
    """Float32 logits s [..., n] of ``ids`` [n], with LOWEST for what is barred, outside the vocabulary or -inf."""
    return jnp.where(in_ranges(ids, barred) | (ids >= vocab) | (s < LOWEST), LOWEST, s)


def singles(s: jax.Array, ids: jax.Array) -> Partial:
    """Each clipped logit s [..., n] of ``ids`` [n] as a share of its own."""
    unknown = s != s
    return Partial(
        top=jnp.where(unknown, LOWEST, s),
        second=jnp.full(s.shape, LOWEST, jnp.float32),
        token=jnp.where(s > LOWEST, ids, NO_TOKEN),
        mass=jnp.where(unknown, s, 1.0),
        slope=jnp.zeros(s.shape, jnp.float32),
    )


def merge(parts: Partial) -> Partial:
    """Merge the parts along the last axis."""
    top = jnp.max(parts.top, axis=-1, keepdims=True)
    token = jnp.min(jnp.where(parts.top == top, parts.token, NO_TOKEN), axis=-1, keepdims=True)
    gap = parts.top - top
    weight = jnp.exp(gap)
    return Partial(
        top=jnp.squeeze(top, -1),
        second=jnp.max(jnp.where(parts.token == token, parts.second, parts.top), axis=-1),
        token=jnp.squeeze(token, -1),
        mass=jnp.sum(parts.mass * weight, axis=-1),
        slope=jnp.sum((parts.slope + parts.mass * gap) * weight, axis=-1),
    )


def finish(row: Partial, first_allowed: int) -> VocabScores:
    """Scores of whole rows."""
    found = row.top > LOWEST
    # An infinite or NaN logit has made mass or slope NaN; so has the lack of any finite one, here.
    mass = jnp.where(found, row.mass, jnp.nan)
    runner_up = jnp.where(row.second > LOWEST, jnp.exp(row.second - row.top), 0.0)
    log_mass = jnp.log(mass)
    return VocabScores(
        token=jnp.where(row.token == NO_TOKEN, first_allowed, row.token),
        confidence=1.0 / mass,
        margin=(1.0 - runner_up) / mass,
        neg_entropy=row.slope / mass - log_mass,
        lse=jnp.where(found, row.top + log_mass, -jnp.inf),
    )
