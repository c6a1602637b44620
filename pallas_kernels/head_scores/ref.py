"""The definition: the head's logits in float32, then the vocabulary scores of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.vocab_scores import ref
from pallas_kernels.vocab_scores.ref import Ranges, VocabScores


def head_scores(rows: jax.Array, head: jax.Array, *, barred: Ranges, first_allowed: int) -> VocabScores:
    """Scores of the logits rows [..., d] @ head [d, v]. ``barred`` ids take no part; ``first_allowed`` is the lowest id
    outside them."""
    logits = jnp.einsum("...d,dv->...v", rows, head, preferred_element_type=jnp.float32)
    return ref.vocab_scores(logits, barred=barred, first_allowed=first_allowed)
