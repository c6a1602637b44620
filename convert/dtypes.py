"""Element types: safetensors' names, NumPy's types, and casting that keeps bits where the type stays."""

from __future__ import annotations

import ctypes
import math
import mmap
import os

import ml_dtypes
import numpy as np

from polestar_jax.errors import InputError

# What weights may be stored as.
WEIGHT_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
DTYPE_NAMES: dict[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

# Bits per element of every type the file format knows: needed to check offsets of tensors that are not read.
ELEMENT_BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

_BITS = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


def parse_dtype(name: str | None) -> str | None:
    """A ``--dtype`` word as a safetensors name; None stays None (as stored)."""
    if name is None:
        return None
    if name not in DTYPE_NAMES:
        raise InputError(f"unknown dtype {name!r}; accepted: {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


def bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers: copying and comparing these touches no NaN payload or signed zero."""
    return array.view(_BITS[array.dtype.itemsize])


def cast(block: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """``block`` in ``dtype``, rounded to nearest even; the block itself where it has that type already.

    Raises:
      InputError: a finite value does not fit into ``dtype``; names the tensor ``name``.
    """
    if block.dtype == dtype:
        return block
    with np.errstate(over="ignore", invalid="ignore"):
        result = block.astype(dtype)
    if dtype.itemsize <= block.dtype.itemsize and np.any(np.isinf(result) & np.isfinite(block)):
        raise InputError(f"{name}: holds values beyond the range of {dtype.name}; keep a wider dtype")
    return result


def page_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A zeroed array in pages of its own.

    JAX's CPU backend takes over memory this well aligned without a second copy, and the pages go back to the system
    when the array dies.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    count = math.prod(shape)
    return np.frombuffer(mmap.mmap(-1, max(count * dtype.itemsize, 1), **private), dtype, count).reshape(shape)


def release_heap() -> None:
    """Give freed heap memory back to the system.

    Writing happens in many short-lived threads, each with a heap of its own that would keep what was freed in it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc
        trim(0)
