"""Some rows of the canvas under static shapes, and writing what they leave into cached keys and values.

A block [s, e) has R = B + shift rows: with a logit shift, position s is read from the row before it. What the prompt's start
or the canvas' end cuts off of a run of rows is there as dead rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from polestar_jax.decode.state import DecodeState

KEYS, VALUES = 2, 3  # the axis of the columns in cached keys and values


class Run(NamedTuple):
    """Consecutive columns of each sequence: ``first`` i32 [b], which may lie outside the canvas, and ``live`` bool [b, r]."""

    first: jax.Array
    live: jax.Array

    @property
    def length(self) -> int:
        return self.live.shape[1]

    def write(self, cache: jax.Array, rows: jax.Array, where: jax.Array, axis: int) -> jax.Array:
        """``cache`` with rows [b, r, g, e] written where they are live and ``where`` bool [b, r]; ``axis`` says which of its
        axes is that of the columns: KEYS [b, g, n, e] or VALUES [b, g, e, n].

        A slice is read, merged and updated in place, sequence by sequence: a scatter would have the whole cache transposed.
        """
        n, r = cache.shape[axis], self.length
        size = min(r, n)
        start = jnp.clip(self.first, 0, n - size)
        source = (start - self.first)[:, None] + jnp.arange(size)[None]  # the row of each column of the slice
        known = (source >= 0) & (source < r)
        source = jnp.clip(source, 0, r - 1)
        merge = known & jnp.take_along_axis(self.live & where, source, axis=1)
        rows = jnp.moveaxis(jnp.take_along_axis(rows, source[..., None, None], axis=1), 1, axis)
        # Laid out as the cache is, or the compiler would lay the whole cache out as it likes its rows best.
        rows = with_layout_constraint(rows, Layout(major_to_minor=(0, 1, 2, 3)))

        def merged(i: int | jax.Array, cache: jax.Array) -> jax.Array:
            at = (i, 0, start[i], 0) if axis == KEYS else (i, 0, 0, start[i])
            old = lax.dynamic_slice(cache, at, (1, *rows.shape[1:]))
            new = lax.dynamic_index_in_dim(rows, i, keepdims=True)
            keep = jnp.expand_dims(lax.dynamic_index_in_dim(merge, i), (1, 5 - axis))
            return lax.dynamic_update_slice(cache, jnp.where(keep, new, old), at)

        return merged(0, cache) if cache.shape[0] == 1 else lax.fori_loop(0, cache.shape[0], merged, cache)


class Rows(NamedTuple):
    """Some rows of each sequence, as runs one after the other.

    Attributes:
      runs: the runs.
      columns: i32 [b, r], inside the canvas also where a row is dead.
      live: bool [b, r].
    """

    runs: tuple[Run, ...]
    columns: jax.Array
    live: jax.Array

    def take(self, canvas: jax.Array) -> jax.Array:
        """These rows of an array [b, n, ...]."""
        return canvas[jnp.arange(canvas.shape[0])[:, None], self.columns]

    def put(self, canvas: jax.Array, values: jax.Array) -> jax.Array:
        """``canvas`` [b, n] with the live rows' values [b, r] written."""
        column = jnp.where(self.live, self.columns, canvas.shape[1])  # outside: dropped
        return canvas.at[jnp.arange(canvas.shape[0])[:, None], column].set(values, mode="drop")

    def write(self, cache: jax.Array, rows: jax.Array, where: jax.Array, axis: int) -> jax.Array:
        """``cache`` with rows [b, r, g, e] written where they are live and ``where`` bool [b, r]; see :meth:`Run.write`."""
        begin = 0
        for run in self.runs:
            end = begin + run.length
            if run.length:
                cache = run.write(cache, rows[:, begin:end], where[:, begin:end], axis)
            begin = end
        return cache


class Picked(NamedTuple):
    """Some rows of each sequence in any order, each live one a column of its own: ``columns`` i32 [b, r], inside the canvas
    also where a row is dead, and ``live`` bool [b, r]."""

    columns: jax.Array
    live: jax.Array

    take = Rows.take
    put = Rows.put

    def write(self, cache: jax.Array, rows: jax.Array, where: jax.Array, axis: int) -> jax.Array:
        """``cache`` with rows [b, r, g, e] written where they are live and ``where`` bool [b, r]; see :meth:`Run.write`.

        Each column takes its row: a scatter would have the whole cache transposed.
        """
        b, n, r = cache.shape[0], cache.shape[axis], self.live.shape[1]
        index = jnp.broadcast_to(jnp.arange(r), (b, r))
        source = self._replace(live=self.live & where).put(jnp.full((b, n), -1), index)
        source = jnp.expand_dims(source, (1, 5 - axis))
        new = jnp.take_along_axis(jnp.moveaxis(rows, 1, axis), jnp.maximum(source, 0), axis=axis)
        return jnp.where(source >= 0, new, cache)


def picked(chosen: jax.Array, capacity: int, priority: jax.Array | None = None) -> Picked:
    """The columns ``chosen`` bool [b, n], as many as there is ``capacity`` for: those of the highest ``priority`` [b, n], by
    default the first ones; equal ones from left to right."""
    order = jnp.where(chosen, 0.0 if priority is None else priority, -jnp.inf)
    columns = jnp.argsort(-order, axis=1, stable=True)[:, :capacity]
    return Picked(columns.astype(jnp.int32), jnp.take_along_axis(chosen, columns, axis=1))


def rows_of(runs: tuple[Run, ...], n: int) -> Rows:
    """The rows of these runs on a canvas of n columns."""
    columns = [run.first[:, None] + jnp.arange(run.length)[None] for run in runs]
    columns = jnp.clip(jnp.concatenate(columns, axis=1), 0, n - 1)
    return Rows(runs, columns, jnp.concatenate([run.live for run in runs], axis=1))


def block_rows(state: DecodeState, capacity: int, shift: int) -> Rows:
    """The rows [s - shift, e) of the span, r = capacity + shift."""
    first = state.prompt_columns + state.span_start - shift
    end = state.prompt_columns + state.span_end
    live = first[:, None] + jnp.arange(capacity + shift)[None] < end[:, None]
    return rows_of((Run(first, live),), state.tokens.shape[1])


def joined(first: Rows, second: Rows) -> Rows:
    """The rows of both, in this order."""
    columns, live = (jnp.concatenate(parts, axis=1) for parts in zip(first[1:], second[1:], strict=True))
    return Rows(first.runs + second.runs, columns, live)


def every_row(state: DecodeState) -> Rows:
    """All columns of the canvas, padding included."""
    b, n = state.tokens.shape
    return rows_of((Run(jnp.zeros(b, jnp.int32), jnp.ones((b, n), bool)),), n)
