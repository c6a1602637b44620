"""A model directory -> a Hugging Face directory: safetensors shards, their index, configuration and tokenizer."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from convert.dtypes import WEIGHT_DTYPES, bits, cast, parse_dtype
from convert.fuse import row_blocks
from convert.index import INDEX, SINGLE
from convert.keymap import expected_tensors
from convert.side_files import copy_side_files
from convert.source import Source, open_source
from convert.staging import staged
from convert.to_orbax import Conversion, Progress, summarize
from polestar_jax.config import read_config, spec_from_config
from polestar_jax.errors import InputError

MAX_SHARD_BYTES = 5_000_000_000


def to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    allow_unknown: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> Conversion:
    """Write a model (either layout) as safetensors, byte for byte where no ``dtype`` is named.

    Args:
      source, destination, dtype, allow_unknown, progress: as in :func:`convert.to_orbax.to_orbax`.
      max_shard_bytes: most bytes of tensors in one file (a larger tensor gets a file of its own). One file is called
        ``model.safetensors``; several are numbered and indexed.

    Raises:
      InputError, RunError: as in :func:`convert.to_orbax.to_orbax`.
    """
    if max_shard_bytes < 1:
        raise InputError(f"max_shard_bytes is {max_shard_bytes}; accepted: whole numbers from 1 on")
    stored = parse_dtype(dtype)
    opened = open_source(source)
    _check_config(opened)
    unknown = opened.check(dtype=stored, allow_unknown=allow_unknown)
    dtypes = {name: stored or opened.entries[name].dtype for name in expected_tensors(opened.spec)}
    shards = _plan(opened, dtypes, max_shard_bytes)
    with staged(destination) as partial:
        for file, names in shards.items():
            _write_shard(partial / file, names, opened, dtypes)
            if progress:
                progress(file)
        if len(shards) > 1:
            _write_index(partial / INDEX, shards, opened, dtypes)
        copy_side_files(opened.directory, partial, stored)
    return summarize(opened, stored, unknown)


def _check_config(source: Source) -> None:
    """A converted directory is read by its spec.json, but what is written here is read by its config.json."""
    path = source.directory / "config.json"
    if not path.is_file():
        raise InputError(f"{path}: file is missing; a Hugging Face directory cannot be written without it")
    if spec_from_config(read_config(source.directory), source=str(path)) != source.spec:
        raise InputError(f"{path}: does not describe the model that spec.json does; convert the model again")


def _nbytes(source: Source, dtypes: dict[str, str], name: str) -> int:
    return WEIGHT_DTYPES[dtypes[name]].itemsize * math.prod(source.entries[name].shape)


def _plan(source: Source, dtypes: dict[str, str], limit: int) -> dict[str, list[str]]:
    """File name -> tensors, in the order of the forward pass, so that a piece is read once."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in dtypes:
        nbytes = _nbytes(source, dtypes, name)
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _write_shard(path: Path, names: list[str], source: Source, dtypes: dict[str, str]) -> None:
    """Header first, then each tensor's rows as they are read: never a whole shard in memory."""
    # Wider elements first keeps every tensor aligned to its element size.
    names = sorted(names, key=lambda name: -WEIGHT_DTYPES[dtypes[name]].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    position = 0
    for name in names:
        end = position + _nbytes(source, dtypes, name)
        shape = list(source.entries[name].shape)
        header[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            _write_tensor(file, name, source, WEIGHT_DTYPES[dtypes[name]])
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, name: str, source: Source, dtype: np.dtype) -> None:
    for start, stop in row_blocks(source.entries[name].shape, dtype.itemsize):
        rows = cast(source.rows(name, start, stop), dtype, name)
        file.write(memoryview(bits(rows).reshape(-1)).cast("B"))


def _write_index(path: Path, shards: dict[str, list[str]], source: Source, dtypes: dict[str, str]) -> None:
    index = {
        "metadata": {"total_size": sum(_nbytes(source, dtypes, name) for name in dtypes)},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
