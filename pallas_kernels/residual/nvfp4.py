"""NVFP4 numbers in 32-bit integer and float arithmetic, the same for the definition and the kernel.

A group of 16 values keeps E2M1 codes (sign, two exponent bits, one mantissa bit) and an E4M3 scale; a sequence keeps one
float32 scale. A code is the nearest to value / (scale * group scale), a group's scale the nearest to its largest
magnitude / (6 * scale); ties go to the even code, what is too large to the largest.

Quotients are those of IEEE division in float32, but no code depends on how a compiler divides: within a jitted function
even a CPU's multiplies by a reciprocal, and GPUs approximate, so that a quotient beside a tie would fall on either side.
Comparisons with the midway points are exact instead. Nor does any result depend on whether a product and a sum are
rounded together: every product that feeds a sum is exact. So one input gives the same codes, and the same codes the same
values, on every platform, compiled or not. Sequence scales below SMALLEST count as zero, which keeps what is computed here
clear of subnormal numbers; these some platforms flush to zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
SMALLEST = 2.0**-100  # of the sequence scales: residuals all below 2.1e-27 are stored as zeros

_E4M3_NAN = 0x7F  # the one magnitude that is no number; the largest number lies just below
_EXPONENT, _ONE = 0x7F800000, 0x3F800000  # float32: exponent bits, and the number 1


class Nvfp4(NamedTuple):
    """Rows [b, w, d] in NVFP4.

    Attributes:
      codes: u8 [b, w, d/2], two E2M1 codes each, the first in the low bits.
      scales: u8 [b, w, d/16], bits of E4M3.
      scale: f32 [b].
    """

    codes: jax.Array
    scales: jax.Array
    scale: jax.Array


class _Split(NamedTuple):
    """A number, and the same as the sum of two with 12 significant bits each."""

    whole: jax.Array
    high: jax.Array
    low: jax.Array


def sequence_scale(amax: jax.Array) -> jax.Array:
    """The scale of sequences whose largest magnitude is ``amax`` f32 [...]: NaN where that is no finite number."""
    divisor = E2M1_MAX * E4M3_MAX
    guess = amax * (1 / divisor)  # at most one float32 away from the quotient
    scale, error = guess, jnp.abs(_excess(amax, divisor, _split(guess)))
    for step in (-1, 1):
        other = _float(_bits(guess) + step)
        its_error = jnp.abs(_excess(amax, divisor, _split(other)))
        scale, error = jnp.where(its_error < error, other, scale), jnp.minimum(its_error, error)
    return jnp.where(amax < jnp.inf, jnp.where(scale >= SMALLEST, scale, 0.0), jnp.nan)


def encode(groups: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes i32 [..., 16] and group scales' bits i32 [...] of ``groups`` f32 [..., 16].

    ``scale`` f32, broadcast to [...], is that of :func:`sequence_scale`. All is zero where it is zero or NaN.
    """
    usable = scale > 0
    bits = _bits(jnp.where(usable, scale, 1.0))
    unit = _float((bits & ~_EXPONENT) | _ONE)  # the scale times a power of two, in [1, 2)
    power = _float(2 * _ONE - (bits & _EXPONENT))  # that power of two
    sizes = jnp.abs(groups) * power[..., None]
    scales = jnp.where(usable, _to_e4m3(jnp.max(sizes, axis=-1), unit), 0)
    step = unit * from_e4m3(scales)
    codes = jnp.where((step > 0)[..., None], _to_e2m1(sizes, step[..., None]), 0)
    return jnp.where((groups < 0) & (codes > 0), codes + 8, codes), scales


def to_e2m1(values: jax.Array) -> jax.Array:
    """E2M1 codes i32 [...] of values f32 [...] by themselves."""
    codes = _to_e2m1(jnp.abs(values), jnp.ones((), jnp.float32))
    return jnp.where((values < 0) & (codes > 0), codes + 8, codes)


def from_e2m1(codes: jax.Array, step: jax.Array) -> jax.Array:
    """Values f32 [...] of codes i32 [...], times ``step`` f32, broadcast to [...], and rounded once."""
    exponent = (codes >> 1) & 3
    binade = _float((jnp.maximum(exponent, 1) << 23) + (_ONE - (1 << 23)))  # 1, 1, 2, 4
    # 1.5 * step need not be a float32. The two parts are: their sum is what is rounded.
    whole = jnp.where(exponent > 0, binade, 0.0) * step
    half = jnp.where((codes & 1) > 0, 0.5 * binade, 0.0) * step
    return jnp.where((codes & 8) > 0, -(whole + half), whole + half)


