"""The parts of Polestar decoding in plain NumPy, float64: clustering, ranking, KL drift, and the stored formats.

Each function is one paragraph of the method's description, written without regard to speed or static shapes.
"""

from __future__ import annotations

import numpy as np

COSINE_TIE = 1e-5
DRIFT_TIE = 1e-6
PROBABILITY_FLOOR = 1e-12

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1])
GROUP = {"nvfp4": 16, "fp8": 16, "int8": 16, "int2": 16, "mxfp4": 32}


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis; a score may be -inf."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def kl(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Mean over heads of KL(new || old): [h, r, s] and [h, r, s] -> [r]; floored probabilities, never negative."""
    new, old = np.maximum(new, PROBABILITY_FLOOR), np.maximum(old, PROBABILITY_FLOOR)
    return np.maximum((new * np.log(new / old)).sum(axis=-1).mean(axis=0), 0.0)


def split_clusters(clusters: int, prefix_rows: int, suffix_rows: int, *, reserve: bool) -> tuple[int, int]:
    """How many of the clusters the prefix part and the suffix part get.

    ``reserve``: one cluster is kept for the suffix even when it has no rows, and then stays absent.
    """
    if prefix_rows == 0:
        return 0, clusters
    if suffix_rows == 0:
        return (clusters - 1, 0) if reserve else (clusters, 0)
    prefix = clusters * prefix_rows // (prefix_rows + suffix_rows)
    prefix = min(max(prefix, 1), clusters - 1)
    return prefix, clusters - prefix


def kmeans(rows: np.ndarray, clusters: int, iterations: int, *, reseed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Spherical k-means of rows [n, d]: centroids [clusters, d] (plain means) and labels int [n].

    A cluster left without members keeps its centroid, or with ``reseed`` takes its initial row again. Where there are
    no more rows than clusters each row is its own centroid, and the centroids left over repeat the rows in turn (they
    have no members; without rows they are zero).
    """
    n = len(rows)
    if n == 0:
        return np.zeros((clusters, rows.shape[1])), np.zeros(0, int)
    if n <= clusters:
        return rows[np.arange(clusters) % n].copy(), np.arange(n)
    initial = rows[np.arange(clusters) * n // clusters]
    centroids, labels = initial.copy(), np.zeros(n, int)
    for _ in range(iterations):
        cosines = unit(rows) @ unit(centroids).T
        near = cosines >= cosines.max(axis=1, keepdims=True) - COSINE_TIE
        labels = near.argmax(axis=1)
        for cluster in range(clusters):
            members = rows[labels == cluster]
            if len(members):
                centroids[cluster] = members.mean(axis=0)
            elif reseed:
                centroids[cluster] = initial[cluster]
    return centroids, labels


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows scaled to length one."""
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def cluster_window(
    rows: np.ndarray, prefix_rows: int, clusters: int, iterations: int, *, release: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both parts of a window [w, d], prefix rows first.

    Returns centroids [clusters, d], labels int [w], and which clusters exist, bool [clusters] (a reserved one does not).
    """
    k_prefix, k_suffix = split_clusters(clusters, prefix_rows, len(rows) - prefix_rows, reserve=release)
    z_prefix, m_prefix = kmeans(rows[:prefix_rows], k_prefix, iterations, reseed=release)
    z_suffix, m_suffix = kmeans(rows[prefix_rows:], k_suffix, iterations, reseed=release)
    absent = clusters - k_prefix - k_suffix
    centroids = np.concatenate([z_prefix, z_suffix, np.zeros((absent, rows.shape[1]))])
    labels = np.concatenate([m_prefix, m_suffix + k_prefix])
    return centroids, labels, np.arange(clusters) < clusters - absent


def top_clusters(drift: np.ndarray, count: int) -> list[int]:
    """The clusters of largest drift, one after the other, each the lowest id within the tie width of the maximum."""
    chosen: list[int] = []
    for _ in range(min(count, len(drift))):
        rest = [c for c in range(len(drift)) if c not in chosen]
        largest = max(drift[c] for c in rest)
        chosen.append(next(c for c in rest if drift[c] >= largest - DRIFT_TIE))
    return chosen


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """x rounded to the nearest of ± grid (ascending from 0), halves to the even index, beyond the ends to the ends."""
    magnitude = np.minimum(np.abs(x), grid[-1])
    upper = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    below, above = magnitude - grid[upper - 1], grid[upper] - magnitude
    index = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, upper - 1)
    return np.copysign(grid[index], x)


def quantised(x: np.ndarray, quantization: str) -> np.ndarray:
    """What x [n, d] reads back as after being stored in a format, groups along d.

    nvfp4: E2M1 codes in groups of 16, an E4M3 scale per group and one float32 scale for the array. mxfp4: E2M1 codes in
    groups of 32 with a power-of-two scale, 2 to the floor of log2 of the group's largest magnitude, less 2 (the
    exponent of the largest code), so what lies above six scales saturates. fp8, int8, int2: groups of 16 with a
    float32 scale, the group's largest magnitude over the largest code: 448 (E4M3), 127 and 1; int8 has the codes
    -127 ... 127 and int2 the three codes -1, 0, 1. An all-zero group reads back as zero.
    """
    if quantization == "none" or x.size == 0:
        return x.copy()
    size = GROUP[quantization]
    if x.shape[-1] % size:
        raise ValueError(f"width {x.shape[-1]} is not a multiple of the group size {size} of {quantization}")
    groups = x.reshape(len(x), -1, size)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    if quantization == "nvfp4":
        whole = np.float64(np.float32(largest.max() / (6 * 448)))
        scale = whole * nearest(largest / (6 * whole), E4M3) if whole > 0 else np.zeros_like(largest)
        grid = E2M1
    elif quantization == "mxfp4":
        exponent = np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - 2
        scale = np.where(largest > 0, 2.0 ** np.clip(exponent, -127, 127), 0.0)
        grid = E2M1
    else:
        grid = {"fp8": E4M3, "int8": np.arange(128.0), "int2": np.arange(2.0)}[quantization]
        scale = np.float32(largest / grid[-1]).astype(np.float64)
    codes = nearest(groups / np.where(scale > 0, scale, 1.0), grid)
    return (codes * scale).reshape(x.shape)


def store(rows: np.ndarray, centroids: np.ndarray, labels: np.ndarray, quantization: str) -> np.ndarray:
    """Window rows as they read back: the centroid plus the residual in the format ("nvfp4_direct": no centroid)."""
    if quantization == "none":
        return rows.copy()
    if quantization == "nvfp4_direct":
        return quantised(rows, "nvfp4")
    base = centroids[labels]
    return base + quantised(rows - base, quantization)
