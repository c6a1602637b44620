"""A block entry: its rows and its window's (or all) are computed, and the window is clustered anew (specification 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.attention import attend, measure
from polestar_jax.cache.base import live_rows
from polestar_jax.decode.rows import KEYS, VALUES, block_rows, every_row, joined
from polestar_jax.decode.state import FULL_ENTRY, LOCAL_ENTRY, DecodeState, Pass
from polestar_jax.models.attention import as_keys, as_values
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.polestar.clusters import cluster
from polestar_jax.polestar.packet import kept_as
from polestar_jax.polestar.residency import fetch, park
from polestar_jax.polestar.state import LayerCache, PolestarState, settled
from polestar_jax.polestar.window import spread, window_rows

if TYPE_CHECKING:
    from polestar_jax.polestar.cache import PolestarCache


def enter(policy: PolestarCache, model: Denoiser, state: DecodeState, *, full: bool) -> Pass:
    """One pass over every row (``full``) or over the block's and the window's rows.

    At each layer the window's entering states are clustered and stored, the centroids ride through the same projection as
    the rows, and their attention is kept.
    """
    spec, active = model.spec, state.active
    b, n = state.tokens.shape
    block = block_rows(state, policy.block_length, spec.logit_shift)
    window = window_rows(state, policy.block_length, policy.window_prefix, policy.window_suffix)
    size = block.columns.shape[1]
    rows = every_row(state) if full else joined(block, window)
    written = jnp.broadcast_to(active[:, None], rows.live.shape)
    positions, canvas = rows.take(state.positions), state.positions
    valid = canvas >= 0
    rest = dict(theta=spec.rope_theta, valid=valid)
    x = model.embed(rows.take(state.tokens))
    layers, labels = [], []
    for layer, old in zip(model.layers, state.cache.layers, strict=True):
        entering = jnp.where(window.live[..., None], window.take(x) if full else x[:, size:], 0).astype(jnp.float32)
        found = cluster(
            entering, window.live, policy.window_prefix,
            clusters=policy.clusters, iterations=policy.kmeans_iterations, kind=policy.kmeans,
        )  # fmt: skip
        hidden = kept_as(entering, found, policy.quantization, model.dtype)
        q, k, v = layer.project(jnp.concatenate([x, found.centroids.astype(x.dtype)], axis=1))
        r = x.shape[1]
        if full:
            k, v = settled(active, (as_keys(k[:, :r]), as_values(v[:, :r])), (old.k, old.v))
        else:
            k, v = rows.write(old.k, k[:, :r], written, KEYS), rows.write(old.v, v[:, :r], written, VALUES)
        proxy = measure(q[:, r:], k, valid=valid).distribution
        before = fetch(old.hidden, policy.residency)
        hidden, found, proxy = settled(active, (hidden, found, proxy), (before, old.clusters, old.proxy))
        layers.append(LayerCache(k, v, park(hidden, policy.residency), found, proxy))
        labels.append(spread(window, jnp.where(window.live, found.labels, -1), n, -1))
        q = q[:, :r]
        x = layer.finish(x, attend(q, k, v, q_positions=positions, k_positions=canvas, **rest))
    if full:
        q, x = block.take(q), block.take(x)
    q, x = q[:, :size], x[:, :size]
    attention = measure(q, k, q_positions=block.take(canvas), k_positions=canvas, **rest).distribution
    cache = PolestarState(
        tuple(layers),
        settled(active, attention, state.cache.attention),
        jnp.where(active, 0, state.cache.since_refresh),
    )
    return Pass(
        rows=x[:, : policy.block_length],
        targets=state.span_targets(policy.block_length),
        kind=jnp.full(b, FULL_ENTRY if full else LOCAL_ENTRY, jnp.int32),
        full=jnp.full(b, full),
        computed=live_rows(rows, state),
        cache=cache,
        drift=jnp.full(state.reason.shape, jnp.nan, jnp.float32),
        record={"labels": jnp.stack(labels, axis=1)},
    )
