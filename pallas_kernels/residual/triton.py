"""Pallas kernels (Triton route) that read a row of NVFP4 residuals, and that write one.

Reading takes a program per row, which holds the whole row in registers: its norm needs all of it. Writing takes two
launches, of a program per part of a row each: the first finds the largest magnitude of every part, the second reduces those
of its sequence to the sequence's scale, which is all that parts share.
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
from pallas_kernels.residual import nvfp4
from pallas_kernels.residual.nvfp4 import GROUP, Nvfp4
from pallas_kernels.residual.ref import Patched

MAX_WIDTH = 8192  # of a row in registers
MAX_PART = 1024
MAX_PARTS = 8192  # of a sequence, whose largest magnitudes a program reduces
MAX_GRID = 65_535  # programs along any axis of a grid but the first
MAX_ELEMENTS = 2**31 - 1  # offsets are int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchPlan:
    """Reading rows [b, w, d]; call it with codes, scales, scale, packet, chosen, weight, then centroids and labels."""

    shape: tuple[int, int, int]
    eps: float
    direct: bool
    interpret: bool

    def __call__(self, codes, scales, scale, packet, chosen, weight, *clusters: jax.Array) -> Patched:
        _, _, d = self.shape
        block = pl.next_power_of_2(d)
        row, cell = _rows(d), pl.BlockSpec((None, None), lambda w, b: (b, w))
        specs = [_rows(d // 2), _rows(d // GROUP), pl.BlockSpec((None,), lambda w, b: (b,)), row, cell]
        specs += [pl.BlockSpec((d,), lambda w, b: (0,))]
        if not self.direct:
            specs += [pl.BlockSpec((None, clusters[0].shape[1], d), lambda w, b: (b, 0, 0)), cell]
        out = [jax.ShapeDtypeStruct(self.shape, dtype) for dtype in (jnp.float32, jnp.float32, packet.dtype)]
        return Patched(
            *pl.pallas_call(
                functools.partial(_patch_kernel, width=d, block=block, eps=self.eps),
                grid=self.shape[1::-1],
                in_specs=specs,
                out_specs=[row] * 3,
                out_shape=out,
                compiler_params=plgpu.CompilerParams(num_warps=max(1, min(8, block // 256)), num_stages=1),
                interpret=self.interpret,
                name="residual_patched",
            )(codes, scales, scale, packet, chosen, weight, *clusters)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisePlan:
    """Writing rows [b, w, d]; call it with states, then centroids and labels unless it is ``direct``."""

    shape: tuple[int, int, int]
    direct: bool
    interpret: bool

    @property
    def part(self) -> int:
        """Lanes of a program: a power of two that divides the width."""
        return min(MAX_PART, self.shape[2] & -self.shape[2])

    def __call__(self, states: jax.Array, *clusters: jax.Array) -> Nvfp4:
        (b, w, d), part = self.shape, self.part
        specs = [_parts(part)]
        if not self.direct:
            specs += [pl.BlockSpec((None, clusters[0].shape[1], part), lambda i, w, b: (b, 0, i))]
            specs += [pl.BlockSpec((None, None), lambda i, w, b: (b, w))]
        launch = functools.partial(
            pl.pallas_call,
            grid=(d // part, w, b),
            compiler_params=plgpu.CompilerParams(num_warps=max(1, min(4, part // 128)), num_stages=1),
            interpret=self.interpret,
        )
        largest = launch(
            functools.partial(_largest_kernel, part=part),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, None), lambda i, w, b: (b, w * (d // part) + i)),
            out_shape=jax.ShapeDtypeStruct((b, w * (d // part)), jnp.float32),
            name="residual_largest",
        )(states, *clusters)
        return Nvfp4(
            *launch(
                functools.partial(_quantise_kernel, part=part),
                in_specs=[pl.BlockSpec((None, largest.shape[1]), lambda i, w, b: (b, 0)), *specs],
                out_specs=[_parts(part // 2), _parts(part // GROUP), pl.BlockSpec((None,), lambda i, w, b: (b,))],
                out_shape=[
                    jax.ShapeDtypeStruct((b, w, d // 2), jnp.uint8),
                    jax.ShapeDtypeStruct((b, w, d // GROUP), jnp.uint8),
                    jax.ShapeDtypeStruct((b,), jnp.float32),
                ],
                name="residual_quantised",
            )(largest, states, *clusters)
        )


def plan_patched(shape: tuple[int, int, int], clusters: int, *, eps: float, direct: bool, interpret: bool) -> PatchPlan:
    """The kernel for rows [b, w, d] with this many centroids a sequence.

    Raises:
      Unsupported: no rows, too many, or too wide ones.
    """
    _check(shape, clusters)
    if shape[2] > MAX_WIDTH:
        raise Unsupported(f"rows of width {shape[2]}, more than {MAX_WIDTH}")
    return PatchPlan(shape=shape, eps=eps, direct=direct, interpret=interpret)


def plan_quantised(shape: tuple[int, int, int], clusters: int, *, direct: bool, interpret: bool) -> QuantisePlan:
    """The kernel for rows [b, w, d] with this many centroids a sequence.

    Raises:
      Unsupported: no rows, or too many.
    """
    _check(shape, clusters)
    plan = QuantisePlan(shape=shape, direct=direct, interpret=interpret)
    if (parts := shape[1] * shape[2] // plan.part) > MAX_PARTS:
        raise Unsupported(f"sequences of {parts} parts of {plan.part}, more than {MAX_PARTS}")
    return plan


def _check(shape: tuple[int, int, int], clusters: int) -> None:
    b, w, d = shape
    if 0 in shape:
        raise Unsupported("no rows")
    if max(b, w) > MAX_GRID or b * max(w, clusters) * d > MAX_ELEMENTS:
        raise Unsupported(f"rows {list(shape)} with {clusters} centroids: more than one launch can address")


def _rows(width: int) -> pl.BlockSpec:
    """Row w of sequence b."""
    return pl.BlockSpec((None, None, width), lambda w, b: (b, w, 0))


def _parts(width: int) -> pl.BlockSpec:
    """Part i of row w of sequence b."""
    return pl.BlockSpec((None, None, width), lambda i, w, b: (b, w, i))


def _patch_kernel(
    codes_ref, scales_ref, scale_ref, packet_ref, chosen_ref, weight_ref, *refs, width: int, block: int, eps: float
):
    """One row: codes_ref [width/2], scales_ref [width/16], packet_ref and weight_ref [width], scalars scale and chosen;
    refs: centroids [K, width] and the scalar label, if any, then the outputs, [width] each."""
    *clusters, states_ref, change_ref, normed_ref = refs
    lanes = jnp.arange(block, dtype=jnp.int32)
    inside = lanes < width
    chosen = chosen_ref[...]

    def load(ref, where, mask):
        return plgpu.load(ref.at[where], mask=mask, other=0)

    codes = load(codes_ref, lanes // 2, inside).astype(jnp.int32) >> (4 * (lanes % 2))
    scales = load(scales_ref, lanes // GROUP, inside).astype(jnp.int32)
    before = nvfp4.from_e2m1(codes & 15, scale_ref[...] * nvfp4.from_e4m3(scales))
    if clusters:
        before += _centroid(*clusters, lanes, inside)
    packet = load(packet_ref, lanes, inside & chosen)
    states = jnp.where(chosen, packet.astype(jnp.float32), before)
    x = states.astype(packet.dtype).astype(jnp.float32)
    mean = jnp.sum(jnp.where(inside, x * x, 0.0), axis=0) * (1 / width)
    normed = (x * lax.rsqrt(mean + eps)).astype(packet.dtype) * load(weight_ref, lanes, inside)
    for ref_, value in (
        (states_ref, states),
        (change_ref, jnp.where(chosen, states - before, 0.0)),
        (normed_ref, normed),
    ):
        plgpu.store(ref_.at[lanes], value, mask=inside)


def _largest_kernel(states_ref, *refs, part: int):
    """The largest magnitude of a part of one row; infinity where there is NaN, which a maximum would pass over."""
    *clusters, largest_ref = refs
    values = _values(states_ref, *clusters, part=part)
    largest_ref[...] = jnp.max(jnp.where(values == values, jnp.abs(values), jnp.inf), axis=0)


def _quantise_kernel(largest_ref, states_ref, *refs, part: int):
    """A part of one row. largest_ref [parts of the sequence], states_ref [part]; refs: centroids [K, part] and the scalar
    label, if any, then codes [part/2], scales [part/16] and the scalar scale, which all programs of a sequence agree on."""
    *clusters, codes_ref, scales_ref, scale_ref = refs
    count = largest_ref.shape[0]
    parts = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    largest = plgpu.load(largest_ref.at[parts], mask=parts < count, other=0.0)
    scale = nvfp4.sequence_scale(jnp.max(largest, axis=0))
    scale_ref[...] = scale
    values = _values(states_ref, *clusters, part=part)
    codes, scales = nvfp4.encode(values.reshape(part // GROUP, GROUP), jnp.broadcast_to(scale, (part // GROUP,)))
    codes_ref[...] = nvfp4.packed(codes.reshape(part), 4)
    scales_ref[...] = scales.astype(jnp.uint8)


def _values(states_ref, *clusters, part: int) -> jax.Array:
    """What is quantised of a part of a row."""
    if not clusters:
        return states_ref[...]
    return states_ref[...] - _centroid(*clusters, jnp.arange(part, dtype=jnp.int32), True)


def _centroid(centroids_ref, label_ref, lanes: jax.Array, inside: jax.Array | bool) -> jax.Array:
    """The lanes of the row's centroid, zeros if it has none."""
    label = label_ref[...]
    lives = (label >= 0) & (label < centroids_ref.shape[0])
    mask = jnp.broadcast_to(lives & inside, lanes.shape)
    return plgpu.load(centroids_ref.at[jnp.where(lives, label, 0), lanes], mask=mask, other=0.0)
