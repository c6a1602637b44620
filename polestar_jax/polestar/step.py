"""A step within a block, with or without a refresh of the window's most drifted clusters (specification 5).

A refresh walks the layers with a packet: the rows that the layer below recomputed. Each layer patches its stored states,
keys, values and centroids with the packet, computes the block, finds the clusters whose attention moved most and recomputes
their rows for the layer above. Block, window and centroids share each projection, so that a layer's weights are read once;
which window rows were selected is a mask over results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import Distribution, Measured, attend, measure
from polestar_jax.cache.base import live_rows
from polestar_jax.decode.rows import KEYS, VALUES, Rows, block_rows
from polestar_jax.decode.state import REFRESH_STEP, STEP, DecodeState, Pass, by_position
from polestar_jax.models.denoiser import Block, Denoiser
from polestar_jax.polestar.clusters import moved
from polestar_jax.polestar.drift import most_drifted
from polestar_jax.polestar.packet import kept_as, taken
from polestar_jax.polestar.residency import fetch, park
from polestar_jax.polestar.state import LayerCache, PolestarState, settled
from polestar_jax.polestar.window import spread, window_rows

if TYPE_CHECKING:
    from polestar_jax.polestar.cache import PolestarCache


class _Packet(NamedTuple):
    """Window rows recomputed by the layer below: their states [b, w, d], and which ones, bool [b, w]."""

    rows: jax.Array
    chosen: jax.Array


class _Walk(NamedTuple):
    """What is the same at every layer of a pass."""

    policy: PolestarCache
    model: Denoiser
    block: Rows
    window: Rows
    positions: jax.Array  # of the block's, then the window's rows
    canvas: jax.Array  # of every column
    active: jax.Array
    due: jax.Array

    @property
    def valid(self) -> jax.Array:
        return self.canvas >= 0

    @property
    def working(self) -> jax.Array:
        """Block rows of the sequences in this pass, bool [b, R]."""
        return jnp.broadcast_to(self.active[:, None], self.block.live.shape)

    @property
    def size(self) -> int:
        return self.block.columns.shape[1]


def advance(policy: PolestarCache, model: Denoiser, state: DecodeState, *, refresh: bool) -> Pass:
    """One pass over the block's rows; with ``refresh``, also over the window's and the centroids, for sequences that are due."""
    spec, active = model.spec, state.active
    shift = spec.logit_shift
    due, total = policy.due(spec, state)
    due = due & active & refresh
    block = block_rows(state, policy.block_length, shift)
    window = window_rows(state, policy.block_length, policy.window_prefix, policy.window_suffix)
    positions = jnp.concatenate([block.take(state.positions), window.take(state.positions)], axis=1)
    walk = _Walk(policy, model, block, window, positions, state.positions, active, due)
    x = model.embed(block.take(state.tokens))
    packet = _first_packet(walk, state) if refresh else None
    layers, records = [], []
    for i, (layer, old) in enumerate(zip(model.layers, state.cache.layers, strict=True)):
        previous = state.cache.attention if i == len(model.layers) - 1 else None
        if refresh:
            x, seen, packet, new, record = _refreshed(walk, layer, old, x, packet, previous)
            records.append(record)
        else:
            x, seen, new = _stepped(walk, layer, old, x, previous)
        layers.append(new)
    target = state.span_targets(policy.block_length)
    scored, sought = x[:, : policy.block_length], target
    if refresh and policy.score_suffix and policy.window_suffix:
        ahead = window.columns - state.prompt_columns + shift
        ahead = jnp.where(packet.chosen & (ahead < state.gen_length), ahead, state.gen_length)
        scored = jnp.concatenate([scored, packet.rows[:, policy.window_prefix :]], axis=1)
        sought = jnp.concatenate([target, ahead[:, policy.window_prefix :]], axis=1)
    return Pass(
        rows=scored,
        targets=sought,
        kind=jnp.where(due, REFRESH_STEP, STEP),
        full=jnp.zeros_like(due),
        computed=live_rows(block, state) + jnp.where(due, live_rows(window, state), 0),
        cache=PolestarState(
            tuple(layers),
            settled(active, seen.distribution, state.cache.attention),
            jnp.where(active, jnp.where(due, 0, total), state.cache.since_refresh),
        ),
        drift=by_position(seen.drift[:, shift:], target, state.gen_length, jnp.nan),
        record={
            name: jnp.stack([record[name] for record in records], axis=1) for name in (records[0] if records else ())
        },
    )


def _first_packet(walk: _Walk, state: DecodeState) -> _Packet:
    """The first layer's packet: none, or the embeddings of window tokens committed since the block was entered."""
    rows = walk.model.embed(walk.window.take(state.tokens))
    if not walk.policy.patch_committed:
        return _Packet(rows, jnp.zeros(walk.window.live.shape, bool))
    recent = state.committed_at >= (state.nfe - state.span_passes)[:, None]
    recent = jnp.concatenate([jnp.zeros((recent.shape[0], state.prompt_columns), bool), recent], axis=1)
    return _Packet(rows, walk.window.take(recent) & walk.window.live & walk.due[:, None])


def _stepped(
    walk: _Walk, layer: Block, old: LayerCache, x: jax.Array, previous: Distribution | None
) -> tuple[jax.Array, Measured | None, LayerCache]:
    """A layer without a refresh: (output rows, at the last layer what they attend to, new cache)."""
    q, k, v = layer.project(x)
    k = walk.block.write(old.k, k, walk.working, KEYS)
    v = walk.block.write(old.v, v, walk.working, VALUES)
    heads, seen = _attended(walk, q, (k, v), walk.positions[:, : walk.size], previous)
    return layer.finish(x, heads), seen, old._replace(k=k, v=v)


