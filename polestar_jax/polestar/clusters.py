"""Spherical k-means over a window's hidden states, deterministic and under static shapes (paper section 4.1).

The window's prefix and suffix parts are clustered apart; the K cluster ids are shared out between them, prefix first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# At layer 0 all mask rows of the suffix are equal, so a tie between clusters must not hang on rounding.
COSINE_TIE = 1e-5
KINDS = ("paper", "release")


class Clusters(NamedTuple):
    """Clusters of each sequence's window.

    Attributes:
      centroids: f32 [b, K, d], the mean of each cluster's members.
      labels: i32 [b, w] cluster of each row; K for a dead row.
      counts: f32 [b, K] number of members; -1 for a cluster of a part without rows, which does not exist.
    """

    centroids: jax.Array
    labels: jax.Array
    counts: jax.Array


class _Parts(NamedTuple):
    """How clusters and rows are shared out: ``start`` i32 [b, K] the window slot each cluster starts from; ``allowed`` bool
    [b, w, K] which clusters a row may join; ``single`` i32 [b, w] the cluster a row has to itself, -1 if none; ``absent``
    bool [b, K] clusters of a part without rows."""

    start: jax.Array
    allowed: jax.Array
    single: jax.Array
    absent: jax.Array


def cluster(x: jax.Array, live: jax.Array, prefix: int, *, clusters: int, iterations: int, kind: str) -> Clusters:
    """Cluster the rows x f32 [b, w, d], of which ``live`` bool [b, w] exist and the first ``prefix`` slots are the prefix part.

    Each of ``iterations`` rounds gives every row the lowest cluster id whose cosine is within COSINE_TIE of the largest, then
    every cluster the plain mean of its members. A cluster starts from row floor(i W / K) of its part's W rows for the i-th of
    its K clusters. A part with no more rows than clusters has each row by itself. An empty cluster keeps its centroid
    (kind "paper") or takes its first row again ("release", which also never gives the prefix all K clusters).
    """
    parts = _share_out(live, prefix, clusters, kind)
    first = jnp.take_along_axis(x, parts.start[..., None], axis=1)
    unit = _normalised(x)

    def assigned(centroids: jax.Array) -> jax.Array:
        cosine = jnp.einsum("bwd,bkd->bwk", unit, _normalised(centroids), precision=lax.Precision.HIGHEST)
        cosine = jnp.where(parts.allowed, cosine, -jnp.inf)
        label = jnp.argmax(cosine >= jnp.max(cosine, axis=-1, keepdims=True) - COSINE_TIE, axis=-1)
        label = jnp.where(parts.single >= 0, parts.single, label)
        return jnp.where(live, label, clusters).astype(jnp.int32)

    def round_(_: int, found: Clusters) -> Clusters:
        labels = assigned(found.centroids)
        member = jax.nn.one_hot(labels, clusters, dtype=x.dtype)
        counts = jnp.sum(member, axis=1)
        total = jnp.einsum("bwk,bwd->bkd", member, x, precision=lax.Precision.HIGHEST)
        empty = first if kind == "release" else found.centroids
        centroids = jnp.where(counts[..., None] > 0, total / jnp.maximum(counts, 1)[..., None], empty)
        return Clusters(centroids, labels, counts)

    b, w, _ = x.shape
    start = Clusters(first, jnp.full((b, w), clusters, jnp.int32), jnp.zeros((b, clusters), x.dtype))
    found = lax.fori_loop(0, iterations, round_, start)
    return found._replace(counts=jnp.where(parts.absent, -1.0, found.counts))


def _share_out(live: jax.Array, prefix: int, clusters: int, kind: str) -> _Parts:
    w = live.shape[1]
    rows = jnp.sum(live[:, :prefix], axis=-1), jnp.sum(live[:, prefix:], axis=-1)
    share = jnp.clip(clusters * rows[0] // jnp.maximum(rows[0] + rows[1], 1), 1, clusters - 1)
    alone = clusters - 1 if kind == "release" else clusters
    first = jnp.where(rows[1] == 0, alone, jnp.where(rows[0] == 0, 0, share))[:, None]  # clusters of the prefix, [b, 1]

    c = jnp.arange(clusters)[None]
    ahead = c < first
    i = jnp.where(ahead, c, c - first)
    size = jnp.where(ahead, rows[0][:, None], rows[1][:, None])  # rows of the cluster's part
    among = jnp.where(ahead, first, clusters - first)
    few = size <= among
    nth = jnp.where(few, i % jnp.maximum(size, 1), i * size // jnp.maximum(among, 1))
    begin = jnp.where(ahead, prefix - rows[0][:, None], prefix)  # the part's first live slot
    exists = (size > 0) & (~few | (i < size) | (kind == "release"))

    slot = jnp.arange(w)[None]
    before = slot < prefix
    allowed = (before[..., None] == ahead[:, None]) & exists[:, None]
    offset = jnp.where(before, slot - (prefix - rows[0][:, None]), slot - prefix)
    single_part = jnp.where(before, rows[0][:, None] <= first, rows[1][:, None] <= clusters - first)
    single = jnp.where(single_part, offset + jnp.where(before, 0, first), -1)
    return _Parts(jnp.clip(begin + nth, 0, w - 1), allowed, jnp.where(live, single, -1), size == 0)


def _normalised(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-30))


def centroid_rows(centroids: jax.Array, labels: jax.Array) -> jax.Array:
    """The centroid of each row, f32 [b, w, d]; zeros for a dead row (label K)."""
    rows = jnp.take_along_axis(centroids, jnp.minimum(labels, centroids.shape[1] - 1)[..., None], axis=1)
    return jnp.where((labels < centroids.shape[1])[..., None], rows, 0.0)


def moved(clusters: Clusters, change: jax.Array) -> jax.Array:
    """Centroids after their members changed by ``change`` f32 [b, w, d] (zero for rows that did not): means stay means."""
    k = clusters.centroids.shape[1]
    member = jax.nn.one_hot(clusters.labels, k, dtype=change.dtype)
    total = jnp.einsum("bwk,bwd->bkd", member, change, precision=lax.Precision.HIGHEST)
    return clusters.centroids + total / jnp.maximum(clusters.counts, 1)[..., None]
