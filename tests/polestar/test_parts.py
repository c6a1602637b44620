"""Clustering, storage, ranking and cache writes, each against the plain definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax.decode.rows import KEYS, VALUES, Run
from polestar_jax.polestar import clusters, drift, residuals
from tests.oracles import polestar_parts as plain

PREFIX, SUFFIX = 12, 6


@pytest.fixture(scope="module")
def clustered():
    static = dict(static_argnames=("prefix", "clusters", "iterations", "kind"))
    return jax.jit(clusters.cluster, **static)


@pytest.mark.parametrize("kind", clusters.KINDS)
@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize(("before", "after"), [(12, 6), (3, 6), (12, 0), (0, 6), (1, 1), (12, 2)])
def test_clusters_equal_dynamic_kmeans(before, after, count, kind, clustered):
    """Whatever part of the window is dead, and with rows that are all equal, as mask rows are at the first layer."""
    rng = np.random.default_rng(before + 100 * after + count)
    x = rng.normal(size=(1, PREFIX + SUFFIX, 8)).astype(np.float32)
    x[:, PREFIX + 1 :] = x[:, PREFIX + 1 : PREFIX + 2]
    live = np.array([[PREFIX - before <= i < PREFIX + after for i in range(PREFIX + SUFFIX)]])
    found = clustered(jnp.where(live[..., None], x, 0), live, prefix=PREFIX, clusters=count, iterations=5, kind=kind)
    z, labels, exists = plain.cluster_window(x[live].astype(float), before, count, 5, release=kind == "release")
    np.testing.assert_array_equal(np.asarray(found.labels)[live], labels)
    assert (np.asarray(found.labels)[~live] == count).all()
    members = np.bincount(labels, minlength=count)
    np.testing.assert_array_equal(found.counts[0], np.where(exists, members, -1))
    np.testing.assert_allclose(found.centroids[0][members > 0], z[members > 0], atol=1e-6)
    if kind == "release":
        np.testing.assert_allclose(found.centroids[0][exists], z[exists], atol=1e-6)


def test_centroids_stay_the_means_of_rows_that_change(clustered):
    x = jax.random.normal(jax.random.key(0), (2, PREFIX + SUFFIX, 8))
    live = jnp.arange(PREFIX + SUFFIX)[None] >= jnp.array([[0], [5]])
    found = clustered(jnp.where(live[..., None], x, 0), live, prefix=PREFIX, clusters=4, iterations=5, kind="paper")
    change = jnp.where(live[..., None], jax.random.normal(jax.random.key(1), x.shape), 0)
    after = clusters.moved(found, change)
    for b in range(2):
        for c in range(4):
            rows = np.asarray(x + change)[b][np.asarray(found.labels)[b] == c]
            np.testing.assert_allclose(after[b, c], rows.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("form", residuals.GROUPS)
def test_stored_rows_read_back_as_the_format_says(form):
    rng = np.random.default_rng(3)
    rows = (rng.normal(size=(2, 7, 64)) * np.geomspace(1e-3, 30, 7)[:, None]).astype(np.float32)
    z = rng.normal(size=(2, 3, 64)).astype(np.float32)
    rows[:, 2, :32] = z[:, 1, :32]  # a group of zero residuals
    labels = np.array([[0, 1, 1, 2, 0, 2, 2], [1, 1, 1, 0, 0, 2, 0]])
    base = np.take_along_axis(z, labels[..., None], axis=1)
    stored = jax.jit(residuals.store, static_argnums=(2, 3))(rows, base, form, jnp.float32)
    back = jax.jit(residuals.restore, static_argnums=2)(stored, base, form)
    for b in range(2):
        expected = plain.store(rows[b].astype(float), z[b].astype(float), labels[b], form)
        # A code may round the other way where float32 and float64 differ in the last bit: never seen here.
        np.testing.assert_allclose(back[b], expected, rtol=1e-5, atol=1e-6)
    bits = {"none": 32, "fp8": 8, "int8": 8, "mxfp4": 4, "int2": 2, "nvfp4": 4, "nvfp4_direct": 4}[form]
    assert stored.codes.nbytes == rows.size * bits // 8


def test_quantisation_does_not_look_at_neighbours_in_the_batch():
    rows = jax.random.normal(jax.random.key(0), (2, 4, 32))
    zero = jnp.zeros_like(rows)
    both = residuals.restore(residuals.store(rows, zero, "nvfp4", jnp.float32), zero, "nvfp4")
    loud = rows.at[1].multiply(1000)
    other = residuals.restore(residuals.store(loud, zero, "nvfp4", jnp.float32), zero, "nvfp4")
    np.testing.assert_array_equal(both[0], other[0])


def test_ranking_breaks_ties_by_id_and_takes_empty_clusters_last():
    moves = jnp.array([[0.3, 0.5, 0.5 + 5e-7, 0.1], [-jnp.inf, 0.2, -jnp.inf, -jnp.inf]])
    assert np.asarray(drift.most_drifted(moves, 1)).nonzero()[1].tolist() == [1, 1]
    assert np.asarray(drift.most_drifted(moves, 2)).tolist() == [[False, True, True, False], [True, True, False, False]]
    assert np.asarray(drift.most_drifted(moves, 4)).all()


def test_most_drifted_of_many_clusters():
    moves = np.random.default_rng(0).permutation(60).astype(np.float32)[None]
    for count in (drift.WRITTEN_OUT, drift.WRITTEN_OUT + 1, 59):
        np.testing.assert_array_equal(drift.most_drifted(jnp.asarray(moves), count), moves >= 60 - count)


@pytest.mark.parametrize("batch", [1, 3])
def test_runs_are_written_where_they_are_live(batch):
    """Also where a run starts before the cache or ends behind it."""
    rng = np.random.default_rng(batch)
    for first in ([-2, 3, 8], [0, 6, -5], [5, -9, 12]):
        cache, rows = rng.normal(size=(batch, 2, 10, 3)), rng.normal(size=(batch, 5, 2, 3))
        column = np.array(first[:batch])[:, None] + np.arange(5)
        live = (column >= 0) & (column < 10) & (rng.random((batch, 5)) < 0.8)
        where = rng.random((batch, 5)) < 0.7
        expected = cache.astype(np.float32)
        for b, j in zip(*(live & where).nonzero(), strict=True):
            expected[b, :, column[b, j]] = rows[b, j]
        run, new = Run(jnp.array(first[:batch]), jnp.array(live)), jnp.asarray(rows, jnp.float32)
        np.testing.assert_array_equal(run.write(jnp.asarray(cache, jnp.float32), new, jnp.array(where), KEYS), expected)
        turned = jnp.asarray(np.swapaxes(cache, 2, 3), jnp.float32)
        got = run.write(turned, new, jnp.array(where), VALUES)
        np.testing.assert_array_equal(got, np.swapaxes(expected, 2, 3))
