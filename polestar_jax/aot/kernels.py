"""Single kernels to compile ahead, by name, at the shapes that one decoding pass of a model gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.attention import Distribution, Measured, attend, measure
from pallas_kernels.head_scores import head_scores
from pallas_kernels.residual import GROUP, Nvfp4, patched, quantised
from pallas_kernels.vocab_scores import vocab_scores
from polestar_jax.aot.compile import Case

if TYPE_CHECKING:
    from polestar_jax.aot.cases import Size

CENTROIDS = 8


def _vocab_scores(size: Size) -> Case:
    """The scores of one block's logits, by themselves."""
    rows = jax.ShapeDtypeStruct((size.batch, size.block, size.spec.vocab_size), jnp.float32)
    return Case(
        name=f"{size.model} vocab-scores",
        function=lambda logits: vocab_scores(logits, barred=(size.spec.mask_id,)),
        args=(rows,),
    )


def _head_scores(size: Size) -> Case:
    """The scores of one block's last-layer rows, from the head's weights."""
    spec, dtype = size.spec, jnp.dtype(size.dtype)
    rows = jax.ShapeDtypeStruct((size.batch, size.block, spec.d_model), dtype)
    head = jax.ShapeDtypeStruct((spec.d_model, spec.vocab_size), dtype)
    return Case(
        name=f"{size.model} head-scores",
        function=lambda rows, head: head_scores(rows, head, barred=(spec.mask_id,), backend="pallas"),
        args=(rows, head),
    )


def _attention(size: Size) -> Case:
    """A block's and its window's rows over the whole cache."""
    rows = size.block * 4
    q, cache = _rows(size, rows), _cache(size)
    positions = [jax.ShapeDtypeStruct((size.batch, n), jnp.int32) for n in (rows, size.prompt + size.gen)]

    def run(q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, keys: jax.Array) -> jax.Array:
        return attend(q, k, v, q_positions=rows, k_positions=keys, theta=size.spec.rope_theta, valid=keys >= 0)

    return Case(name=f"{size.model} attention", function=run, args=(q, *cache, *positions))


def _drift(size: Size) -> Case:
    """A block's rows at the last layer: their attention, and how far it moved."""
    q, cache, n = _rows(size, size.block), _cache(size), size.prompt + size.gen
    positions = [jax.ShapeDtypeStruct((size.batch, count), jnp.int32) for count in (size.block, n)]

    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, keys: jax.Array, previous: Distribution
    ) -> Measured:
        theta, valid = size.spec.rope_theta, keys >= 0
        return measure(q, k, v, previous=previous, q_positions=rows, k_positions=keys, theta=theta, valid=valid)

    previous = _distribution(size, size.block)
    return Case(name=f"{size.model} drift", function=run, args=(q, *cache, *positions, previous), donate=(5,))


def _cluster_drift(size: Size) -> Case:
    """Eight centroids at a refresh: what they attend to by content, and how far it moved."""
    k, _ = _cache(size)
    valid = jax.ShapeDtypeStruct((size.batch, size.prompt + size.gen), bool)

    def run(q: jax.Array, k: jax.Array, valid: jax.Array, previous: Distribution) -> Measured:
        return measure(q, k, previous=previous, valid=valid)

    args = (_rows(size, CENTROIDS), k, valid, _distribution(size, CENTROIDS))
    return Case(name=f"{size.model} cluster drift", function=run, args=args, donate=(3,))


def _residual_patched(size: Size) -> Case:
    """A refresh reads the window's states of one layer, with some rows new, and norms them."""
    (b, w, d), *clusters = _window(size)
    dtype = jnp.dtype(size.dtype)
    stored = Nvfp4(
        codes=jax.ShapeDtypeStruct((b, w, d // 2), jnp.uint8),
        scales=jax.ShapeDtypeStruct((b, w, d // GROUP), jnp.uint8),
        scale=jax.ShapeDtypeStruct((b,), jnp.float32),
    )
    packet, chosen = jax.ShapeDtypeStruct((b, w, d), dtype), jax.ShapeDtypeStruct((b, w), bool)
    return Case(
        name=f"{size.model} residual-patched",
        function=lambda *args: patched(*args, eps=size.spec.norm_eps, backend="pallas"),
        args=(stored, *clusters, packet, chosen, jax.ShapeDtypeStruct((d,), dtype)),
    )


def _residual_quantised(size: Size) -> Case:
    """A refresh writes the window's states of one layer."""
    shape, *clusters = _window(size)
    return Case(
        name=f"{size.model} residual-quantised",
        function=lambda *args: quantised(*args, backend="pallas"),
        args=(jax.ShapeDtypeStruct(shape, jnp.float32), *clusters),
    )


def _window(size: Size) -> tuple[tuple[int, int, int], jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shape of a window's rows, two blocks before the current one and one behind, their centroids and labels."""
    b, w, d = size.batch, 3 * size.block, size.spec.d_model
    centroids = jax.ShapeDtypeStruct((b, CENTROIDS, d), jnp.float32)
    return (b, w, d), centroids, jax.ShapeDtypeStruct((b, w), jnp.int32)


def _rows(size: Size, rows: int) -> jax.ShapeDtypeStruct:
    spec = size.spec
    return jax.ShapeDtypeStruct((size.batch, rows, spec.n_heads, spec.head_dim), jnp.dtype(size.dtype))


def _cache(size: Size) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    spec, n = size.spec, size.prompt + size.gen
    shapes = ((n, spec.head_dim), (spec.head_dim, n))
    dtype = jnp.dtype(size.dtype)
    k, v = (jax.ShapeDtypeStruct((size.batch, spec.n_kv_heads, *shape), dtype) for shape in shapes)
    return k, v


def _distribution(size: Size, rows: int) -> Distribution:
    shape = (size.batch, size.spec.n_heads, rows)
    scores = jax.ShapeDtypeStruct((*shape, size.prompt + size.gen), jnp.float32)
    return Distribution(scores, jax.ShapeDtypeStruct(shape, jnp.float32))


KERNELS = {
    "attention": _attention,
    "drift": _drift,
    "cluster-drift": _cluster_drift,
    "head-scores": _head_scores,
    "residual-patched": _residual_patched,
    "residual-quantised": _residual_quantised,
    "vocab-scores": _vocab_scores,
}
