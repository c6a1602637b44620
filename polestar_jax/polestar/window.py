"""Which canvas columns a block's window is: ``prefix`` columns before it and ``suffix`` after it (paper section 4.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from polestar_jax.decode.rows import Rows, Run, rows_of
from polestar_jax.decode.state import DecodeState


def window_rows(state: DecodeState, block: int, prefix: int, suffix: int) -> Rows:
    """The rows of the window around the block's ``block`` rows, r = prefix + suffix: the live ones of the prefix come last in
    their part, those of the suffix first in theirs."""
    n = state.tokens.shape[1]
    before = state.prompt_columns + state.span_start - prefix
    after = state.prompt_columns + state.span_start + block
    runs = (
        Run(before, before[:, None] + jnp.arange(prefix)[None] >= state.pad[:, None]),
        Run(after, after[:, None] + jnp.arange(suffix)[None] < n),
    )
    return rows_of(runs, n)


def spread(window: Rows, values: jax.Array, columns: int, fill: int | bool) -> jax.Array:
    """Values [b, r] of the window's live rows on the canvas, [b, columns], ``fill`` elsewhere."""
    return window.put(jnp.full((values.shape[0], columns), fill, values.dtype), values)
