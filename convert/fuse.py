"""Laying checkpoint tensors into the denoiser's fused arrays, and reading them back out.

Both directions use the same views: a fused array seen as rows of the checkpoint's [out, in] matrices. Rotary lanes are
half-split on both sides, so nothing is permuted. Work goes in blocks of rows, which keeps temporaries small and
transposed copies within the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from convert.dtypes import bits, cast, page_aligned
from convert.keymap import Slot

# (tensor name, first row, end row) -> those rows as stored.
ReadRows = Callable[[str, int, int], np.ndarray]

_BLOCK_ROWS = 256
_BLOCK_BYTES = 4 << 20


def row_blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cover a tensor, a few MB each."""
    row_bytes = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    step = max(_BLOCK_ROWS, _BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def fuse(slot: Slot, read: ReadRows, dtype: np.dtype) -> np.ndarray:
    """The weight of one slot in ``dtype``, made from checkpoint rows."""
    fused = page_aligned(slot.shape, dtype)
    for tensor, parts in zip(slot.sources, _parts(slot, bits(fused)), strict=True):
        for first, part in parts:
            for start, stop in row_blocks(part.shape, dtype.itemsize):
                rows = cast(read(tensor.name, first + start, first + stop), dtype, tensor.name)
                part[start:stop] = bits(rows)
    return fused


def fused_rows(slot: Slot, source: int, fused: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Rows ``start:stop`` of the slot's checkpoint tensor number ``source``, contiguous, bit for bit."""
    shape = slot.sources[source].shape
    rows = np.empty((stop - start, *shape[1:]), fused.dtype)
    target = bits(rows)
    for first, part in _parts(slot, bits(fused))[source]:
        low, high = max(start, first), min(stop, first + len(part))
        if low < high:
            target[low - start : high - start] = part[low - first : high - first]
    return rows


def _parts(slot: Slot, fused: np.ndarray) -> list[list[tuple[int, np.ndarray]]]:
    """For each source tensor: (its first row, view of ``fused`` as that and the following rows)."""
    match slot.kind:
        case "copy":
            return [[(0, fused)]]
        case "transpose":
            return [[(0, fused.T)]]
        case "out":
            return [[(0, fused.reshape(-1, fused.shape[-1]).T)]]
        case "gate_up":
            return [[(0, fused[:, 0].T)], [(0, fused[:, 1].T)]]
        case "qkv":
            d, groups, heads, e = fused.shape
            return _head_parts([fused[:, g].reshape(d, heads * e).T for g in range(groups)], heads, e)
        case "qkv_bias":
            groups, heads, e = fused.shape
            return _head_parts([fused[g].reshape(heads * e) for g in range(groups)], heads, e)
    raise AssertionError(slot.kind)


def _head_parts(groups: list[np.ndarray], heads: int, e: int) -> list[list[tuple[int, np.ndarray]]]:
    """q, k and v parts of per-group rows [heads * e, ...]: the group's queries, then its key, then its value."""
    bounds = ((0, heads - 2), (heads - 2, heads - 1), (heads - 1, heads))
    return [
        [(index * (high - low) * e, group[low * e : high * e]) for index, group in enumerate(groups)]
        for low, high in bounds
    ]
