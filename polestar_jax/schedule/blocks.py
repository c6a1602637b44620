"""What schedules have in common, and blocks of one length."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from polestar_jax.decode.policy import Span
from polestar_jax.decode.state import DecodeState, Scores
from polestar_jax.errors import InputError


class Spans:
    """Defaults of a schedule: no state, and spans that stay as they were given."""

    def init(self, batch: int, gen_length: int) -> Any:
        return ()

    def fit(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, Any]:
        return state.span_end, state.schedule

    def most(self, gen_length: int) -> int:
        return -(-gen_length // self.capacity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(Spans):
    """Blocks of ``block_length`` positions, left to right; a block complete before its turn is passed over.

    One block as long as the generation is plain, unordered decoding. The same schedule serves cached and uncached methods.
    """

    block_length: int

    def __post_init__(self):
        if self.block_length < 1:
            raise InputError(f"block_length {self.block_length} is not accepted: a whole number >= 1")

    @property
    def capacity(self) -> int:
        return self.block_length

    def next(self, undecided: jax.Array, last: jax.Array) -> Span:
        # Everything left of the first undecided position is complete, so its block is the next one.
        index = jnp.argmax(undecided, axis=-1).astype(jnp.int32) // self.block_length
        start = index * self.block_length
        return Span(start, jnp.minimum(start + self.block_length, undecided.shape[-1]), index)
