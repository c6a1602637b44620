"""One safetensors file: a header checked before anything is believed, then rows read on demand.

The header is read here rather than through the safetensors package because its errors name neither the file nor the
tensor, and because rows are read into memory the caller owns: mapped pages would count as a second copy of the model
while it is converted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import ELEMENT_BITS, WEIGHT_DTYPES
from polestar_jax.errors import InputError, RunError
from polestar_jax.jsonfile import parse_json

_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_RANK = 32  # NumPy's arrays had no more for most of its life; weights have two
_LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: its file, element type (safetensors' name), shape, first byte and number of bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> entry of every tensor in a file, in the order of their bytes.

    Raises:
      InputError: the file is absent, no safetensors file, truncated, or its header contradicts itself; the message
        names the file, and the tensor where one is at fault.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if head == _LFS_POINTER[:8]:
                raise InputError(f"{path}: is a Git LFS pointer, not the weights; fetch the real file")
            if len(head) < 8 or not 2 <= length <= _MAX_HEADER:
                raise InputError(f"{path}: is no safetensors file (a header of {length} bytes is announced)")
            if 8 + length > size:
                raise InputError(f"{path}: is truncated inside its header ({size} of at least {8 + length} bytes)")
            raw = file.read(length)
    except FileNotFoundError:
        raise InputError(f"{path}: file is missing") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    header = parse_json(raw, source=f"{path}: header", unique=True)
    header.pop("__metadata__", None)
    entries = [_entry(path, 8 + length, name, value) for name, value in header.items()]
    return _check_extent(path, sorted(entries, key=lambda e: (e.start, e.nbytes)), 8 + length, size)


def read_rows(entry: Entry, start: int, stop: int) -> np.ndarray:
    """Rows ``start:stop`` (first axis) of a weight tensor, in memory of their own, bit for bit as stored."""
    rows = np.empty((stop - start, *entry.shape[1:]), WEIGHT_DTYPES[entry.dtype])
    read_bytes(entry, start * (entry.nbytes // max(entry.shape[0], 1)), rows.reshape(-1).view(np.uint8))
    return rows


def read_bytes(entry: Entry, begin: int, out: np.ndarray) -> None:
    """Fill ``out`` (uint8, contiguous) with a tensor's bytes from its byte ``begin`` on."""
    view = memoryview(out)
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start + begin)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise RunError(f"{entry.file}: ended inside tensor {entry.name}; it changed while being read")
                done += count
    except OSError as error:
        raise RunError(f"{entry.file}: reading tensor {entry.name} failed ({error.strerror})") from None


def _entry(path: Path, base: int, name: str, value: Any) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        if len(shape) > _MAX_RANK or not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise InputError(f"{path}: tensor {name} has no valid dtype, shape and data_offsets in the header") from None
    if not isinstance(dtype, str) or dtype not in ELEMENT_BITS:
        raise InputError(f"{path}: tensor {name} has unknown dtype {dtype!r}; accepted: {', '.join(WEIGHT_DTYPES)}")
    bits = ELEMENT_BITS[dtype]
    for n in shape:
        bits *= n
    if bits % 8 or end - begin != bits // 8:
        raise InputError(
            f"{path}: tensor {name} occupies {end - begin} bytes but {dtype} {list(shape)} needs {-(-bits // 8)}"
        )
    return Entry(name, path, dtype, shape, base + begin, end - begin)


def _check_extent(path: Path, entries: list[Entry], base: int, size: int) -> dict[str, Entry]:
    """Tensors must follow one another without gap or overlap and fill the file exactly."""
    position = base
    for entry in entries:
        if entry.start != position:
            fault = "overlaps another tensor" if entry.start < position else "leaves a gap before it"
            raise InputError(f"{path}: tensor {entry.name} {fault} (byte {entry.start}, expected {position})")
        position += entry.nbytes
        if position > size:
            raise InputError(
                f"{path}: is truncated inside tensor {entry.name} (file has {size} bytes, tensor ends at {position})"
            )
    if position != size:
        raise InputError(f"{path}: has {size - position} bytes after its last tensor")
    return {entry.name: entry for entry in entries}
