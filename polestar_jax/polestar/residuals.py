"""Hidden states kept as quantised residuals to their centroids (paper section 4.1 and appendix C, formats of Table 11).

Values are quantised along the width in groups, each with a scale; codes below a byte are packed, the even lane in the low
bits. All rounding is to nearest, ties to even, and saturates.

=============  =====  ==========================================  =============================
format         group  codes                                       scale of a group
=============  =====  ==========================================  =============================
none                  the rows themselves, in the model's dtype
fp8            16     E4M3                                        float32, amax / 448
int8           16     -127 .. 127                                 float32, amax / 127
mxfp4          32     E2M1                                        power of two (E8M0)
int2           16     -1, 0, 1                                    float32, amax
nvfp4          16     E2M1                                        E4M3 times a float32 a sequence
nvfp4_direct   16     as nvfp4, of the rows instead of residuals
=============  =====  ==========================================  =============================
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

GROUPS = {"none": 1, "fp8": 16, "int8": 16, "mxfp4": 32, "int2": 16, "nvfp4": 16, "nvfp4_direct": 16}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0


class Stored(NamedTuple):
    """Rows [b, w, d] as they are kept.

    Attributes:
      codes: the rows ("none"), else their codes: u8 [b, w, d/2] for E2M1, u8 [b, w, d/4] for int2, i8 or u8 [b, w, d].
      scales: of the groups, [b, w, d/group]: f32, or u8 with the bits of E4M3 (nvfp4) or E8M0 (mxfp4); None for "none".
      scale: f32 [b], nvfp4's second scale; None for the others.
    """

    codes: jax.Array
    scales: jax.Array | None = None
    scale: jax.Array | None = None


def store(rows: jax.Array, centroids: jax.Array, form: str, dtype: jnp.dtype) -> Stored:
    """Quantise ``rows`` f32 [b, w, d] against the centroid of each, f32 [b, w, d]. Dead rows should be zero in both."""
    if form == "none":
        return Stored(rows.astype(dtype))
    b, w, d = rows.shape
    values = rows if form == "nvfp4_direct" else rows - centroids
    values = values.reshape(b, w, d // GROUPS[form], GROUPS[form])
    amax = jnp.max(jnp.abs(values), axis=-1)
    flat = lambda codes: codes.reshape(b, w, d)  # noqa: E731
    match form:
        case "fp8":
            scales = amax / _E4M3_MAX
            return Stored(_bits(flat(_scaled(values, scales)), _E4M3_MAX), scales)
        case "int8":
            scales = amax / 127
            return Stored(flat(jnp.clip(jnp.round(_scaled(values, scales)), -127, 127)).astype(jnp.int8), scales)
        case "int2":
            codes = flat(jnp.clip(jnp.round(_scaled(values, amax)), -1, 1)).astype(jnp.int32) + 1
            return Stored(_packed(codes, 2), amax)
        case "mxfp4":
            # The exponent that puts amax into E2M1's top binade, 4 .. 6; frexp's mantissa is in [0.5, 1).
            exponent = jnp.clip(jnp.frexp(amax)[1] - 3, -127, 127)
            scales = jnp.where(amax > 0, lax.exp2(exponent.astype(jnp.float32)), 0.0)
            return Stored(_packed(flat(_e2m1(_scaled(values, scales))), 4), (exponent + 127).astype(jnp.uint8))
        case _:
            scale = jnp.max(amax, axis=(1, 2)) / (_E2M1_MAX * _E4M3_MAX)
            scales = _bits(_scaled(amax, _E2M1_MAX * scale[:, None]), _E4M3_MAX)
            step = scale[:, None, None] * _from_bits(scales)
            return Stored(_packed(flat(_e2m1(_scaled(values, step))), 4), scales, scale)


def restore(stored: Stored, centroids: jax.Array, form: str) -> jax.Array:
    """The rows, f32 [b, w, d], from what :func:`store` kept and the same centroids."""
    if form == "none":
        return stored.codes.astype(jnp.float32)
    match form:
        case "fp8":
            values, scales = _from_bits(stored.codes), stored.scales
        case "int8":
            values, scales = stored.codes.astype(jnp.float32), stored.scales
        case "int2":
            values, scales = _unpacked(stored.codes, 2).astype(jnp.float32) - 1, stored.scales
        case "mxfp4":
            values, scales = _from_e2m1(_unpacked(stored.codes, 4)), lax.exp2(stored.scales.astype(jnp.float32) - 127)
        case _:
            values = _from_e2m1(_unpacked(stored.codes, 4))
            scales = stored.scale[:, None, None] * _from_bits(stored.scales)
    b, w, d = values.shape
    rows = (values.reshape(b, w, d // GROUPS[form], GROUPS[form]) * scales[..., None]).reshape(b, w, d)
    return rows if form == "nvfp4_direct" else rows + centroids


def _scaled(values: jax.Array, scales: jax.Array) -> jax.Array:
    """values [..., m] / scales [...], 0 where the scale is 0."""
    scales = scales[..., None]
    return jnp.where(scales > 0, values / jnp.where(scales > 0, scales, 1.0), 0.0)


def _bits(values: jax.Array, largest: float) -> jax.Array:
    """The bits of values in E4M3, u8; clipped first, since the cast makes NaN of what is too large."""
    return lax.bitcast_convert_type(jnp.clip(values, -largest, largest).astype(jnp.float8_e4m3fn), jnp.uint8)


def _from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)


def _e2m1(values: jax.Array) -> jax.Array:
    """E2M1 codes 0 .. 15: a sign bit, then the index of the nearest magnitude; a tie goes to the even index."""
    size = jnp.abs(values)
    # Midway points; those between an odd index and the next even one belong to the latter.
    code = (size > 0.25).astype(jnp.int32) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return jnp.where((values < 0) & (code > 0), code + 8, code)


def _from_e2m1(codes: jax.Array) -> jax.Array:
    return jnp.array(_E2M1 + tuple(-v for v in _E2M1), jnp.float32)[codes]


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    """Codes of ``bits`` bits [..., d] as u8 [..., d bits / 8], the first in the lowest bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    shifts = jnp.arange(8 // bits) * bits
    return jnp.sum(parts << shifts, axis=-1).astype(jnp.uint8)


def _unpacked(packed: jax.Array, bits: int) -> jax.Array:
    shifts = jnp.arange(8 // bits) * bits
    codes = (packed[..., None].astype(jnp.int32) >> shifts) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)
