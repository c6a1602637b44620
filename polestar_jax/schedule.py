"""Schedules: which generated positions may be committed now."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.decode.policy import Span
from polestar_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
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

    def next(self, undecided: jax.Array) -> Span:
        # Everything left of the first undecided position is complete, so its block is the next one.
        index = jnp.argmax(undecided, axis=-1).astype(jnp.int32) // self.block_length
        start = index * self.block_length
        return Span(start, jnp.minimum(start + self.block_length, undecided.shape[-1]), index)
