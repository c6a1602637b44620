"""The definitions, in jax.numpy.

Shape letters: b sequences, w rows, d width, K centroids.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.residual import nvfp4
from pallas_kernels.residual.nvfp4 import GROUP, Nvfp4


class Stored(Protocol):
    """Anything with the fields of :class:`Nvfp4`."""

    @property
    def codes(self) -> jax.Array: ...

    @property
    def scales(self) -> jax.Array: ...

    @property
    def scale(self) -> jax.Array: ...


class Patched(NamedTuple):
    """Rows read back, with those of a packet in place.

    Attributes:
      states: f32 [b, w, d].
      change: f32 [b, w, d], states less what was stored; zero for rows that the packet did not replace.
      normed: [b, w, d] in the packet's dtype, the states' root mean square norm.
    """

    states: jax.Array
    change: jax.Array
    normed: jax.Array


def centroid_rows(centroids: jax.Array, labels: jax.Array) -> jax.Array:
    """The centroid of each row, f32 [b, w, d], from f32 [b, K, d]; zeros for a label outside 0 .. K - 1."""
    count = centroids.shape[1]
    rows = jnp.take_along_axis(centroids, jnp.clip(labels, 0, count - 1)[..., None], axis=1)
    return jnp.where(((labels >= 0) & (labels < count))[..., None], rows, 0.0)


def quantise(values: jax.Array) -> Nvfp4:
    """``values`` f32 [b, w, d] in NVFP4. NaN or infinity anywhere in a sequence makes all of that sequence NaN."""
    b, w, d = values.shape
    groups = values.reshape(b, w, d // GROUP, GROUP)
    scale = scale_of(values)
    codes, scales = nvfp4.encode(groups, jnp.broadcast_to(scale[:, None, None], groups.shape[:-1]))
    return Nvfp4(nvfp4.packed(codes.reshape(b, w, d), 4), scales.astype(jnp.uint8), scale)


def scale_of(values: jax.Array) -> jax.Array:
    """The scale of each sequence, f32 [b], of values f32 [b, w, d]."""
    return nvfp4.sequence_scale(jnp.max(jnp.abs(values), axis=(1, 2), initial=0.0))


def dequantise(stored: Stored) -> jax.Array:
    """The values f32 [b, w, d] that :func:`quantise` kept."""
    step = stored.scale[:, None, None] * nvfp4.from_e4m3(stored.scales.astype(jnp.int32))
    return nvfp4.from_e2m1(nvfp4.unpacked(stored.codes, 4), jnp.repeat(step, GROUP, axis=-1))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm of rows x [..., d]: statistics in float32, cast back, then times the weight in its dtype."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype) * weight


def patched(
    stored: Stored,
    centroids: jax.Array,
    labels: jax.Array,
    packet: jax.Array,
    chosen: jax.Array,
    norm_weight: jax.Array,
    *,
    eps: float,
    direct: bool,
) -> Patched:
    """See :func:`pallas_kernels.residual.patched`."""
    before = dequantise(stored)
    if not direct:
        before = before + centroid_rows(centroids, labels)
    replaced = chosen[..., None]
    states = jnp.where(replaced, packet.astype(jnp.float32), before)
    change = jnp.where(replaced, states - before, 0.0)
    return Patched(states, change, rms_norm(states.astype(packet.dtype), norm_weight, eps))


def quantised(states: jax.Array, centroids: jax.Array, labels: jax.Array, *, direct: bool) -> Nvfp4:
    """See :func:`pallas_kernels.residual.quantised`."""
    return quantise(states if direct else states - centroid_rows(centroids, labels))
