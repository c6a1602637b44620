"""An independent forward pass of LLaDA and Dream in NumPy, straight from checkpoint tensors.

Plain loops over layers and heads, matrices as the files hold them ([out, in]), no fusing: what conversion and the
denoiser are held against. Configuration values are passed or read from ``config.json`` here, not through
``polestar_jax.config``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Reference:
    """A checkpoint in memory: its tensors under one set of names, and the constants of its forward pass."""

    embedding: np.ndarray
    norm: np.ndarray
    head: np.ndarray
    layers: tuple[Tensors, ...]
    n_heads: int
    n_kv_heads: int
    theta: float
    eps: float


def read_tensors(directory: Path) -> Tensors:
    """Every tensor of the safetensors files in a directory."""
    tensors: Tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def load(directory: Path) -> Reference:
    """The reference of a Hugging Face directory."""
    config = json.loads((Path(directory) / "config.json").read_text())
    return from_tensors(config, read_tensors(directory))


def from_tensors(config: dict, tensors: Tensors) -> Reference:
    """The reference of a parsed ``config.json`` and the tensors by their full names."""
    if config["architectures"] == ["LLaDAModelLM"]:
        base, layer, count = "model.transformer.", "model.transformer.blocks.{}.", config["n_layers"]
        top = {"embedding": base + "wte.weight", "norm": base + "ln_f.weight", "head": base + "ff_out.weight"}
        leaves = {
            "attn_norm": "attn_norm.weight",
            "q": "q_proj.weight",
            "k": "k_proj.weight",
            "v": "v_proj.weight",
            "out": "attn_out.weight",
            "mlp_norm": "ff_norm.weight",
            "gate": "ff_proj.weight",
            "up": "up_proj.weight",
            "down": "ff_out.weight",
        }
        heads, kv_heads = config["n_heads"], config["n_kv_heads"]
    else:
        base, layer, count = "model.", "model.layers.{}.", config["num_hidden_layers"]
        top = {"embedding": base + "embed_tokens.weight", "norm": base + "norm.weight", "head": "lm_head.weight"}
        leaves = {
            "attn_norm": "input_layernorm.weight",
            "q": "self_attn.q_proj.weight",
            "k": "self_attn.k_proj.weight",
            "v": "self_attn.v_proj.weight",
            "q_bias": "self_attn.q_proj.bias",
            "k_bias": "self_attn.k_proj.bias",
            "v_bias": "self_attn.v_proj.bias",
            "out": "self_attn.o_proj.weight",
            "mlp_norm": "post_attention_layernorm.weight",
            "gate": "mlp.gate_proj.weight",
            "up": "mlp.up_proj.weight",
            "down": "mlp.down_proj.weight",
        }
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers = tuple({key: tensors[layer.format(i) + leaf] for key, leaf in leaves.items()} for i in range(count))
    return Reference(
        **{key: tensors[name] for key, name in top.items()},
        layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
    )


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Statistics in at least float32, rounded back to x's type, then times the weight in that type."""
    wide = x.astype(np.promote_types(x.dtype, np.float32) if x.dtype != ml_dtypes.bfloat16 else np.float32)
    normed = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def rotate(x: np.ndarray, positions: np.ndarray, theta: float, *, interleaved: bool = False) -> np.ndarray:
    """Rotary embedding of x [n, heads, e] at positions [n]: lane i is paired with lane i + e/2.

    ``interleaved`` pairs lanes 2i and 2i + 1 instead, as other file formats do; tests use it as the wrong answer.
    """
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = first * cos - second * sin, second * cos + first * sin
    return np.stack(turned, axis=-1).reshape(x.shape) if interleaved else np.concatenate(turned, axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """q [n, h, e] over k, v [m, g, e]; query head j reads key/value head j // (h/g). valid: bool [m] or [n, m]."""
    _, h, e = q.shape
    group = h // k.shape[1]
    out = np.empty_like(q)
    for j in range(h):
        scores = q[:, j] @ k[:, j // group].T / np.sqrt(np.asarray(e, q.dtype))
        if valid is not None:
            scores = np.where(np.broadcast_to(valid, scores.shape), scores, np.finfo(np.float32).min)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, j] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, j // group]
    return out


def layer_forward(
    ref: Reference, layer: Tensors, x: np.ndarray, positions: np.ndarray, valid: np.ndarray | None, interleaved: bool
) -> np.ndarray:
    """One layer on x [n, d]."""
    w = {key: value.astype(x.dtype) for key, value in layer.items()}
    n = len(x)
    normed = rms_norm(x, w["attn_norm"], ref.eps)
    q, k, v = (normed @ w[key].T + w.get(f"{key}_bias", 0) for key in "qkv")
    q = rotate(q.reshape(n, ref.n_heads, -1), positions, ref.theta, interleaved=interleaved)
    k = rotate(k.reshape(n, ref.n_kv_heads, -1), positions, ref.theta, interleaved=interleaved)
    x = x + attention(q, k, v.reshape(n, ref.n_kv_heads, -1), valid).reshape(n, -1) @ w["out"].T
    normed = rms_norm(x, w["mlp_norm"], ref.eps)
    gate = normed @ w["gate"].T
    return x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"].T)) @ w["down"].T


def hidden_states(
    ref: Reference,
    tokens: np.ndarray,
    *,
    positions: np.ndarray | None = None,
    valid: np.ndarray | None = None,
    dtype: type = np.float64,
    interleaved: bool = False,
) -> list[np.ndarray]:
    """[n, d] before the first layer and after each one, for tokens [n] of one sequence.

    Args:
      ref: the checkpoint.
      tokens: int [n].
      positions: int [n], default 0 ... n - 1.
      valid: bool [n], or [n, n] by (query, key): which keys may be attended; None for all.
      dtype: float32 or float64, of everything.
      interleaved: pair rotary lanes the wrong way (see :func:`rotate`).
    """
    tokens = np.asarray(tokens)
    positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    states = [ref.embedding[tokens].astype(dtype)]
    for layer in ref.layers:
        states.append(layer_forward(ref, layer, states[-1], positions, valid, interleaved))
    return states


def logits(ref: Reference, tokens: np.ndarray, **options: object) -> np.ndarray:
    """Logits [n, v] of tokens [n], not shifted (row i as the head gives it); options as in hidden_states."""
    last = hidden_states(ref, tokens, **options)[-1]
    return rms_norm(last, ref.norm.astype(last.dtype), ref.eps) @ ref.head.astype(last.dtype).T


def of_denoiser(model: object) -> Reference:
    """The reference with the weights of a denoiser in memory: its fused arrays are taken apart again."""
    spec = model.spec
    layers = []
    for block in model.layers:
        qkv = np.asarray(block.qkv[...], np.float64)  # [d, g, h/g + 2, e]
        d, queries = qkv.shape[0], qkv.shape[2] - 2
        apart = {"q": qkv[:, :, :queries], "k": qkv[:, :, queries], "v": qkv[:, :, queries + 1]}
        tensors = {name: part.reshape(d, -1).T for name, part in apart.items()}
        if block.qkv_bias is not None:
            bias = np.asarray(block.qkv_bias[...], np.float64)
            apart = {"q": bias[:, :queries], "k": bias[:, queries], "v": bias[:, queries + 1]}
            tensors |= {f"{name}_bias": part.reshape(-1) for name, part in apart.items()}
        gate_up = np.asarray(block.gate_up[...], np.float64)
        layers.append(
            tensors
            | {
                "attn_norm": np.asarray(block.attn_norm.weight[...], np.float64),
                "mlp_norm": np.asarray(block.mlp_norm.weight[...], np.float64),
                "out": np.asarray(block.out[...], np.float64).reshape(-1, d).T,
                "gate": gate_up[:, 0].T,
                "up": gate_up[:, 1].T,
                "down": np.asarray(block.down[...], np.float64).T,
            }
        )
    return Reference(
        embedding=np.asarray(model.embedding[...], np.float64),
        norm=np.asarray(model.norm.weight[...], np.float64),
        head=np.asarray(model.head[...], np.float64).T,
        layers=tuple(layers),
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        theta=spec.rope_theta,
        eps=spec.norm_eps,
    )
