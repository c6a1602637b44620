"""One bidirectional transformer for LLaDA and Dream, cut at the seams decoding needs.

A forward pass is ``embed -> for each layer: project, attend, finish -> norm_rows -> logits``. The pieces know nothing
of caches or decoding methods: whoever calls them decides which rows go through a layer together (one weight read) and
which keys and values those rows see.

Shape letters: b batch, r rows, n canvas positions, d width, h query heads, g key/value heads, e head dim, f MLP width,
v vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels.attention import attend
from pallas_kernels.head_scores import head_scores
from pallas_kernels.vocab_scores import VocabScores
from polestar_jax.models.attention import as_keys, as_values
from polestar_jax.spec import ModelSpec


class QKV(NamedTuple):
    """Projections of some rows, before rotary embedding: q [b, r, h, e], k and v [b, r, g, e]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class RMSNorm(nnx.Module):
    """Root mean square norm: statistics in float32, cast back, then times the weight in the weight's dtype."""

    def __init__(self, width: int, eps: float, *, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.weight[...]


class Block(nnx.Module):
    """One pre-norm layer. Weights are fused so that rows read them once and tensor parallelism splits g and f.

    ``qkv`` [d, g, h/g + 2, e] holds, for each key/value head, its query heads, then its key, then its value.
    """

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, *, dtype: jnp.dtype):
        d, g, q, e, f = spec.d_model, spec.n_kv_heads, spec.n_groups, spec.head_dim, spec.d_ff
        normal = nnx.initializers.normal
        depth = (2 * spec.n_layers) ** -0.5  # keeps the residual stream's variance independent of depth
        self.head_dim = e
        self.attn_norm = RMSNorm(d, spec.norm_eps, dtype=dtype)
        self.qkv = nnx.Param(normal(d**-0.5)(rngs.params(), (d, g, q + 2, e), dtype))
        self.qkv_bias = nnx.Param(jnp.zeros((g, q + 2, e), dtype)) if spec.qkv_bias else None
        self.out = nnx.Param(normal(depth * d**-0.5)(rngs.params(), (g * q, e, d), dtype))
        self.mlp_norm = RMSNorm(d, spec.norm_eps, dtype=dtype)
        self.gate_up = nnx.Param(normal(d**-0.5)(rngs.params(), (d, 2, f), dtype))
        self.down = nnx.Param(normal(depth * f**-0.5)(rngs.params(), (f, d), dtype))

    def project(self, x: jax.Array) -> QKV:
        """Norm and q, k, v of rows x [b, r, d]; keys and queries are not rotated yet."""
        return self.project_normed(self.attn_norm(x))

    def project_normed(self, x: jax.Array) -> QKV:
        """q, k, v of rows [b, r, d] that have been normed."""
        fused = jnp.einsum("brd,dgje->brgje", x, self.qkv[...])
        if self.qkv_bias is not None:
            fused = fused + self.qkv_bias[...]
        fused = _once(fused)
        b, r, g, j, e = fused.shape
        return QKV(fused[..., : j - 2, :].reshape(b, r, g * (j - 2), e), fused[..., j - 2, :], fused[..., j - 1, :])

    def finish(self, x: jax.Array, heads: jax.Array) -> jax.Array:
        """Output projection of heads [b, r, h, e], residual, MLP, residual: the layer's output [b, r, d]."""
        x = _once(x + self.attention_output(heads))
        return _once(x + self.mlp(x))

    def attention_output(self, heads: jax.Array) -> jax.Array:
        """Output projection of heads [b, r, h, e]: what attention adds to the rows, [b, r, d]."""
        return jnp.einsum("brhe,hed->brd", heads, self.out[...])

    def mlp(self, x: jax.Array) -> jax.Array:
        """Norm and MLP of rows [b, r, d]: what they add to the rows, [b, r, d]."""
        gate_up = jnp.einsum("brd,dcf->brcf", self.mlp_norm(x), self.gate_up[...])
        gated = nnx.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return jnp.einsum("brf,fd->brd", gated, self.down[...])


def _once(x: jax.Array) -> jax.Array:
    """A product's result as one array: with few rows its sum is split among programs, and each user would add the parts up."""
    return lax.optimization_barrier(x)


class Denoiser(nnx.Module):
    """Masked diffusion language model: token ids in, per-position logits out."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, *, dtype: jnp.dtype = jnp.float32):
        normal = nnx.initializers.normal
        self.spec = spec
        self.embedding = nnx.Param(normal(0.5)(rngs.params(), (spec.vocab_size, spec.d_model), dtype))
        self.layers = nnx.List([Block(spec, rngs, dtype=dtype) for _ in range(spec.n_layers)])
        self.norm = RMSNorm(spec.d_model, spec.norm_eps, dtype=dtype)
        self.head = nnx.Param(normal(0.02)(rngs.params(), (spec.d_model, spec.vocab_size), dtype))

    @classmethod
    def abstract(cls, spec: ModelSpec, dtype: jnp.dtype) -> Denoiser:
        """The module with a ShapeDtypeStruct for every weight: no tensor is made."""
        return nnx.eval_shape(lambda: cls(spec, nnx.Rngs(0), dtype=dtype))

    @property
    def dtype(self) -> jnp.dtype:
        return self.embedding.get_value().dtype

    def embed(self, tokens: jax.Array) -> jax.Array:
        """tokens i32 [b, r] -> [b, r, d]."""
        return self.embedding[...][tokens]

    def logits(self, x: jax.Array) -> jax.Array:
        """Final norm and head of last-layer rows x [b, r, d] -> float32 logits [b, r, v]."""
        return jnp.einsum("brd,dv->brv", self.norm(x), self.head[...], preferred_element_type=jnp.float32)

    def scores(self, x: jax.Array, barred: tuple[int, ...] = ()) -> VocabScores:
        """The best token of last-layer rows x [b, r, d] among those not ``barred``, and its statistics, each [b, r]."""
        return head_scores(self.norm(x), self.head[...], barred=barred)

    def __call__(self, tokens: jax.Array, positions: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """Full bidirectional pass without a cache: last-layer rows [b, n, d], before the final norm.

        Args:
          tokens, positions: i32 [b, n].
          valid: bool, which keys may be attended: [b, n], or [b, n, n] by (query, key); None for all.
        """
        x = self.embed(tokens)
        for layer in self.layers:
            q, k, v = layer.project(x)
            heads = attend(
                q, as_keys(k), as_values(v),
                q_positions=positions, k_positions=positions, theta=self.spec.rope_theta, valid=valid,
            )  # fmt: skip
            x = layer.finish(x, heads)
        return x
