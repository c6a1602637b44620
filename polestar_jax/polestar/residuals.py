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

from pallas_kernels.residual import nvfp4, ref

GROUPS = {"none": 1, "fp8": 16, "int8": 16, "mxfp4": 32, "int2": 16, "nvfp4": nvfp4.GROUP, "nvfp4_direct": nvfp4.GROUP}


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
    if form in ("nvfp4", "nvfp4_direct"):
        return Stored(*ref.quantise(rows if form == "nvfp4_direct" else rows - centroids))
    b, w, d = rows.shape
    values = (rows - centroids).reshape(b, w, d // GROUPS[form], GROUPS[form])
    amax = jnp.max(jnp.abs(values), axis=-1)
    flat = lambda codes: codes.reshape(b, w, d)  # noqa: E731
    match form:
        case "fp8":
            scales = amax / nvfp4.E4M3_MAX
            return Stored(_bits(flat(_scaled(values, scales)), nvfp4.E4M3_MAX), scales)
        case "int8":
            scales = amax / 127
            return Stored(flat(jnp.clip(jnp.round(_scaled(values, scales)), -127, 127)).astype(jnp.int8), scales)
        case "int2":
            codes = flat(jnp.clip(jnp.round(_scaled(values, amax)), -1, 1)).astype(jnp.int32) + 1
            return Stored(nvfp4.packed(codes, 2), amax)
        case _:  # mxfp4
            # The exponent that puts amax into E2M1's top binade, 4 .. 6; frexp's mantissa is in [0.5, 1).
            exponent = jnp.clip(jnp.frexp(amax)[1] - 3, -127, 127)
            scales = jnp.where(amax > 0, lax.exp2(exponent.astype(jnp.float32)), 0.0)
            codes = nvfp4.to_e2m1(flat(_scaled(values, scales)))
            return Stored(nvfp4.packed(codes, 4), (exponent + 127).astype(jnp.uint8))


def restore(stored: Stored, centroids: jax.Array, form: str) -> jax.Array:
    """The rows, f32 [b, w, d], from what :func:`store` kept and the same centroids."""
    if form == "none":
        return stored.codes.astype(jnp.float32)
    if form in ("nvfp4", "nvfp4_direct"):
        values = ref.dequantise(stored)
        return values if form == "nvfp4_direct" else values + centroids
    match form:
        case "fp8":
            values, scales = _from_bits(stored.codes), stored.scales
        case "int8":
            values, scales = stored.codes.astype(jnp.float32), stored.scales
        case "int2":
            values, scales = nvfp4.unpacked(stored.codes, 2).astype(jnp.float32) - 1, stored.scales
        case _:  # mxfp4
            values = nvfp4.from_e2m1(nvfp4.unpacked(stored.codes, 4), jnp.ones((), jnp.float32))
            scales = lax.exp2(stored.scales.astype(jnp.float32) - 127)
    b, w, d = values.shape
    rows = (values.reshape(b, w, d // GROUPS[form], GROUPS[form]) * scales[..., None]).reshape(b, w, d)
    return rows + centroids


def _scaled(values: jax.Array, scales: jax.Array) -> jax.Array:
    """values [..., m] / scales [...], 0 where the scale is 0."""
    scales = scales[..., None]
    return jnp.where(scales > 0, values / jnp.where(scales > 0, scales, 1.0), 0.0)


def _bits(values: jax.Array, largest: float) -> jax.Array:
    """The bits of values in E4M3, u8; clipped first, since the cast makes NaN of what is too large."""
    return lax.bitcast_convert_type(jnp.clip(values, -largest, largest).astype(jnp.float8_e4m3fn), jnp.uint8)


def _from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
