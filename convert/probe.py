"""Logits of probe prompts, computed from a model directory one piece at a time in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.dtypes import WEIGHT_DTYPES, cast
from convert.fuse import row_blocks
from convert.keymap import NAMES, pieces
from convert.source import Source
from pallas_kernels.attention import attend
from polestar_jax.models.attention import as_keys, as_values
from polestar_jax.models.denoiser import Block, RMSNorm
from polestar_jax.spec import ModelSpec

_F32 = WEIGHT_DTYPES["F32"]


def probe_prompts(spec: ModelSpec) -> list[list[int]]:
    """Two short prompts spread over the vocabulary, the second ending in masked positions."""
    lengths = [min(length, spec.max_length) for length in (7, 24)]
    prompts = [[(7919 * i * i + 104729 * i + 11) % spec.vocab_size for i in range(length)] for length in lengths]
    prompts[1][-8:] = [spec.mask_id] * len(prompts[1][-8:])
    return prompts


def probe_logits(source: Source) -> list[np.ndarray]:
    """Float32 logits [n, v] of each probe prompt; host memory holds one layer at a time."""
    names, spec = NAMES[source.spec.family], source.spec
    _, *layers, _ = pieces(spec)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Block(spec, nnx.Rngs(0), dtype=jnp.float32)))

    with jax.default_matmul_precision("highest"):
        rows = [[_row(source, names.embedding, token) for token in prompt] for prompt in probe_prompts(spec)]
        states = [jnp.asarray(np.stack(prompt))[None] for prompt in rows]
        for piece in layers:
            weights = {slot.path[2:]: nnx.Param(jnp.asarray(w)) for slot, w in source.weights(piece, "F32")}
            state = nnx.from_flat_state(weights.items())
            states = [_layer(graph, state, x, spec.rope_theta) for x in states]
        norm = RMSNorm(spec.d_model, spec.norm_eps, dtype=jnp.float32)
        norm.weight.set_value(jnp.asarray(cast(source.rows(names.norm, 0, spec.d_model), _F32, names.norm)))
        return _head(source, [np.asarray(norm(x))[0] for x in states])


@functools.partial(jax.jit, static_argnames=("graph", "theta"))
def _layer(graph: nnx.GraphDef, weights: nnx.State, x: jax.Array, theta: float) -> jax.Array:
    layer = nnx.merge(graph, weights)
    positions = jnp.arange(x.shape[1])[None]
    q, k, v = layer.project(x)
    return layer.finish(
        x, attend(q, as_keys(k), as_values(v), q_positions=positions, k_positions=positions, theta=theta)
    )


def _row(source: Source, name: str, index: int) -> np.ndarray:
    return cast(source.rows(name, index, index + 1), _F32, name)[0]


def _head(source: Source, states: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of normed rows [n, d], a few thousand vocabulary entries at a time."""
    name = NAMES[source.spec.family].head
    logits = [np.empty((len(x), source.spec.vocab_size), np.float32) for x in states]
    for start, stop in row_blocks(source.entries[name].shape, _F32.itemsize):
        block = cast(source.rows(name, start, stop), _F32, name)
        for out, x in zip(logits, states, strict=True):
            out[:, start:stop] = x @ block.T
    return logits
