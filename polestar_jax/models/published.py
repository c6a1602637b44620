"""Specs of the published checkpoints, for work that has no files at hand: sizing, shape audits, compiling ahead.

Loading never uses these: a checkpoint's own ``config.json`` decides, and a missing key there is an error. Values are
those of the published configuration files.
"""

from __future__ import annotations

from polestar_jax.spec import ModelSpec

LLADA_8B = ModelSpec(
    family="llada",
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    d_ff=12288,
    vocab_size=126_464,
    max_length=4096,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    qkv_bias=False,
    logit_shift=0,
    mask_id=126_336,
    eos_id=126_081,
    bos_id=126_080,
    stop_ids=(126_081, 126_348),
)
"""LLaDA-8B-Instruct; LLaDA-8B-Base and LLaDA-1.5 have the same configuration."""

DREAM_7B = ModelSpec(
    family="dream",
    d_model=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    d_ff=18944,
    vocab_size=152_064,
    max_length=131_072,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    qkv_bias=True,
    logit_shift=1,
    mask_id=151_666,
    eos_id=151_643,
    bos_id=151_643,
    stop_ids=(151_643, 151_645),
)
"""Dream-v0-Instruct-7B; Dream-v0-Base-7B has the same configuration."""

PUBLISHED = {"llada-8b": LLADA_8B, "dream-7b": DREAM_7B}

CHECKPOINTS = {
    "LLaDA-8B-Base": LLADA_8B,
    "LLaDA-8B-Instruct": LLADA_8B,
    "LLaDA-1.5": LLADA_8B,
    "Dream-v0-Base-7B": DREAM_7B,
    "Dream-v0-Instruct-7B": DREAM_7B,
}
"""Published checkpoint -> its spec."""
