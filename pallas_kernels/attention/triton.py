"""Pallas kernel (Triton route): attention with an online softmax, and the drift of what it attends to in the same walk.

A program holds a tile of rows of one head and walks over its share of the keys: it rotates a tile of keys, scores it,
and folds it into the running maximum m and sums l = sum e^(s - m), a = sum e^(s - m) ((s - m) - log q) and sum e^(s - m) v,
all rescaled as m rises. KL(p || q) = a / l - log l then needs no second walk and no normalised distribution in memory: the
raw scores are the next step's previous ones. Few rows make few programs, so keys are split among several, whose sums are
merged by the same rule.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.ref import LOWEST, SMALLEST, Distribution, Measured
from pallas_kernels.dispatch import Unsupported

LEAST = 16  # the smallest side of a matrix product
MAX_ROWS = 64
MAX_KEYS = 64
MAX_HEAD = 128
PROGRAMS = 128  # about one per multiprocessor of an A100 (108) or H100 (132)


class Sums(NamedTuple):
    """What some keys contribute to rows [..., r]; see above. ``out`` [..., r, e]; ``moved`` is a; None where not asked for."""

    top: jax.Array
    mass: jax.Array
    moved: jax.Array | None
    out: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel with all static choices made.

    Attributes:
      names: of the arguments, in order: q, k, then what there is of v, cos, sin, valid, scores, lse.
      sizes: (b, r, h, g, n, e).
      keep: whether to write the distribution.
      rows, keys: sides of a tile; splits: programs that share the keys of a tile of rows.
    """

    names: tuple[str, ...]
    sizes: tuple[int, int, int, int, int, int]
    dtype: str
    keep: bool
    rows: int
    keys: int
    splits: int
    interpret: bool

    @property
    def warps(self) -> int:
        return 4 if self.rows == LEAST else 8

    def has(self, name: str) -> bool:
        return name in self.names

    def __call__(self, *args: jax.Array) -> Measured:
        b, r, h, g, n, e = self.sizes
        half, per = e // 2, h // g
        specs = {
            "q": pl.BlockSpec((None, r, None, e), lambda i, j, s: (i // h, 0, i % h, 0)),
            "k": pl.BlockSpec((None, None, n, e), lambda i, j, s: (i // h, i % h // per, 0, 0)),
            "v": pl.BlockSpec((None, None, e, n), lambda i, j, s: (i // h, i % h // per, 0, 0)),
            "cos": pl.BlockSpec((None, n, half), lambda i, j, s: (i // h, 0, 0)),
            "sin": pl.BlockSpec((None, n, half), lambda i, j, s: (i // h, 0, 0)),
            "valid": pl.BlockSpec((None, n), lambda i, j, s: (i // h, 0)),
            "scores": pl.BlockSpec((None, None, r, n), lambda i, j, s: (i // h, i % h, 0, 0)),
            "lse": pl.BlockSpec((None, None, r), lambda i, j, s: (i // h, i % h, 0)),
        }
        share = pl.BlockSpec((None, None, None, r), lambda i, j, s: (s, i // h, i % h, 0))
        outputs = {}
        if self.keep:
            outputs["scores"] = (specs["scores"], (b, h, r, n), jnp.float32)
        outputs["top"] = outputs["mass"] = (share, (self.splits, b, h, r), jnp.float32)
        if self.has("scores"):
            outputs["moved"] = outputs["top"]
        if self.has("v") and self.splits == 1:
            outputs["out"] = (specs["q"], (b, r, h, e), self.dtype)
        elif self.has("v"):
            spec = pl.BlockSpec((None, None, r, None, e), lambda i, j, s: (s, i // h, 0, i % h, 0))
            outputs["out"] = (spec, (self.splits, b, r, h, e), jnp.float32)
        # Each program reads what it will overwrite, and nothing of the others.
        aliases = {self.names.index("scores"): 0} if self.keep and self.has("scores") else {}
        results = pl.pallas_call(
            functools.partial(_kernel, plan=self, writes=tuple(outputs)),
            grid=(b * h, pl.cdiv(r, self.rows), self.splits),
            in_specs=[specs[name] for name in self.names],
            out_specs=[spec for spec, _, _ in outputs.values()],
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs.values()],
            compiler_params=plgpu.CompilerParams(num_warps=self.warps, num_stages=2),
            input_output_aliases=aliases,
            interpret=self.interpret,
            name="measured_attention" if self.keep else "attention",
        )(*args)
        return _finish(dict(zip(outputs, results, strict=True)), self)


def plan(shapes: dict[str, jax.ShapeDtypeStruct], keep: bool, *, interpret: bool) -> Plan:
    """Choose tiles for arguments of these shapes, in the order of Plan.names.

    Raises:
      Unsupported: a mask by row and key, heads wider than 128 or of odd width, or no rows.
    """
    b, r, h, e = shapes["q"].shape
    g, n = shapes["k"].shape[1:3]
    if "valid" in shapes and len(shapes["valid"].shape) != 2:
        raise Unsupported("a mask by row and key")
    if e > MAX_HEAD or e % 2:
        raise Unsupported(f"head_dim {e}: even and at most {MAX_HEAD}")
    if not b * r * n:
        raise Unsupported(f"{b} sequences of {r} rows over {n} keys")
    rows = min(MAX_ROWS, max(LEAST, pl.next_power_of_2(r)))
    keys = MAX_KEYS if shapes["q"].dtype.itemsize == 2 else MAX_KEYS // 2
    tiles = b * h * pl.cdiv(r, rows)
    # What is half full is left so: the shares' float32 sums would cost more traffic than they save time.
    splits = max(1, min(PROGRAMS // tiles, pl.cdiv(n, 4 * keys))) if tiles <= PROGRAMS // 4 else 1
    return Plan(
        names=tuple(shapes), sizes=(b, r, h, g, n, e), dtype=str(shapes["q"].dtype), keep=keep, rows=rows, keys=keys,
        splits=splits, interpret=interpret,
    )  # fmt: skip


def _kernel(*refs, plan: Plan, writes: tuple[str, ...]):
    """One tile of rows of one head over one share of the keys. Refs: q [r, e], k [n, e], v [e, n], cos and sin [n, e/2],
    valid [n], scores [r, n], lse [r]; out [r, e], top, mass and moved [r]."""
    inputs = dict(zip(plan.names, refs, strict=False))
    outputs = dict(zip(writes, refs[len(plan.names) :], strict=True))
    _, r, _, _, n, e = plan.sizes
    half = e // 2
    width = max(LEAST, pl.next_power_of_2(half))
    wide = max(LEAST, pl.next_power_of_2(e))
    start = pl.program_id(1) * plan.rows
    row = pl.ds(start, plan.rows)
    live = start + jnp.arange(plan.rows) < r
    lane, wide_lane = jnp.arange(width) < half, jnp.arange(wide) < e
    # A slice that a mask cuts at the end may not have a static start.
    zero = 0 if width == half else pl.program_id(1) * 0
    part = [pl.ds(zero + i * half, width) for i in (0, 1)]
    whole = pl.ds(zero, wide)
    q = [_load(inputs["q"].at[row, i], live[:, None] & lane[None]) for i in part]
    old_lse = _load(inputs["lse"].at[row], live) if plan.has("lse") else None

    def body(index: jax.Array, sums: Sums) -> Sums:
        first = index * plan.keys
        at = pl.ds(first, plan.keys)
        inside = first + jnp.arange(plan.keys) < n
        halves = inside[:, None] & lane[None]
        k = [_load(inputs["k"].at[at, i], halves) for i in part]
        if plan.has("cos"):
            cos, sin = (_load(inputs[name].at[at, pl.ds(zero, width)], halves) for name in ("cos", "sin"))
            k = _rotated(k, cos, sin)
        s = (_product(q[0], k[0]) + _product(q[1], k[1])) * (e**-0.5)
        keep = inside & (_load(inputs["valid"].at[at], inside) != 0) if plan.has("valid") else inside
        s = jnp.where(keep[None], s, LOWEST)
        if plan.has("scores"):
            old = _load(inputs["scores"].at[row, at], live[:, None] & inside[None]) - old_lse[:, None]
        if plan.keep:
            plgpu.store(outputs["scores"].at[row, at], s, mask=live[:, None] & inside[None])
        top = jnp.maximum(sums.top, jnp.max(s, axis=1))
        shrink = jnp.exp(sums.top - top)
        p = jnp.where(inside[None], jnp.exp(s - top[:, None]), 0.0)
        moved, out = sums.moved, sums.out
        if moved is not None:
            moved = (moved + sums.mass * (sums.top - top)) * shrink
            moved = moved + jnp.sum(p * (s - top[:, None] - jnp.where(old < SMALLEST, SMALLEST, old)), axis=1)
        if out is not None:
            v = _load(inputs["v"].at[whole, at], wide_lane[:, None] & inside[None])
            out = out * shrink[:, None] + _product(p.astype(v.dtype), v)
        return Sums(top, sums.mass * shrink + jnp.sum(p, axis=1), moved, out)

    none = jnp.zeros((plan.rows,), jnp.float32)
    nothing = Sums(
        jnp.full((plan.rows,), LOWEST, jnp.float32), none, none if plan.has("lse") else None,
        jnp.zeros((plan.rows, wide), jnp.float32) if plan.has("v") else None,
    )  # fmt: skip
    tiles = pl.cdiv(n, plan.keys)
    each = pl.cdiv(tiles, plan.splits)
    begin = pl.program_id(2) * each
    sums = lax.fori_loop(begin, jnp.minimum(begin + each, tiles), body, nothing)
    for name in writes:
        if name in ("top", "mass", "moved"):
            plgpu.store(outputs[name].at[row], getattr(sums, name), mask=live)
        elif name == "out":
            out = sums.out / sums.mass[:, None] if plan.splits == 1 else sums.out
            to = outputs["out"].at[row, whole]
            plgpu.store(to, out.astype(to.dtype), mask=live[:, None] & wide_lane[None])


def _load(ref, mask: jax.Array) -> jax.Array:
    return plgpu.load(ref, mask=mask, other=0)


def _rotated(k: list[jax.Array], cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
    """Both halves of keys, rotated, rounded to their dtype as the definition does."""
    a, b = (half.astype(jnp.float32) for half in k)
    return [(a * cos - b * sin).astype(k[0].dtype), (b * cos + a * sin).astype(k[0].dtype)]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [m, k] times b [n, k] transposed, f32 [m, n]; float32 is not rounded to fewer bits first."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _finish(got: dict[str, jax.Array], plan: Plan) -> Measured:
    """Shares merged, heads averaged."""
    top, mass, out = (
        got["top"],
        got["mass"],
        got.get("out"),
    )  # [splits, b, h, r]; out [splits, b, r, h, e] or [b, r, h, e]
    highest = jnp.max(top, axis=0)
    weight = jnp.exp(top - highest)
    total = jnp.sum(mass * weight, axis=0)
    if out is not None and plan.splits > 1:
        share = jnp.swapaxes(weight / total, -1, -2)[..., None]  # [splits, b, r, h, 1]
        out = jnp.sum(out * share, axis=0).astype(plan.dtype)
    distribution = drift = None
    if plan.keep:
        distribution = Distribution(got["scores"], highest + jnp.log(total))
    if "moved" in got:
        moved = jnp.sum((got["moved"] + mass * (top - highest)) * weight, axis=0)
        # No valid key at all: nothing moved. Scores that are no numbers, or all below LOWEST, leave no mass: NaN.
        per_head = jnp.where((highest == LOWEST) & (total > 0), 0.0, moved / total - jnp.log(total))
        drift = jnp.maximum(jnp.mean(per_head, axis=1), 0.0)
    return Measured(distribution, drift, out)
