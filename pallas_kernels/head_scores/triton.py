"""Pallas kernel (Triton route): the head's product tile by tile, each tile of logits reduced before it leaves registers.

A program multiplies a tile of rows with a tile of the vocabulary, walking the depth, and writes what that tile
contributes to every row's scores; the contributions of all tiles are merged afterwards. Rows of one decoding pass fit
one tile, so that every weight of the head is read once and the kernel runs at the speed of memory. With more rows,
programs that share weights follow each other, and the second finds them in cache.
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
from pallas_kernels.vocab_scores.parts import MAX_RANGES, PARTIAL_DTYPES, Partial, clipped, finish, merge, singles
from pallas_kernels.vocab_scores.ref import Ranges, VocabScores

MIN_TILE = 16  # what a tensor core multiplies
MAX_ROWS = 64
MAX_VOCAB = 128
DEPTH_BYTES = 128  # of a row in a tile: 64 half-precision numbers
MAX_ELEMENTS = 2**31 - 1  # offsets into the head are int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel with all static choices made; call it with rows [rows, depth] and head [depth, vocab]."""

    rows: int
    depth: int
    vocab: int
    barred: Ranges
    first_allowed: int
    row_tile: int
    depth_tile: int
    vocab_tile: int
    num_warps: int
    num_stages: int
    interpret: bool

    def __call__(self, rows: jax.Array, head: jax.Array) -> VocabScores:
        grid = (pl.cdiv(self.rows, self.row_tile), pl.cdiv(self.vocab, self.vocab_tile))
        shape = (grid[0] * self.row_tile, grid[1])  # what lies beyond the last row is written and left
        column = pl.BlockSpec((self.row_tile, None), lambda row, tile: (row, tile))
        shares = pl.pallas_call(
            functools.partial(_kernel, plan=self),
            grid=grid,
            in_specs=[pl.BlockSpec(array.shape, lambda row, tile: (0, 0)) for array in (rows, head)],
            out_specs=[column] * len(PARTIAL_DTYPES),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in PARTIAL_DTYPES],
            compiler_params=plgpu.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages),
            interpret=self.interpret,
            name="head_scores",
        )(rows, head)
        return finish(merge(Partial(*(share[: self.rows] for share in shares))), self.first_allowed)


def plan(
    rows: jax.ShapeDtypeStruct, head: jax.ShapeDtypeStruct, barred: Ranges, first_allowed: int, *, interpret: bool
) -> Plan:
    """Choose tiles for rows [r, d] and head [d, v].

    Raises:
      Unsupported: no rows, dtypes that differ, a head of 2^31 weights, or barred ids in too many separate ranges.
    """
    (count, depth), (_, vocab) = rows.shape, head.shape
    if count == 0:
        raise Unsupported("no rows")
    if rows.dtype != head.dtype:
        raise Unsupported(f"rows of dtype {rows.dtype} and head of dtype {head.dtype} differ")
    if max(count * depth, depth * vocab) > MAX_ELEMENTS:
        raise Unsupported(f"rows {list(rows.shape)} or head {list(head.shape)} of more than {MAX_ELEMENTS} elements")
    if len(barred) > MAX_RANGES:
        raise Unsupported(f"barred ids form {len(barred)} separate ranges, more than {MAX_RANGES}")
    wide = count > MAX_ROWS // 2
    return Plan(
        rows=count,
        depth=depth,
        vocab=vocab,
        barred=barred,
        first_allowed=first_allowed,
        row_tile=_tile(count, MAX_ROWS),
        depth_tile=_tile(depth, DEPTH_BYTES // rows.dtype.itemsize),
        vocab_tile=_tile(vocab, MAX_VOCAB),
        # Registers then allow two (wide) to four programs a multiprocessor, and the shared memory of an A100 as many.
        num_warps=8 if wide else 4,
        num_stages=4 if wide else 3,
        interpret=interpret,
    )


def _tile(extent: int, most: int) -> int:
    return min(most, max(MIN_TILE, pl.next_power_of_2(extent)))


def _kernel(rows_ref, head_ref, *out_refs, plan: Plan):
    """rows_ref [rows, depth], head_ref [depth, vocab]; out_refs: [row_tile] each, the fields of this tile's Partial."""
    row, first = pl.program_id(0) * plan.row_tile, pl.program_id(1) * plan.vocab_tile

    def body(step: jax.Array, logits: jax.Array) -> jax.Array:
        at = step * plan.depth_tile
        x = _load(rows_ref, (row, at), (plan.row_tile, plan.depth_tile))
        w = _load(head_ref, (at, first), (plan.depth_tile, plan.vocab_tile))
        product = lax.dot_general(
            x,
            w,
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,  # no TF32 in place of float32
            preferred_element_type=jnp.float32,
        )
        return logits + product

    nothing = jnp.zeros((plan.row_tile, plan.vocab_tile), jnp.float32)
    logits = lax.fori_loop(0, pl.cdiv(plan.depth, plan.depth_tile), body, nothing)
    ids = first + jnp.arange(plan.vocab_tile, dtype=jnp.int32)
    parts = singles(clipped(logits, ids, plan.vocab, plan.barred), ids)
    for out_ref, value in zip(out_refs, merge(parts), strict=True):
        out_ref[...] = value


def _load(ref, starts: tuple[jax.Array, jax.Array], tile: tuple[int, int]) -> jax.Array:
    """The tile of a matrix from ``starts`` on, with 0 beyond its ends; unmasked where no tile can cross one."""
    inside = None
    for axis, (start, size, extent) in enumerate(zip(starts, tile, ref.shape, strict=True)):
        if extent % size:
            along = (start + jnp.arange(size, dtype=jnp.int32) < extent).reshape([size, 1] if axis == 0 else [1, size])
            inside = along if inside is None else inside & along
    if inside is not None:
        inside = jnp.broadcast_to(inside, tile)
    where = ref.at[pl.ds(starts[0], tile[0]), pl.ds(starts[1], tile[1])]
    return plgpu.load(where, mask=inside, other=None if inside is None else 0)
