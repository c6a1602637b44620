"""Every tensor of a Hugging Face directory: one safetensors file, or the shards that an index names.

Only what the index names is read; other files in the directory are left alone, whatever tensors they hold.
"""

from __future__ import annotations

import os
from pathlib import Path

from convert.safetensors_file import Entry, read_header
from polestar_jax.errors import InputError
from polestar_jax.jsonfile import load_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def holds_safetensors(directory: Path) -> bool:
    """Whether a directory looks like a Hugging Face checkpoint that can be read."""
    return (directory / INDEX).exists() or (directory / SINGLE).exists()


def list_tensors(directory: Path) -> dict[str, Entry]:
    """Name -> entry of a checkpoint's tensors, from headers alone.

    Raises:
      InputError: no weights, a shard is missing or damaged, a tensor is not where the index places it, or a shard
        holds a tensor the index places elsewhere or not at all.
    """
    if (directory / INDEX).exists():
        return _indexed(directory)
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    if shards:
        raise InputError(f"{directory}: holds {shards[0]} but no {INDEX}; the download is incomplete")
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        raise InputError(f"{directory}: holds pickled weights ({pickles[0]}), which are never read; safetensors needed")
    raise InputError(f"{directory}: no weights found; expected {SINGLE} or {INDEX}")


def _indexed(directory: Path) -> dict[str, Entry]:
    weight_map = _weight_map(directory / INDEX)
    headers = {shard: _shard(directory, shard, weight_map) for shard in dict.fromkeys(weight_map.values())}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise InputError(f"{directory / shard}: tensor {name} is missing, though {INDEX} places it there")
    for shard, header in headers.items():
        for name in header:
            placed = weight_map.get(name)
            if placed != shard:
                where = "does not name it" if placed is None else f"places it in {placed}"
                raise InputError(f"{directory / shard}: holds tensor {name}, but {INDEX} {where}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _shard(directory: Path, shard: str, weight_map: dict[str, str]) -> dict[str, Entry]:
    first = next(name for name, file in weight_map.items() if file == shard)
    if Path(shard).name != shard or not shard.endswith(".safetensors"):
        raise InputError(f"{directory / INDEX}: tensor {first} is placed in {shard!r}, no safetensors file beside it")
    if not os.path.exists(directory / shard):  # unlike Path.exists, False for names too long for the system
        raise InputError(f"{directory / shard}: file is missing, though {INDEX} places tensor {first} there")
    return read_header(directory / shard)


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = load_json(path, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: is no index of shards; expected weight_map, an object of tensor and file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise InputError(f"{path}: tensor {name} is placed in {shard!r}; expected a file name")
    return weight_map
