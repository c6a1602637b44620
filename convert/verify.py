"""Are two model directories, of either layout, the same model? Compared tensor by tensor, and on probe prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convert.dtypes import WEIGHT_DTYPES, bits
from convert.fuse import row_blocks
from convert.keymap import expected_tensors
from convert.safetensors_file import Entry, read_bytes
from convert.source import Source, open_source
from polestar_jax.errors import InputError

SHOWN = 10
_BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Report:
    """What a comparison found.

    Attributes:
      same: no difference at all.
      tensors, bytes: how many tensors both have with equal shape and type, and their size.
      difference_count: differing tensors and spec values.
      differences: the first of them, one line each.
      max_logit_difference: largest absolute difference of probe logits; None where they are not finite, or were not
        computed because the specs differ, a side lacks tensors or it was not asked for.
      logits_finite: whether all probe logits of both sides are finite; None where they were not computed.
    """

    same: bool
    tensors: int
    bytes: int
    difference_count: int
    differences: tuple[str, ...]
    max_logit_difference: float | None
    logits_finite: bool | None


def verify(
    a: str | Path, b: str | Path, *, logits: bool = True, progress: Callable[[str], None] | None = None
) -> Report:
    """Compare names, shapes, element types and bits of all tensors, and float32 logits on probe prompts.

    Args:
      a, b: model directories, each of either layout.
      logits: also run the probe prompts through both.
      progress: called with a short line now and then.

    Raises:
      InputError: a directory cannot be read as a model at all.
    """
    first, second = open_source(a), open_source(b)
    differences = _spec_differences(first, second)
    same_spec = not differences
    shared = [name for name in _ordered(first, second) if name in first.entries and name in second.entries]
    differences += [f"{name}: only in {first.directory}" for name in first.entries if name not in second.entries]
    differences += [f"{name}: only in {second.directory}" for name in second.entries if name not in first.entries]
    compared = [name for name in shared if _comparable(first, second, name, differences)]
    for number, name in enumerate(compared, 1):
        difference = _first_difference(first, second, name)
        if difference:
            differences.append(difference)
        if progress and (number % 50 == 0 or number == len(compared)):
            progress(f"{number}/{len(compared)} tensors")
    largest, finite = None, None
    if logits and same_spec and _complete(first) and _complete(second):
        gap, finite = _logit_difference(first, second, progress)
        largest = gap if finite else None
        if gap != 0.0 and not differences:
            differences.append(f"logits: differ by {gap:.3g} although all tensors are equal")
    return Report(
        same=not differences,
        tensors=len(compared),
        bytes=sum(first.entries[name].nbytes for name in compared),
        difference_count=len(differences),
        differences=tuple(differences[:SHOWN]),
        max_logit_difference=largest,
        logits_finite=finite,
    )


def _spec_differences(first: Source, second: Source) -> list[str]:
    left, right = dataclasses.asdict(first.spec), dataclasses.asdict(second.spec)
    return [f"spec {key}: {left[key]!r} and {right[key]!r}" for key in left if left[key] != right[key]]


def _ordered(first: Source, second: Source) -> list[str]:
    """All names, in the order of the forward pass where the model has them: pieces are then read once."""
    return list(dict.fromkeys([*expected_tensors(first.spec), *first.entries, *second.entries]))


def _comparable(first: Source, second: Source, name: str, differences: list[str]) -> bool:
    left, right = first.entries[name], second.entries[name]
    for what, x, y in (("shape", list(left.shape), list(right.shape)), ("dtype", left.dtype, right.dtype)):
        if x != y:
            differences.append(f"{name}: {what} {x} and {y}")
            return False
    return True


def _first_difference(first: Source, second: Source, name: str) -> str | None:
    """Compare bits block by block; describes the first element that differs and how many do."""
    if first.entries[name].dtype not in WEIGHT_DTYPES:
        return _first_differing_byte(first.entries[name], second.entries[name])
    shape, itemsize = first.entries[name].shape, WEIGHT_DTYPES[first.entries[name].dtype].itemsize
    count, where = 0, ""
    for start, stop in row_blocks(shape, itemsize):
        left, right = first.rows(name, start, stop), second.rows(name, start, stop)
        unequal = bits(left) != bits(right)
        if unequal.any():
            if not count:
                index = tuple(int(i) for i in np.argwhere(unequal)[0])
                place = [start + index[0], *index[1:]]
                where = f"first at {place}: {_value(left[index])} and {_value(right[index])}"
            count += int(unequal.sum())
    return f"{name}: {count} of {int(np.prod(shape))} elements differ, {where}" if count else None


def _first_differing_byte(left: Entry, right: Entry) -> str | None:
    """The same for a tensor that is no weight (a stored table of positions, say), which only files can hold."""
    for begin in range(0, left.nbytes, _BLOCK_BYTES):
        blocks = [np.empty(min(_BLOCK_BYTES, left.nbytes - begin), np.uint8) for _ in range(2)]
        for entry, block in zip((left, right), blocks, strict=True):
            read_bytes(entry, begin, block)
        unequal = np.flatnonzero(blocks[0] != blocks[1])
        if unequal.size:
            return f"{left.name}: bytes differ from byte {begin + unequal[0]} on"
    return None


def _value(x: np.generic) -> str:
    raw = int.from_bytes(x.tobytes(), "little")
    return f"{float(x):.9g} (0x{raw:0{2 * x.itemsize}x})"


def _complete(source: Source) -> bool:
    try:
        source.check(dtype="F32", allow_unknown=True)
    except InputError:
        return False
    return True


def _logit_difference(first: Source, second: Source, progress: Callable[[str], None] | None) -> tuple[float, bool]:
    """The largest difference (infinite where one side alone is not finite), and whether all logits are finite."""
    from convert.probe import probe_logits

    largest, finite = 0.0, True
    left = probe_logits(first)
    if progress:
        progress(f"probe logits of {first.directory}")
    for x, y in zip(left, probe_logits(second), strict=True):
        finite = finite and bool(np.isfinite(x).all() and np.isfinite(y).all())
        both_nan = np.isnan(x) & np.isnan(y)
        with np.errstate(invalid="ignore"):
            gap = np.where(both_nan | (x == y), 0.0, np.abs(x.astype(np.float64) - y))
        largest = max(largest, float("inf") if np.isnan(gap).any() else float(gap.max()))
    if progress:
        progress(f"probe logits of {second.directory}")
    return largest, finite
