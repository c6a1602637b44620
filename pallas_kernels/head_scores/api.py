"""What callers import: checks, and the choice between the definition and the kernel."""

from __future__ import annotations

import math

import jax

from pallas_kernels import dispatch
from pallas_kernels.head_scores import ref
from pallas_kernels.vocab_scores.api import DTYPES
from pallas_kernels.vocab_scores.ref import Ranges, VocabScores, as_ranges


def head_scores(
    rows: jax.Array, head: jax.Array, *, barred: tuple[int, ...] = (), backend: str | None = None
) -> VocabScores:
    """The scores that :func:`pallas_kernels.vocab_scores.vocab_scores` gives of the logits ``rows @ head``.

    The kernel reads the head once for up to 64 rows and keeps no logits in memory.

    Args:
      rows: [..., d] float32, bfloat16 or float16, after the final norm.
      head: [d, v], the same dtype (the kernel serves no other). Products are accumulated, and scores computed, in
        float32. The kernel multiplies float32 in full; the definition follows jax's matmul precision.
      barred: ids that are never chosen and take no part in the softmax, as if their logits were -inf. Static.
      backend: None, "xla", "pallas" or "interpret"; see :func:`pallas_kernels.dispatch.choose`.

    Returns:
      VocabScores of shape [...]. Where the two best logits differ by no more than their rounding, kernel and definition
      may name either. A row without a distribution is marked as :func:`vocab_scores` says: NaN, and some allowed id.

    Raises:
      ValueError: wrong dtype or shape, a barred id outside the vocabulary, or all ids barred.
      pallas_kernels.dispatch.Unsupported: ``backend`` names a kernel route that cannot serve this call.
    """
    _check(rows, head)
    *lead, depth = rows.shape
    ranges, first_allowed = as_ranges(barred, head.shape[1])
    flat = jax.ShapeDtypeStruct((math.prod(lead), depth), rows.dtype)
    weights = jax.ShapeDtypeStruct(head.shape, head.dtype)
    platform = dispatch.current_platform()

    def build(route: str) -> None:
        kernel = _kernel(flat, weights, ranges, first_allowed, interpret=route == "interpret")
        if route == "pallas":
            dispatch.check_builds(kernel, flat, weights, platform=platform)

    route = dispatch.choose("head_scores", platform=platform, backend=backend, build=build)
    if route == "xla":
        return ref.head_scores(rows, head, barred=ranges, first_allowed=first_allowed)
    kernel = _kernel(flat, weights, ranges, first_allowed, interpret=route == "interpret")
    return jax.tree.map(lambda field: field.reshape(lead), kernel(rows.reshape(flat.shape), head))


def _check(rows: jax.Array, head: jax.Array) -> None:
    for name, array in (("rows", rows), ("head", head)):
        if str(array.dtype) not in DTYPES:
            raise ValueError(f"{name} {array.dtype}{list(array.shape)}: need {', '.join(DTYPES)}")
    if head.ndim != 2 or 0 in head.shape or rows.ndim == 0 or rows.shape[-1] != head.shape[0]:
        raise ValueError(
            f"rows {list(rows.shape)} and head {list(head.shape)}: need [..., d] and [d, v] with d > 0 and v > 0"
        )


def _kernel(
    rows: jax.ShapeDtypeStruct, head: jax.ShapeDtypeStruct, barred: Ranges, first_allowed: int, *, interpret: bool
) -> dispatch.Kernel:
    """The Pallas kernel for rows [r, d] and head. Imported here: a jax without that route still has XLA."""
    try:
        from pallas_kernels.head_scores import triton
    except ImportError as error:
        raise dispatch.Unsupported(f"jax {jax.__version__} has no Pallas Triton route ({error})") from error
    return triton.plan(rows, head, barred, first_allowed, interpret=interpret)
