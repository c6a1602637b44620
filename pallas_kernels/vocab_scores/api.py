"""What callers import: checks, and the choice between the definition and the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.vocab_scores import ref
from pallas_kernels.vocab_scores.ref import Ranges, VocabScores

DTYPES = ("float32", "bfloat16", "float16")


def vocab_scores(logits: jax.Array, *, barred: tuple[int, ...] = (), backend: str | None = None) -> VocabScores:
    """Most probable id, its probability, margin, negative entropy and log-sum-exp of each row of logits.

    Args:
      logits: [..., v] float32, bfloat16 or float16; all arithmetic is float32. -inf entries have probability 0.
      barred: ids that are never chosen and take no part in the softmax, as if their logits were -inf. Static.
      backend: None, "xla", "pallas" or "interpret"; see :func:`pallas_kernels.dispatch.choose`.

    Returns:
      VocabScores of shape [...]. A row with no finite logit, or with NaN or +inf among the allowed ones, has no
      distribution: its confidence, margin and neg_entropy are NaN and its token is some allowed id. The kernel leaves
      out the 1e-10 of neg_entropy, which lowers it by at most v * 1e-10 (1.6e-5 for 152,064 ids).

    Raises:
      ValueError: wrong dtype or rank, a barred id outside the vocabulary, or all ids barred.
      pallas_kernels.dispatch.Unsupported: ``backend`` names a kernel route that cannot serve this call.
    """
    if logits.ndim == 0 or logits.shape[-1] == 0 or str(logits.dtype) not in DTYPES:
        raise ValueError(f"logits {logits.dtype}{list(logits.shape)}: need [..., v] with v > 0 of {', '.join(DTYPES)}")
    *lead, vocab = logits.shape
    ranges, first_allowed = ref.as_ranges(barred, vocab)
    flat = jax.ShapeDtypeStruct((logits.size // vocab, vocab), logits.dtype)
    platform = dispatch.current_platform()

    def build(route: str) -> None:
        kernel = _kernel(flat, ranges, first_allowed, interpret=route == "interpret")
        if route == "pallas":
            dispatch.check_builds(kernel, flat, platform=platform)

    route = dispatch.choose("vocab_scores", platform=platform, backend=backend, build=build)
    if route == "xla":
        return ref.vocab_scores(logits, barred=ranges, first_allowed=first_allowed)
    kernel = _kernel(flat, ranges, first_allowed, interpret=route == "interpret")
    return jax.tree.map(lambda field: field.reshape(lead), kernel(logits.reshape(flat.shape)))


def _kernel(flat: jax.ShapeDtypeStruct, barred: Ranges, first_allowed: int, *, interpret: bool) -> dispatch.Kernel:
    """The Pallas kernel for logits like ``flat`` [rows, v]. Imported here: a jax without that route still has XLA."""
    try:
        from pallas_kernels.vocab_scores import triton
    except ImportError as error:
        raise dispatch.Unsupported(f"jax {jax.__version__} has no Pallas Triton route ({error})") from error
    return triton.plan(flat.shape, jnp.dtype(flat.dtype), barred, first_allowed, interpret=interpret)
