"""Drift-aware decoding of masked diffusion language models (LLaDA, Dream) on accelerators, in JAX.

>>> import polestar_jax as pj
>>> model, tokenizer = pj.load("tiny", dtype="float32")
>>> out = pj.generate(model, tokenizer, ["What is 12 + 7 - 3?"], pj.decoders.parallel(gen_length=64))
>>> out[0].text, out[0].stats.nfe
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Name -> module that holds it; None: the name is a submodule. Imported on first use, so that `import polestar_jax` is cheap.
_EXPORTS = {
    "load": "polestar_jax.loading",
    "generate": "polestar_jax.generation",
    "iterate": "polestar_jax.generation",
    "stream": "polestar_jax.generation",
    "logits": "polestar_jax.generation",
    "Answer": "polestar_jax.generation",
    "Stats": "polestar_jax.generation",
    "init_state": "polestar_jax.decode.engine",
    "step": "polestar_jax.decode.engine",
    "decode": "polestar_jax.decode.engine",
    "Decoder": "polestar_jax.decode.policy",
    "Span": "polestar_jax.decode.policy",
    "DecodeState": "polestar_jax.decode.state",
    "Pass": "polestar_jax.decode.state",
    "Scores": "polestar_jax.decode.state",
    "Trace": "polestar_jax.decode.trace",
    "Sampling": "polestar_jax.decode.sampling",
    "ModelSpec": "polestar_jax.spec",
    "Denoiser": "polestar_jax.models.denoiser",
    "InputError": "polestar_jax.errors",
    "RunError": "polestar_jax.errors",
    "decoders": None,
    "commit": None,
    "schedule": None,
    "cache": None,
    "compilation_cache": None,
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _EXPORTS[name]
    value = (
        importlib.import_module(f"{__name__}.{name}")
        if module is None
        else getattr(importlib.import_module(module), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
