"""Single kernels to compile ahead, by name, at the shapes that one decoding pass of a model gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.vocab_scores import vocab_scores
from polestar_jax.aot.compile import Case

if TYPE_CHECKING:
    from polestar_jax.aot.cases import Size


def _vocab_scores(size: Size) -> Case:
    """The scores of one block's logits, by themselves."""
    rows = jax.ShapeDtypeStruct((size.batch, size.block, size.spec.vocab_size), jnp.float32)
    return Case(
        name=f"{size.model} vocab-scores",
        function=lambda logits: vocab_scores(logits, barred=(size.spec.mask_id,)),
        args=(rows,),
    )


KERNELS = {"vocab-scores": _vocab_scores}
