"""SlowFast's schedule (arXiv 2506.10848): slow passes look how far the model is certain, fast ones finish what lies before."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from polestar_jax.decode.policy import Span
from polestar_jax.decode.state import DecodeState, Scores
from polestar_jax.errors import InputError
from polestar_jax.schedule.blocks import Spans


class Cycle(NamedTuple):
    """Where each sequence is in its cycle, each [b].

    Attributes:
      start, end: i32, the generated positions [start, end) of the cycle as far as its end is known.
      estimate: i32, the end by the last slow pass alone.
      settled: bool, whether the end will stay.
      passes: i32, the cycle's passes so far.
      fast: bool, whether the last one was fast.
    """

    start: jax.Array
    end: jax.Array
    estimate: jax.Array
    settled: jax.Array
    passes: jax.Array
    fast: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycles(Spans):
    """Cycles of a slow and a fast phase inside blocks of ``block_length`` positions.

    The slow phase has ``slow_passes`` passes, which may commit up to the block's end. Each estimates where the cycle ends: behind
    the last undecided position whose confidence is at least ``end_threshold``, or one position on if there is none. Once two
    estimates in a row have a standard deviation below 1 the newer one holds; until then their mean does, rounded down. The fast
    phase goes on until all before that end is decided; the next cycle starts there.

    The engine sees one span from the first undecided position on, whose end is the block's in slow passes and the cycle's in
    fast ones.
    """

    block_length: int
    slow_passes: int = 6
    end_threshold: float = 0.3

    def __post_init__(self):
        for name in ("block_length", "slow_passes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)} is not accepted: a whole number >= 1")

    @property
    def capacity(self) -> int:
        return self.block_length

    def most(self, gen_length: int) -> int:
        return gen_length

    def init(self, batch: int, gen_length: int) -> Cycle:
        zero, no = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
        return Cycle(zero, zero, zero, no, zero, no)

    def next(self, undecided: jax.Array, last: jax.Array) -> Span:
        start = jnp.argmax(undecided, axis=-1).astype(jnp.int32)
        index = start // self.block_length
        return Span(start, jnp.minimum((index + 1) * self.block_length, undecided.shape[-1]), index)

    def fit(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, Cycle]:
        old, index = state.schedule, jnp.arange(state.gen_length)[None]
        begin = state.span_start // self.block_length * self.block_length
        end = jnp.minimum(begin + self.block_length, state.gen_length)
        undecided = scores.eligible | scores.ahead
        # A cycle that its slow passes have decided is over before it was fast.
        left = jnp.any(undecided & (index < old.end[:, None]), axis=-1)
        fresh = state.entering | ((old.passes >= self.slow_passes) & ~left)
        start = jnp.where(fresh, jnp.maximum(old.end, begin), old.start)
        passes = jnp.where(fresh, 1, old.passes + 1)
        fast = passes > self.slow_passes
        certain = undecided & (index < end[:, None]) & (scores.confidence >= self.end_threshold)
        estimate = jnp.maximum(jnp.max(jnp.where(certain, index, -1), axis=-1), start) + 1
        estimate = jnp.minimum(estimate, end)
        again = ~fresh & (jnp.abs(estimate - old.estimate) < 2)  # of two values: half their distance, below 1
        mean = begin + (estimate + old.estimate - 2 * begin) // 2
        settled = ~fresh & old.settled
        newest = jnp.where(fresh | again, estimate, mean)
        cycle = Cycle(
            start=start,
            end=jnp.where(fast | settled, old.end, newest),
            estimate=jnp.where(fast, old.estimate, estimate),
            settled=settled | (~fast & again),
            passes=passes,
            fast=fast,
        )
        return jnp.where(fast, cycle.end, end), cycle
