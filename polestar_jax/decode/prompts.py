"""Checks of prompt ids and seeds before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polestar_jax.errors import InputError
from polestar_jax.spec import ModelSpec


def check_prompt(prompt: Sequence[int], spec: ModelSpec, gen_length: int) -> None:
    """Refuse what a gather on the device would silently clamp or a model was not made for."""
    check_ids(prompt, spec)
    ids = np.asarray(prompt)
    if (ids == spec.mask_id).any():
        raise InputError(f"prompt contains the mask token {spec.mask_id}; prompts must be decided")
    if len(ids) + gen_length > spec.max_length:
        raise InputError(
            f"prompt of {len(ids)} tokens and gen_length {gen_length} make {len(ids) + gen_length}, "
            f"more than the model's max_length {spec.max_length}"
        )


def check_ids(ids: Sequence[int], spec: ModelSpec) -> None:
    """Refuse anything but a non-empty list of ids of the vocabulary."""
    accepted = f"whole numbers in 0..{spec.vocab_size - 1}"
    if not isinstance(ids, (Sequence, np.ndarray)) or isinstance(ids, (str, bytes)):
        raise InputError(f"prompt ids must be a list of {accepted}, got {type(ids).__name__}")
    if not len(ids):
        raise InputError("prompt is empty; at least one token is needed")
    for token in ids:
        if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
            raise InputError(f"prompt id {token!r} is not accepted: {accepted}")
        if not 0 <= token < spec.vocab_size:
            raise InputError(f"prompt id {token} is outside the vocabulary 0..{spec.vocab_size - 1}")


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise InputError(f"seed {seed!r} is not accepted: a whole number in 0..{2**32 - 1}")
