"""Recording what happened, pass by pass, inside the jitted loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Field -> (dtype, fill value, shape after [passes, b] as a function of G). "block" and "kind" are one number a pass.
_PER_POSITION = {
    "tokens": (jnp.int32, -1),
    "confidence": (jnp.float32, jnp.nan),
    "committed": (jnp.bool_, False),
    "drift": (jnp.float32, jnp.nan),
    "delta": (jnp.float32, jnp.nan),
}
_PER_PASS = {"block": (jnp.int32, -1), "kind": (jnp.int32, -1)}
# Of cluster-based caches, by layer.
_PER_CLUSTER = {"cluster_drift": (jnp.float32, jnp.nan), "cluster_selected": (jnp.bool_, False)}
_PER_COLUMN = {"token_selected": (jnp.bool_, False), "labels": (jnp.int32, -1)}
FIELDS = (*_PER_POSITION, *_PER_PASS, *_PER_CLUSTER, *_PER_COLUMN)


class Trace:
    """Which fields to record: any of ``FIELDS``; all of them when none is named. Hashable, compared by value.

    Per-position fields become [passes, b, G]: ``tokens`` after the pass, ``confidence`` (NaN where not scored), ``committed``,
    ``drift`` and ``delta`` (NaN where a method has none). ``block`` and ``kind`` become [passes, b]. For caches with K clusters
    over the n columns of the canvas, ``cluster_drift`` (NaN but for refreshes) and ``cluster_selected`` become
    [passes, b, L, K], ``token_selected`` and ``labels`` (block entries only; K in no cluster, -1 outside the window)
    [passes, b, L, n]; for other caches they are left out.
    """

    def __init__(self, *fields: str):
        unknown = sorted(set(fields) - set(FIELDS))
        if unknown:
            raise ValueError(f"unknown trace field {unknown[0]!r}; known: {', '.join(FIELDS)}")
        self.fields = tuple(f for f in FIELDS if f in fields or not fields)

    def __hash__(self) -> int:
        return hash(self.fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.fields == other.fields

    def __repr__(self) -> str:
        return f"Trace{self.fields}"

    def init(
        self, passes: int, batch: int, gen_length: int, *, layers: int, clusters: int, columns: int
    ) -> dict[str, jax.Array]:
        """Empty buffers for at most ``passes`` passes; no ``clusters``, no fields of clusters."""
        kinds = [(_PER_POSITION, (gen_length,)), (_PER_PASS, ())]
        if clusters:
            kinds += [(_PER_CLUSTER, (layers, clusters)), (_PER_COLUMN, (layers, columns))]
        return {
            name: jnp.full((passes, batch, *shape), fill, dtype)
            for fields, shape in kinds
            for name, (dtype, fill) in fields.items()
            if name in self.fields
        }

    def record(
        self, buffers: dict[str, jax.Array], index: jax.Array, active: jax.Array, values: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Write one pass at row ``index`` i32 [b] of each active sequence; fields without a value keep their fill."""
        row = jnp.where(active, index, next(iter(buffers.values())).shape[0])  # out of range: dropped
        batch = jnp.arange(row.shape[0])
        return {
            name: buffer.at[row, batch].set(values[name].astype(buffer.dtype), mode="drop")
            if name in values
            else buffer
            for name, buffer in buffers.items()
        }
