"""What Polestar keeps between passes.

Shape letters: b sequences, n canvas columns, B block capacity, w window rows, K clusters, d width, h query heads, g
key/value heads, e head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention import Distribution
from polestar_jax.decode.state import kept
from polestar_jax.polestar.clusters import Clusters
from polestar_jax.polestar.residency import park
from polestar_jax.polestar.residuals import Stored, store
from polestar_jax.spec import ModelSpec


class LayerCache(NamedTuple):
    """One layer's part.

    Attributes:
      k: [b, g, n, e], v: [b, g, e, n] in the model's dtype, keys before rotation: of every canvas column.
      hidden: the states that enter the layer for window rows [b, w, d], see :class:`Stored`; possibly in host memory.
      clusters: of those states, see :class:`Clusters`; the centroids follow their members at refreshes.
      proxy: of K rows, the centroids' attention at the last refresh or block entry, see :class:`Distribution`.
    """

    k: jax.Array
    v: jax.Array
    hidden: Stored
    clusters: Clusters
    proxy: Distribution


class PolestarState(NamedTuple):
    """All layers, and what is not a layer's.

    Attributes:
      layers: one LayerCache each; separate arrays, so that each is updated in place.
      attention: of B + shift rows, attention of the block's at the last layer in the previous pass.
      since_refresh: i32 [b], tokens committed in the block since its entry or the last refresh.
    """

    layers: tuple[LayerCache, ...]
    attention: Distribution
    since_refresh: jax.Array


def settled(takes_part: jax.Array, new: Any, old: Any) -> Any:
    """The pytree ``new`` for sequences that take part in the pass, bool [b], ``old`` for the others. A sequence that is alone
    takes part in every pass that is run: its arrays are updated in place instead of being merged."""
    return new if takes_part.shape[0] == 1 else kept(takes_part, new, old)


def empty(
    spec: ModelSpec,
    *,
    batch: int,
    columns: int,
    block: int,
    window: int,
    clusters: int,
    form: str,
    residency: str,
    dtype: jnp.dtype,
) -> PolestarState:
    """Zeros everywhere: a block entry fills everything before it is read."""

    def layer() -> LayerCache:
        k = jnp.zeros((batch, spec.n_kv_heads, columns, spec.head_dim), dtype)
        v = jnp.zeros((batch, spec.n_kv_heads, spec.head_dim, columns), dtype)
        rows = jax.ShapeDtypeStruct((batch, window, spec.d_model), jnp.float32)
        stored = jax.eval_shape(lambda rows: store(rows, rows, form, dtype), rows)
        stored = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stored)
        found = Clusters(
            jnp.zeros((batch, clusters, spec.d_model), jnp.float32),
            jnp.full((batch, window), clusters, jnp.int32),
            jnp.zeros((batch, clusters), jnp.float32),
        )
        return LayerCache(k, v, park(stored, residency), found, nowhere(clusters))

    def nowhere(rows: int) -> Distribution:
        shape = (batch, spec.n_heads, rows)
        return Distribution(jnp.zeros((*shape, columns), jnp.float32), jnp.zeros(shape, jnp.float32))

    layers = tuple(layer() for _ in range(spec.n_layers))
    return PolestarState(layers, nowhere(block + spec.logit_shift), jnp.zeros(batch, jnp.int32))
