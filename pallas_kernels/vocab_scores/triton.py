"""Pallas kernel (Triton route): one streaming pass over the vocabulary, split among programs.

Each program walks its share of one row block by block. Every lane of the block keeps its own running maximum, runner
up, arg max and rescaled sums, so the walk needs no exchange between threads; lanes, then programs, are merged by the
same associative rule at the end. The log-sum-exp shift is the lane's running maximum, which keeps every exponent at
or below zero.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.vocab_scores.parts import (
    LOWEST,
    MAX_RANGES,
    NO_TOKEN,
    PARTIAL_DTYPES,
    Partial,
    clipped,
    finish,
    merge,
)
from pallas_kernels.vocab_scores.ref import Ranges, VocabScores

MAX_BLOCK = 1024
WARP = 32
PROGRAMS = 512  # about four per multiprocessor of an A100 (108) or H100 (132)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel with all static choices made; call it with logits [rows, vocab]."""

    rows: int
    vocab: int
    barred: Ranges
    first_allowed: int
    block: int
    blocks_per_program: int
    interpret: bool

    @property
    def splits(self) -> int:
        """Programs that share one row."""
        return pl.cdiv(self.vocab, self.block * self.blocks_per_program)

    def __call__(self, logits: jax.Array) -> VocabScores:
        shape = (self.rows, self.splits)
        cell = pl.BlockSpec((None, None), lambda row, split: (row, split))
        shares = pl.pallas_call(
            functools.partial(_kernel, plan=self),
            grid=shape,
            in_specs=[pl.BlockSpec((None, self.vocab), lambda row, split: (row, 0))],
            out_specs=[cell] * len(PARTIAL_DTYPES),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in PARTIAL_DTYPES],
            compiler_params=plgpu.CompilerParams(num_warps=max(1, min(4, self.block // WARP)), num_stages=2),
            interpret=self.interpret,
            name="vocab_scores",
        )(logits)
        return finish(merge(Partial(*shares)), self.first_allowed)


def plan(shape: tuple[int, int], dtype: jnp.dtype, barred: Ranges, first_allowed: int, *, interpret: bool) -> Plan:
    """Choose blocks for logits of this shape [rows, vocab] and dtype.

    Raises:
      Unsupported: no rows, or barred ids in too many separate ranges.
    """
    rows, vocab = shape
    if rows == 0:
        raise Unsupported("no rows")
    if len(barred) > MAX_RANGES:
        raise Unsupported(f"barred ids form {len(barred)} separate ranges, more than {MAX_RANGES}")
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise Unsupported(f"logits of dtype {dtype}")
    block = min(MAX_BLOCK, max(WARP, pl.next_power_of_2(vocab)))
    blocks = pl.cdiv(vocab, block)
    return Plan(
        rows=rows,
        vocab=vocab,
        barred=barred,
        first_allowed=first_allowed,
        block=block,
        blocks_per_program=pl.cdiv(blocks, min(blocks, pl.cdiv(PROGRAMS, rows))),
        interpret=interpret,
    )


def _kernel(logits_ref, *out_refs, plan: Plan):
    """logits_ref [vocab], one row; out_refs: the scalars of this program's Partial."""
    first = pl.program_id(1) * plan.blocks_per_program
    lanes = jnp.arange(plan.block, dtype=jnp.int32)

    def body(index: jax.Array, lane: Partial) -> Partial:
        start = (first + index) * plan.block
        ids = start + lanes
        s = plgpu.load(logits_ref.at[pl.ds(start, plan.block)], mask=ids < plan.vocab, other=LOWEST)
        return _push(lane, clipped(s.astype(jnp.float32), ids, plan.vocab, plan.barred), ids)

    lowest, zero = jnp.full((plan.block,), LOWEST, jnp.float32), jnp.zeros((plan.block,), jnp.float32)
    nothing = Partial(lowest, lowest, jnp.full((plan.block,), NO_TOKEN, jnp.int32), zero, zero)
    lane = lax.fori_loop(0, plan.blocks_per_program, body, nothing)
    for out_ref, value in zip(out_refs, merge(lane), strict=True):
        out_ref[...] = value


def _push(old: Partial, s: jax.Array, ids: jax.Array) -> Partial:
    """Add logit s with id ``ids`` to each lane; ids only rise within a lane, so > keeps the lowest on ties."""
    up = s > old.top
    gap = s - old.top
    shrink = jnp.exp(-jnp.abs(gap))  # e^(lower - higher): one exponential serves both cases
    return Partial(
        top=jnp.where(up, s, old.top),
        second=jnp.where(up, old.top, jnp.where(s > old.second, s, old.second)),
        token=jnp.where(up, ids, old.token),
        mass=jnp.where(up, old.mass * shrink + 1.0, old.mass + shrink),
        slope=jnp.where(up, (old.slope - old.mass * gap) * shrink, old.slope + shrink * gap),
    )
