"""The products with the weights and nothing else: what the rest of a pass is measured against."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from polestar_jax.bench.rows import Rows
from polestar_jax.decode import engine
from polestar_jax.models.denoiser import Denoiser


def compile_products(model: Denoiser, rows: Rows) -> Any:
    """A compiled function of the weights and of :func:`rows_in`: the products of a pass over these rows."""
    graph, weights = engine.split(model)
    return _products.lower(graph, weights, rows, rows_in(model, rows)).compile()


def rows_in(model: Denoiser, rows: Rows) -> jax.Array:
    """Random rows [r, d] in the model's dtype for the first layer."""
    most = max(*rows.projected, *rows.finished, rows.scored)
    return jax.random.normal(jax.random.key(0), (most, model.spec.d_model), model.dtype)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _products(graph: nnx.GraphDef, weights: Any, rows: Rows, given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each product takes what the one before it gave, cut or filled up to its rows: so they run in order, none is left out,
    and each reads its rows from memory as in a pass."""
    model = nnx.merge(graph, weights)
    h, e = model.spec.n_heads, model.spec.head_dim
    x = given
    with engine.precision(model.dtype):
        for layer, projected, finished in zip(model.layers, rows.projected, rows.finished, strict=True):
            fused = jnp.einsum("rd,dgje->rgje", _fitted(x, projected, given), layer.qkv[...])
            heads = _fitted(fused[:, :, :-2].reshape(projected, h * e), finished, given).reshape(finished, h, e)
            x = jnp.einsum("rhe,hed->rd", heads, layer.out[...])
            gate_up = jnp.einsum("rd,dcf->rcf", x, layer.gate_up[...])
            x = jnp.einsum("rf,fd->rd", gate_up[:, 0], layer.down[...])
        scored = _fitted(x, rows.scored, given)
        return x, jnp.einsum("rd,dv->rv", scored, model.head[...], preferred_element_type=jnp.float32)


def _fitted(x: jax.Array, rows: int, filler: jax.Array) -> jax.Array:
    """The first ``rows`` rows of x [r, c], after the last of x some of ``filler`` [>= rows, d], repeated to width c."""
    missing = rows - x.shape[0]
    if missing <= 0:
        return x[:rows]
    return jnp.concatenate([x, jnp.resize(filler[:1], (missing, x.shape[1]))])
