"""Stand-ins for a model whose answers a test dictates, and small real models with random weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.vocab_scores import VocabScores, vocab_scores
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec

MASK, EOS, EOT = 29, 27, 28
SPEC = ModelSpec(
    family="llada", d_model=32, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=8, d_ff=64, vocab_size=30, max_length=1024,
    rope_theta=10000.0, norm_eps=1e-5, qkv_bias=False, logit_shift=0, mask_id=MASK, eos_id=EOS, bos_id=None,
    stop_ids=(EOS, EOT),
)  # fmt: skip
# Settings of Polestar: tests that use the same ones on models of one specification share a compiled program.
POLESTAR = dict(
    gen_length=16, block_length=8, clusters=4, top_clusters=2, tau_static=0.6, tau_suffix=0.5,
)  # fmt: skip
DREAM = dataclasses.replace(SPEC, family="dream", n_kv_heads=2, qkv_bias=True, logit_shift=1, norm_eps=1e-6)
ONE_LAYER = dataclasses.replace(SPEC, n_layers=1)  # where what is shown does not pass from layer to layer


class TableModel(nnx.Module):
    """Logits read from a table by position, whatever the tokens are: row p of ``table`` [positions, v] scores position p."""

    def __init__(self, table: np.ndarray, spec: ModelSpec = SPEC):
        self.spec = dataclasses.replace(spec, vocab_size=table.shape[1])
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32)

    def __call__(self, tokens: jax.Array, positions: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        return positions[..., None].astype(jnp.float32)

    def logits(self, rows: jax.Array) -> jax.Array:
        return self.table[...][rows[..., 0].astype(jnp.int32)]

    def scores(self, rows: jax.Array, barred: tuple[int, ...] = ()) -> VocabScores:
        return vocab_scores(self.logits(rows), barred=barred)


def random_model(spec: ModelSpec = SPEC, seed: int = 0, sharpness: float = 40.0) -> Denoiser:
    """A small random denoiser with confidences spread over (0, 1)."""
    model = Denoiser(spec, nnx.Rngs(seed))
    model.head[...] = model.head[...] * sharpness
    if spec.qkv_bias:
        for i, layer in enumerate(model.layers):
            layer.qkv_bias[...] = 0.3 * jax.random.normal(jax.random.key(i), layer.qkv_bias[...].shape)
    return model


def table_for(tokens: list[int], confidences: list[float], vocab: int = 30, prompt: int = 4) -> np.ndarray:
    """A table that proposes ``tokens`` with exactly these confidences behind a prompt of ``prompt`` positions."""
    table = np.zeros((prompt + len(tokens), vocab), np.float32)
    for i, (token, confidence) in enumerate(zip(tokens, confidences, strict=True)):
        # The mask token is barred, so vocab - 2 others share the rest.
        table[prompt + i, token] = np.log(confidence / (1 - confidence) * (vocab - 2))
    return table


def lively_model(spec: ModelSpec = SPEC, seed: int = 0) -> Denoiser:
    """A small random denoiser whose rows heed each other: its answers vary, and its attention drifts."""
    model = random_model(spec, seed=seed)
    for layer in model.layers:
        layer.qkv[...], layer.out[...] = 3 * layer.qkv[...], 3 * layer.out[...]
    return model
