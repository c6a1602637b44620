"""How keys and values lie in a cache; attention over them is :func:`pallas_kernels.attention.attend`.

Keys are cached before rotation and rotated where they are used: the drift proxy compares content without positions
(paper section 4.1), and a cached key never depends on where padding puts its column. What a product sums over comes last,
so that it reads them as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def as_keys(rows: jax.Array) -> jax.Array:
    """Keys of rows [b, r, g, e] as [b, g, r, e]."""
    return jnp.moveaxis(rows, 1, 2)


def as_values(rows: jax.Array) -> jax.Array:
    """Values of rows [b, r, g, e] as [b, g, e, r]."""
    return jnp.moveaxis(rows, 1, 3)
