"""``spec.json`` and ``manifest.json`` of a converted directory: what its weights are and which files hold them.

The manifest is written last, so a directory without one is unfinished. Reading it checks it against the spec and
against the files on disk, so that damage is found before any weight is read.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert.dtypes import WEIGHT_DTYPES
from convert.keymap import Piece, Slot, pieces
from polestar_jax.errors import InputError
from polestar_jax.jsonfile import load_json
from polestar_jax.spec import ModelSpec

FORMAT = "polestar-jax"
FORMAT_VERSION = 1
SPEC, MANIFEST, WEIGHTS = "spec.json", "manifest.json", "weights"


_KINDS = {dict: "an object", list: "a list", str: "text", int: "a whole number"}


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One fused weight: shape, element type (safetensors' name) and SHA-256 of its bytes in row order."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Part:
    """One orbax checkpoint: its directory below ``weights``, the rows of each array it holds, and its files' sizes."""

    directory: str
    rows: dict[str, tuple[int, int]]
    files: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The arrays of every piece by name, and the parts they are cut into, in order."""

    arrays: dict[str, dict[str, ArrayInfo]]
    parts: dict[str, tuple[Part, ...]]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)})


def array_name(slot: Slot) -> str:
    """An array's name within its piece."""
    path = slot.path[2:] if slot.path[0] == "layers" else slot.path
    return ".".join(str(key) for key in path)


def write(directory: Path, spec: ModelSpec, manifest: Manifest) -> None:
    """Write the spec, then the manifest."""
    (directory / SPEC).write_text(spec.to_json() + "\n", encoding="utf-8")
    (directory / MANIFEST).write_text(manifest.to_json() + "\n", encoding="utf-8")


def read_spec(directory: Path) -> ModelSpec:
    """The spec of a converted directory."""
    path = directory / SPEC
    try:
        return ModelSpec.from_json(path.read_bytes(), source=str(path))
    except FileNotFoundError:
        raise InputError(f"{path}: file is missing; convert the model again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def read_manifest(directory: Path, spec: ModelSpec) -> Manifest:
    """The manifest, after checking it against the spec and the files on disk; no weight is read.

    Raises:
      InputError: another format, or arrays or files that are missing, unknown, misshapen or of another size.
    """
    path = directory / MANIFEST
    content = load_json(path)
    kind, version = content.get("format"), content.get("format_version")
    if (kind, version) != (FORMAT, FORMAT_VERSION):
        raise InputError(f"{path}: is {kind!r} version {version!r}; this release reads {FORMAT!r} {FORMAT_VERSION}")
    manifest = _parse(content, str(path))
    expected = pieces(spec)
    extra = set(manifest.arrays) - {piece.name for piece in expected}
    if extra:
        raise InputError(f"{path}: names pieces that {SPEC} does not have: {', '.join(sorted(extra))}")
    for piece in expected:
        _check_arrays(path, piece, manifest)
        _check_parts(path, piece, manifest)
        _check_files(directory / WEIGHTS, manifest.parts[piece.name])
    return manifest


def _parse(content: dict[str, Any], source: str) -> Manifest:
    arrays = {
        piece: {name: _array(array, f"{source}: piece {piece}: array {name}") for name, array in named.items()}
        for piece, named in _objects(content, "arrays", source)
    }
    parts = {}
    for piece, listed in _get(content, "parts", dict, source).items():
        where = f"{source}: piece {piece}"
        if not isinstance(listed, list):
            raise InputError(f"{where}: parts are {json.dumps(listed)}; expected a list of objects")
        parts[piece] = tuple(_part(part, where) for part in listed)
    return Manifest(arrays, parts)


def _objects(content: dict[str, Any], key: str, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    values = _get(content, key, dict, source)
    return ((name, _get(values, name, dict, source)) for name in values)


def _array(value: Any, where: str) -> ArrayInfo:
    shape = _get(value, "shape", list, where)
    if not all(type(size) is int for size in shape):
        raise InputError(f"{where}: shape is {json.dumps(shape)}; expected whole numbers")
    return ArrayInfo(tuple(shape), _get(value, "dtype", str, where), _get(value, "sha256", str, where))


def _part(value: Any, where: str) -> Part:
    directory, rows = _get(value, "directory", str, where), _get(value, "rows", dict, where)
    for name, pair in rows.items():
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(row) is int for row in pair):
            raise InputError(f"{where}: rows of {name} are {json.dumps(pair)}; expected two whole numbers")
    files = _get(value, "files", dict, where)
    for name in files:
        _get(files, name, int, f"{where}: files")
    return Part(directory, {name: (start, stop) for name, (start, stop) in rows.items()}, files)


def _get(value: Any, key: str, kind: type, where: str) -> Any:
    """``value[key]``, which must be of a type; InputError naming the key and what it is instead."""
    if not isinstance(value, dict) or key not in value:
        raise InputError(f"{where}: key {key} is missing; convert the model again")
    if type(value[key]) is not kind:
        raise InputError(f"{where}: {key} is {json.dumps(value[key])}; expected {_KINDS[kind]}")
    return value[key]


def _check_arrays(path: Path, piece: Piece, manifest: Manifest) -> None:
    where = f"{path}: piece {piece.name}"
    arrays = manifest.arrays.get(piece.name)
    if arrays is None or piece.name not in manifest.parts:
        raise InputError(f"{where} is missing; convert the model again")
    slots = {array_name(slot): slot for slot in piece.slots}
    if set(arrays) != set(slots):
        raise InputError(f"{where} holds {', '.join(sorted(arrays))}; expected {', '.join(sorted(slots))}")
    for name, slot in slots.items():
        info = arrays[name]
        if info.shape != slot.shape or info.dtype not in WEIGHT_DTYPES:
            raise InputError(f"{where}: array {name} is {info.dtype} {list(info.shape)}; expected {list(slot.shape)}")


def _check_parts(path: Path, piece: Piece, manifest: Manifest) -> None:
    """The parts must give each array's rows from first to last, arrays in the order of the slots."""
    given = [(name, *rows) for part in manifest.parts[piece.name] for name, rows in part.rows.items()]
    for slot in piece.slots:
        name, position = array_name(slot), 0
        while position < slot.shape[0]:
            if not given or given[0][:2] != (name, position) or not position < given[0][2] <= slot.shape[0]:
                raise InputError(f"{path}: piece {piece.name}: no part holds array {name} from row {position} on")
            position = given.pop(0)[2]
    if given:
        raise InputError(f"{path}: piece {piece.name}: {given[0][0]} is held twice or out of order")
    for part in manifest.parts[piece.name]:
        for name in (part.directory, *part.files):
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise InputError(f"{path}: piece {piece.name}: {name!r} is no path inside the directory")


def _check_files(weights: Path, parts: tuple[Part, ...]) -> None:
    for part in parts:
        for name, size in part.files.items():
            file = weights / part.directory / name
            if not os.path.isfile(file):  # unlike Path.is_file, False for names too long for the system
                raise InputError(f"{file}: file is missing; convert the model again")
            if file.stat().st_size != size:
                raise InputError(f"{file}: has {file.stat().st_size} bytes instead of {size}; convert the model again")
