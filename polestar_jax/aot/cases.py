"""What can be compiled ahead: functions that make a Case from JSON values."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.vocab_scores import VocabScores, vocab_scores
from polestar_jax import decoders
from polestar_jax.aot.compile import Case
from polestar_jax.decode import engine
from polestar_jax.decode.state import DecodeState
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.models.published import PUBLISHED
from polestar_jax.spec import ModelSpec


def denoiser_case(
    *, model: str, layers: int | None, prompt: int, gen: int, block: int, batch: int, dtype: str, kernels: str | None
) -> Case:
    """One full pass over prompt and generation, and the scores of one block's rows: the work of a vanilla step."""
    spec = cut(PUBLISHED[model], layers)
    graph, weights = nnx.split(Denoiser.abstract(spec, jnp.dtype(dtype)))
    ids = jax.ShapeDtypeStruct((batch, prompt + gen), jnp.int32)

    def forward(weights: nnx.State, tokens: jax.Array, positions: jax.Array, start: jax.Array) -> VocabScores:
        denoiser = nnx.merge(graph, weights)
        rows = jax.lax.dynamic_slice_in_dim(denoiser(tokens, positions), start, block, axis=1)
        return vocab_scores(denoiser.logits(rows), barred=(spec.mask_id,), backend=kernels)

    start = jax.ShapeDtypeStruct((), jnp.int32)
    return Case(name=f"{model}-denoiser", function=forward, args=(weights, ids, ids, start))


def vanilla_step_case(
    *, model: str, layers: int | None, prompt: int, gen: int, block: int, batch: int, dtype: str
) -> Case:
    """One pass of vanilla decoding with its commits; the state is donated."""
    return _decoding(engine.step, "vanilla-step", decoders.vanilla, model, layers, prompt, gen, block, batch, dtype)


def vanilla_loop_case(
    *, model: str, layers: int | None, prompt: int, gen: int, block: int, batch: int, dtype: str
) -> Case:
    """The whole vanilla decoding loop; the state is donated."""
    return _decoding(engine.decode, "vanilla-loop", decoders.vanilla, model, layers, prompt, gen, block, batch, dtype)


def cut(spec: ModelSpec, layers: int | None) -> ModelSpec:
    """The spec with its first ``layers`` layers, or all."""
    return spec if layers is None else dataclasses.replace(spec, n_layers=layers)


def _decoding(run, name, build, model, layers, prompt, gen, block, batch, dtype):
    spec = cut(PUBLISHED[model], layers)
    graph, weights = nnx.split(Denoiser.abstract(spec, jnp.dtype(dtype)))
    decoder = build(gen_length=gen, block_length=block)
    prompts = [[0] * prompt] * batch
    state = jax.eval_shape(
        lambda weights: engine.init_state(nnx.merge(graph, weights), decoder, prompts, columns=prompt), weights
    )

    def function(weights: nnx.State, state: DecodeState) -> DecodeState:
        return run(nnx.merge(graph, weights), decoder, state)

    return Case(name=f"{model}-{name}", function=function, args=(weights, state), donate=(1,))
