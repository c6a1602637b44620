"""Writing the trained model in the layout of the real LLaDA checkpoints."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
from flax import nnx

from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec
from polestar_jax.tiny import vocabulary


def llada_config(spec: ModelSpec) -> dict:
    """The config.json of a LLaDA checkpoint with this spec: the keys of the published files."""
    return {
        "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "bos_token_id": spec.bos_id,
        "d_model": spec.d_model, "embedding_dropout": 0.0, "embedding_size": spec.vocab_size, "eos_token_id": spec.eos_id,
        "flash_attention": False, "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None,
        "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms",
        "layer_norm_with_affine": True, "mask_token_id": spec.mask_id, "max_sequence_length": spec.max_length,
        "mlp_hidden_size": spec.d_ff, "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None,
        "n_heads": spec.n_heads, "n_kv_heads": spec.n_kv_heads, "n_layers": spec.n_layers, "pad_token_id": spec.eos_id,
        "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": spec.norm_eps, "rope": True,
        "rope_full_precision": True, "rope_theta": spec.rope_theta, "scale_logits": False, "torch_dtype": "bfloat16",
        "use_cache": False, "vocab_size": spec.vocab_size, "weight_tying": False,
    }  # fmt: skip


def checkpoint_tensors(model: Denoiser, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    """The model's weights under their checkpoint names, matrices as [out, in], in ``dtype``."""
    from convert.fuse import fused_rows
    from convert.keymap import pieces

    state = {path: np.asarray(value[...].astype(dtype)) for path, value in nnx.to_flat_state(nnx.state(model))}
    return {
        tensor.name: fused_rows(slot, i, state[slot.path], 0, tensor.shape[0])
        for piece in pieces(model.spec)
        for slot in piece.slots
        for i, tensor in enumerate(slot.sources)
    }


def save_checkpoint(model: Denoiser, directory: pathlib.Path) -> None:
    """Write config.json, model.safetensors (bfloat16) and the tokenizer files into an existing directory."""
    from safetensors.numpy import save_file

    spec = model.spec
    weights = directory / "model.safetensors"
    save_file(checkpoint_tensors(model, jnp.bfloat16), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library writes it for its owner alone
    (directory / "config.json").write_text(json.dumps(llada_config(spec), indent=1) + "\n")
    vocabulary.save_tokenizer(directory, max_length=spec.max_length)
