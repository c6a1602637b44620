"""A layer's stored window states: taken out with the packet of the layer below in place, and put back (specification 5.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.residual import Patched, patched, quantised
from polestar_jax.models.denoiser import RMSNorm
from polestar_jax.polestar.clusters import Clusters, centroid_rows
from polestar_jax.polestar.residuals import Stored, restore, store

# Formats whose values a kernel serves -> whether it is the rows, not their residuals, that are quantised.
FUSED = {"nvfp4": False, "nvfp4_direct": True}


def taken(
    stored: Stored, clusters: Clusters, packet: jax.Array, chosen: jax.Array, norm: RMSNorm, form: str
) -> Patched:
    """The states with the packet's rows [b, w, d] in place of those ``chosen`` bool [b, w], how much they changed, and their
    norm, which feeds the layer's projection."""
    if form in FUSED:
        return patched(
            stored,
            clusters.centroids,
            clusters.labels,
            packet,
            chosen,
            norm.weight[...],
            eps=norm.eps,
            direct=FUSED[form],
        )
    before = restore(stored, centroid_rows(clusters.centroids, clusters.labels), form)
    picked = chosen[..., None]
    states = jnp.where(picked, packet.astype(jnp.float32), before)
    return Patched(states, jnp.where(picked, states - before, 0.0), norm(states.astype(packet.dtype)))


def kept_as(states: jax.Array, clusters: Clusters, form: str, dtype: jnp.dtype) -> Stored:
    """States f32 [b, w, d] as they are stored, against the centroids of their clusters. Dead rows should be zero."""
    if form in FUSED:
        return Stored(*quantised(states, clusters.centroids, clusters.labels, direct=FUSED[form]))
    return store(states, centroid_rows(clusters.centroids, clusters.labels), form, dtype)