def from_e4m3(bits: jax.Array) -> jax.Array:
    """Values f32 [...] of bits i32 [...], 0 .. 255."""
    magnitude = bits & 0x7F
    value = jnp.where(magnitude == _E4M3_NAN, jnp.nan, _e4m3_halves(2 * magnitude))
    return jnp.where((bits & 0x80) > 0, -value, value)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """Codes of ``bits`` bits [..., d] as u8 [..., d bits / 8], the first in the lowest bits."""
    parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8, 8 // bits)
    return jnp.sum(parts << (jnp.arange(8 // bits) * bits), axis=-1).astype(jnp.uint8)


def unpacked(packed: jax.Array, bits: int) -> jax.Array:
    """What :func:`packed` packed, i32 [..., d]."""
    codes = (packed[..., None].astype(jnp.int32) >> (jnp.arange(8 // bits) * bits)) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _to_e2m1(sizes: jax.Array, step: jax.Array) -> jax.Array:
    """Codes 0 .. 7 nearest to sizes / step, for a positive step; NaN gives 0."""
    split = _split(step)
    codes = jnp.zeros(sizes.shape, jnp.int32)
    # Midway points; those between an odd code and the next even one belong to the latter.
    for middle in (0.25, 1.25, 2.5, 5.0):
        codes += _compared(sizes, middle, _half_ulp(middle), split)[1].astype(jnp.int32)
    for middle in (0.75, 1.75, 3.5):
        codes += _compared(sizes, middle, _half_ulp(middle), split)[0].astype(jnp.int32)
    return codes


def _to_e4m3(amax: jax.Array, unit: jax.Array) -> jax.Array:
    """E4M3 bits nearest to amax / (6 unit), for amax >= 0 and unit in [1, 2)."""
    step = _split(E2M1_MAX * unit)
    # A little less than the quotient, however the division errs: the code sought is that below, or the next.
    low = amax / step.whole * (1 - 2.0**-18)
    normal = (_bits(low) >> 20) - (120 << 3)  # exponents are biased by 127 and by 7
    code = jnp.minimum(jnp.where(low >= 2.0**-6, normal, (low * 2.0**9).astype(jnp.int32)), _E4M3_NAN - 1)
    middle = _e4m3_halves(2 * code + 1)
    reached, passed = _compared(amax, middle, _float(_bits(middle) & _EXPONENT) * 2.0**-24, step)
    above = jnp.where((code & 1) > 0, reached, passed)
    return jnp.minimum(code + above.astype(jnp.int32), _E4M3_NAN - 1)


def _e4m3_halves(halves: jax.Array) -> jax.Array:
    """The number ``halves`` / 2 codes up from zero; odd ones are the midway points."""
    return jnp.where(halves >= 16, _float((halves + (120 << 4)) << 19), halves.astype(jnp.float32) * 2.0**-10)


def _half_ulp(x: float) -> float:
    """Half of the distance from x to the next float32."""
    return 2.0 ** (math.frexp(x)[1] - 25)


def _compared(
    size: jax.Array, middle: jax.Array | float, half_ulp: jax.Array | float, step: _Split
) -> tuple[jax.Array, jax.Array]:
    """Whether the float32 nearest to size / step is at least ``middle``, and whether it is more.

    ``middle`` has at most 12 significant bits, so that quotients half a unit in the last place off round to it. Where the
    first is asked for it must not be a power of two, below which the unit is smaller.
    """
    excess, slack = _excess(size, middle, step), step.whole * half_ulp
    return excess >= -slack, excess > slack


def _excess(size: jax.Array, factor: jax.Array | float, x: _Split) -> jax.Array:
    """size - factor * x, for a factor of at most 12 significant bits: exactly, where size is near the product.

    The products are exact, and so are the differences where size and the product agree in their leading bits. Elsewhere
    rounding leaves the sign, and the result as far from zero as it is.
    """
    return (size - factor * x.high) - factor * x.low


def _split(x: jax.Array) -> _Split:
    bits = _bits(x)
    low = (bits & 0xFFF).astype(jnp.float32) * (_float(bits & _EXPONENT) * 2.0**-23)
    return _Split(x, _float(bits & ~0xFFF), low)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