def _attended(
    walk: _Walk, q: jax.Array, cache: tuple[jax.Array, jax.Array], positions: jax.Array, previous: Distribution | None
) -> tuple[jax.Array, Measured | None]:
    """Attention of the block's rows and those after them, [b, r, h, e]; with ``previous``, also what the block's attend to."""
    rest = dict(k_positions=walk.canvas, theta=walk.model.spec.rope_theta, valid=walk.valid)
    if previous is None:
        return attend(q, *cache, q_positions=positions, **rest), None
    r = walk.size
    seen = measure(q[:, :r], *cache, previous=previous, q_positions=positions[:, :r], **rest)
    heads = seen.out
    if q.shape[1] > r:
        after = attend(q[:, r:], *cache, q_positions=positions[:, r:], **rest)
        heads = jnp.concatenate([heads, after], axis=1)
    return heads, seen._replace(out=None)


def _refreshed(
    walk: _Walk, layer: Block, old: LayerCache, x: jax.Array, packet: _Packet, previous: Distribution | None
) -> tuple[jax.Array, Measured | None, _Packet, LayerCache, dict[str, jax.Array]]:
    """A layer with a refresh: (output rows, at the last layer what they attend to, packet for the layer above, new cache, trace
    fields)."""
    policy, window, due = walk.policy, walk.window, walk.due
    r, w = walk.size, policy.window
    # Patch what the layer below recomputed.
    stored = fetch(old.hidden, policy.residency)
    form, norm = policy.quantization, layer.attn_norm
    states, change, normed = taken(stored, old.clusters, packet.rows, packet.chosen, norm, form)
    clusters = old.clusters._replace(centroids=moved(old.clusters, change))
    rows = jnp.concatenate([x, states.astype(x.dtype)], axis=1)
    q, k, v = layer.project_normed(jnp.concatenate([norm(x), normed, norm(clusters.centroids.astype(x.dtype))], axis=1))
    k_all = _written(walk, old.k, k, packet.chosen, KEYS)
    v_all = _written(walk, old.v, v, packet.chosen, VALUES)
    # Find the clusters whose attention moved most.
    proxy, moves, _ = measure(q[:, r + w :], k_all, previous=old.proxy, valid=walk.valid)
    # The release ranks empty clusters too, but not those that do not exist.
    least = 1 if policy.kmeans == "paper" else 0
    moves = jnp.where(clusters.counts >= least, moves, -jnp.inf)
    top = most_drifted(moves, policy.top(last=previous is not None))
    member = jnp.pad(top, ((0, 0), (0, 1)))  # label K: a dead row
    chosen = jnp.take_along_axis(member, clusters.labels, axis=1) & window.live & due[:, None]
    out, seen, recomputed = _computed(walk, layer, rows, q[:, : r + w], (k_all, v_all), chosen, previous)
    hidden = kept_as(states, clusters, form, walk.model.dtype)
    hidden, clusters, proxy = settled(due, (hidden, clusters, proxy), (stored, old.clusters, old.proxy))
    hidden = park(hidden, policy.residency)
    record = {
        "cluster_drift": jnp.where(due[:, None], moves, jnp.nan),
        "cluster_selected": top & due[:, None],
        "token_selected": spread(window, chosen, walk.canvas.shape[1], False),
    }
    return out, seen, _Packet(recomputed, chosen), LayerCache(k_all, v_all, hidden, clusters, proxy), record


def _computed(
    walk: _Walk,
    layer: Block,
    rows: jax.Array,
    q: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    chosen: jax.Array,
    previous: Distribution | None,
) -> tuple[jax.Array, Measured | None, jax.Array]:
    """The layer's output for the block's rows [b, R, d], at the last layer what they attend to, and its output for the window's
    rows [b, w, d], of which only the ``chosen`` count.

    ``rows`` are the block's, then the window's. By default all are computed, in one product with the block's; with a
    ``packet_capacity``, only as many as that where all chosen ones fit.
    """
    r, w, capacity = walk.size, walk.policy.window, walk.policy.packet_capacity

    def outputs(rows: jax.Array, q: jax.Array, positions: jax.Array) -> tuple[jax.Array, Measured | None, jax.Array]:
        heads, seen = _attended(walk, q, cache, positions, previous)
        out = layer.finish(rows, heads)
        return out[:, :r], seen, out[:, r:]

    if capacity is None or capacity == w:
        return outputs(rows, q, walk.positions)
    # Chosen rows first, each in its place among them.
    slots = jnp.argsort(~chosen, axis=1, stable=True)[:, :capacity]
    here = jnp.concatenate([jnp.broadcast_to(jnp.arange(r), (rows.shape[0], r)), r + slots], axis=1)

    def packed() -> tuple[jax.Array, Measured | None, jax.Array]:
        of = lambda array: array[jnp.arange(array.shape[0])[:, None], here]  # noqa: E731
        out, seen, some = outputs(of(rows), of(q), of(walk.positions))
        return out, seen, jnp.zeros_like(rows[:, r:]).at[jnp.arange(rows.shape[0])[:, None], slots].set(some)

    fits = jnp.all(jnp.sum(chosen, axis=1) <= capacity)
    return lax.cond(fits, packed, lambda: outputs(rows, q, walk.positions))


def _written(walk: _Walk, cache: jax.Array, rows: jax.Array, chosen: jax.Array, axis: int) -> jax.Array:
    """Cached keys or values with those of the packet's rows, then of the block's."""
    r = walk.size
    cache = walk.window.write(cache, rows[:, r : r + walk.policy.window], chosen, axis)
    return walk.block.write(cache, rows[:, :r], walk.working, axis)
