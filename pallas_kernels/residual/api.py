"""What callers import: checks, and the choice between the definition and the kernel."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.residual import ref
from pallas_kernels.residual.nvfp4 import GROUP, Nvfp4
from pallas_kernels.residual.ref import Patched, Stored

DTYPES = ("float32", "bfloat16", "float16")


def patched(
    stored: Stored,
    centroids: jax.Array,
    labels: jax.Array,
    packet: jax.Array,
    chosen: jax.Array,
    norm_weight: jax.Array,
    *,
    eps: float,
    direct: bool = False,
    backend: str | None = None,
) -> Patched:
    """Rows as they are stored, with those of a packet in place, and the norm that feeds the next product, in one pass.

    Args:
      stored: what :func:`quantised` returned, or anything with its fields: codes u8 [b, w, d/2], scales u8 [b, w, d/16],
        scale f32 [b].
      centroids: f32 [b, K, d]; labels: i32 [b, w], whose centroid is added to a row. A label outside 0 .. K - 1, such as
        the K of a dead row, adds none.
      packet: [b, w, d] float32, bfloat16 or float16; ``chosen``: bool [b, w], which of its rows replace the stored ones.
      norm_weight: [d], in the packet's dtype.
      eps: of the norm.
      direct: no centroid is added; ``centroids`` and ``labels`` are not looked at. Static.
      backend: None, "xla", "pallas" or "interpret"; see :func:`pallas_kernels.dispatch.choose`.

    Returns:
      Patched. States and change are the same numbers on every route and platform. A NaN code of E4M3 (0x7f, 0xff) makes
      its group NaN, and so the norm of its row; NaN in a row that is replaced goes no further than its change.

    Raises:
      ValueError: shapes or dtypes that do not go together.
      pallas_kernels.dispatch.Unsupported: ``backend`` names a kernel route that cannot serve this call.
    """
    shape, dtype = packet.shape, str(packet.dtype)
    _check_rows("packet", packet, DTYPES)
    b, w, d = shape
    need = {
        "codes": (stored.codes, (b, w, d // 2), "uint8"),
        "scales": (stored.scales, (b, w, d // GROUP), "uint8"),
        "scale": (stored.scale, (b,), "float32"),
        "chosen": (chosen, (b, w), "bool"),
        "norm_weight": (norm_weight, (d,), dtype),
    }
    clusters = () if direct else (centroids, labels)
    _check(need | _clusters_needed(shape, *clusters), f"packet {list(shape)}")
    args = (stored.codes, stored.scales, stored.scale, packet, chosen, norm_weight, *clusters)

    def plan(triton, interpret: bool) -> dispatch.Kernel:
        count = 0 if direct else centroids.shape[1]
        return triton.plan_patched(shape, count, eps=eps, direct=direct, interpret=interpret)

    kernel = _chosen("residual_patched", plan, args, backend)
    if kernel is None:
        return ref.patched(stored, centroids, labels, packet, chosen, norm_weight, eps=eps, direct=direct)
    return kernel(*args)


def quantised(
    states: jax.Array, centroids: jax.Array, labels: jax.Array, *, direct: bool = False, backend: str | None = None
) -> Nvfp4:
    """Rows in NVFP4, as residuals to their centroids.

    A sequence's scale is its largest magnitude / (6 * 448), a group's scale E4M3 of its largest magnitude / (6 * scale), a
    code E2M1 of value / (scale * group scale): nearest, ties to even, saturating. A group of zeros has scale 0.

    Args:
      states: f32 [b, w, d], d a multiple of 16.
      centroids: f32 [b, K, d]; labels: i32 [b, w], whose centroid is subtracted from a row. A label outside 0 .. K - 1,
        such as the K of a dead row, subtracts none.
      direct: no centroid is subtracted; ``centroids`` and ``labels`` are not looked at. Static.
      backend: None, "xla", "pallas" or "interpret"; see :func:`pallas_kernels.dispatch.choose`.

    Returns:
      Nvfp4, the same bits on every route and platform. NaN or infinity anywhere in a sequence (or a difference that
      overflows) makes its scale NaN and all its codes zero, so that all of it reads back as NaN; other sequences are not
      touched. Sequences with no magnitude of 2.1e-27 or more read back as zeros (see :mod:`pallas_kernels.residual.nvfp4`).

    Raises:
      ValueError: shapes or dtypes that do not go together.
      pallas_kernels.dispatch.Unsupported: ``backend`` names a kernel route that cannot serve this call.
    """
    shape = states.shape
    _check_rows("states", states, ("float32",))
    clusters = () if direct else (centroids, labels)
    _check(_clusters_needed(shape, *clusters), f"states {list(shape)}")

    def plan(triton, interpret: bool) -> dispatch.Kernel:
        return triton.plan_quantised(shape, 0 if direct else centroids.shape[1], direct=direct, interpret=interpret)

    kernel = _chosen("residual_quantised", plan, (states, *clusters), backend)
    if kernel is None:
        return ref.quantised(states, centroids, labels, direct=direct)
    return kernel(states, *clusters)


def _check_rows(name: str, rows: jax.Array, dtypes: tuple[str, ...]) -> None:
    if rows.ndim != 3 or rows.shape[2] == 0 or rows.shape[2] % GROUP or str(rows.dtype) not in dtypes:
        raise ValueError(
            f"{name} {rows.dtype}{list(rows.shape)}: need [b, w, d] of {', '.join(dtypes)}, d a multiple of {GROUP}"
        )


def _clusters_needed(shape: tuple[int, int, int], *clusters: jax.Array) -> dict[str, tuple]:
    if not clusters:
        return {}
    centroids, labels = clusters
    b, w, d = shape
    count = centroids.shape[1] if centroids.ndim == 3 else 1
    return {
        "centroids": (centroids, (b, max(count, 1), d), "float32"),
        "labels": (labels, (b, w), "int32"),
    }


def _check(need: dict[str, tuple], given: str) -> None:
    for name, (array, shape, dtype) in need.items():
        if array.shape != shape or str(array.dtype) != dtype:
            raise ValueError(f"{name} {array.dtype}{list(array.shape)}: need {dtype}{list(shape)} for {given}")


def _chosen(
    op: str, plan: Callable[..., dispatch.Kernel], args: tuple[jax.Array, ...], backend: str | None
) -> dispatch.Kernel | None:
    """The kernel that runs, or None for the definition. ``plan`` makes it from the module of kernels."""
    platform = dispatch.current_platform()
    avals = [jax.ShapeDtypeStruct(arg.shape, jnp.dtype(arg.dtype)) for arg in args]

    def kernel(route: str) -> dispatch.Kernel:
        # Imported here: a jax without that route still has XLA.
        try:
            from pallas_kernels.residual import triton
        except ImportError as error:
            raise dispatch.Unsupported(f"jax {jax.__version__} has no Pallas Triton route ({error})") from error
        return plan(triton, route == "interpret")

    def build(route: str) -> None:
        made = kernel(route)
        if route == "pallas":
            dispatch.check_builds(made, *avals, platform=platform)

    route = dispatch.choose(op, platform=platform, backend=backend, build=build)
    return None if route == "xla" else kernel(route)
