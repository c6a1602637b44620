"""Opening a model directory: the denoiser on the default device, and the tokenizer where there is one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec
from polestar_jax.tiny import DIRECTORY

if TYPE_CHECKING:
    from convert.source import Source

TINY = "tiny"


def model_directory(name: str | Path) -> Path:
    """The directory a model name stands for: the word "tiny" is the embedded model, anything else is a path.

    Raises:
      InputError: the name is empty, or names the home of a user there is not.
    """
    if isinstance(name, str) and name == TINY:
        return DIRECTORY
    if isinstance(name, str) and not name:
        raise InputError(f"the model's name is empty; give {TINY!r} or a directory")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise InputError(
            f"no model {str(name)!r}: its home directory is unknown; give {TINY!r} or a directory"
        ) from None


def load(path_or_name: str | Path = TINY, *, dtype: str | None = None) -> tuple[Denoiser, Any | None]:
    """A model and its tokenizer.

    Args:
      path_or_name: "tiny" (the embedded model), a Hugging Face directory, or a converted directory.
      dtype: "float32", "bfloat16" or "float16" for every weight, or None to keep each as stored.

    Returns:
      (model, tokenizer); the tokenizer is None where the directory has none.

    Raises:
      InputError: the directory is no complete, supported model; found out before any weight is put on a device.
      RunError: reading failed half-way.
    """
    from polestar_jax.tokenization import load_tokenizer

    model = load_model(path_or_name, dtype=dtype)
    return model, load_tokenizer(model_directory(path_or_name), model.spec)


def load_model(path_or_name: str | Path = TINY, *, dtype: str | None = None) -> Denoiser:
    """The model alone; arguments and errors as in :func:`load`."""
    from convert.dtypes import parse_dtype

    stored = parse_dtype(dtype)
    source = _open(path_or_name)
    source.check(dtype=stored)
    return _fill(source, stored)


def load_spec(path_or_name: str | Path = TINY) -> ModelSpec:
    """What a model directory holds, without reading weights; errors as in :func:`load`."""
    return _open(path_or_name).spec


def _open(path_or_name: str | Path) -> Source:
    from convert.source import open_source

    directory = model_directory(path_or_name)
    if not os.path.isdir(directory):  # unlike Path.is_dir, False for names too long for the system
        raise InputError(
            f"no model {str(path_or_name)!r}: neither {TINY!r} nor a directory (nothing is downloaded;"
            " give a Hugging Face or converted directory)"
        )
    return open_source(directory, checksums=False)


def _fill(source: Source, dtype: str | None) -> Denoiser:
    """Put the weights one by one into a module that has shapes only: host memory never holds two of one."""
    from convert.dtypes import WEIGHT_DTYPES
    from convert.keymap import pieces

    graph, state = nnx.split(Denoiser.abstract(source.spec, WEIGHT_DTYPES[dtype or "F32"]))
    weights = dict(nnx.to_flat_state(state))
    missing = set(weights)
    for piece in pieces(source.spec):
        for slot, array in source.weights(piece, dtype):
            if weights[slot.path].shape != array.shape:
                raise AssertionError(f"{slot.path}: {array.shape} for {weights[slot.path].shape}")
            # Waiting keeps the host copies of later weights from piling up behind slow transfers.
            weights[slot.path] = weights[slot.path].replace(jax.device_put(array).block_until_ready())
            missing.remove(slot.path)
    if missing:
        raise AssertionError(f"no source for {sorted(map(str, missing))}")
    return nnx.merge(graph, nnx.from_flat_state(weights.items()))
