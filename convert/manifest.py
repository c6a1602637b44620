"""``spec.json`` and ``manifest.json`` of a converted directory: what its weights are and which files hold them.

The manifest is written last, so a directory without one is unfinished. Reading it checks it against the spec and
against the files on disk, so that damage is found before any weight is read.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from convert.dtypes import WEIGHT_DTYPES
from convert.keymap import Piece, Slot, pieces
from polestar_jax.errors import InputError
from polestar_jax.spec import ModelSpec

FORMAT = "polestar-jax"
FORMAT_VERSION = 1
SPEC, MANIFEST, WEIGHTS = "spec.json", "manifest.json", "weights"


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
        return ModelSpec.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: file is missing; convert the model again") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: is no model spec ({type(error).__name__}: {error})") from None


def read_manifest(directory: Path, spec: ModelSpec) -> Manifest:
    """The manifest, after checking it against the spec and the files on disk; no weight is read.

    Raises:
      InputError: another format, or arrays or files that are missing, unknown, misshapen or of another size.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind, version = content["format"], content["format_version"]
        if (kind, version) != (FORMAT, FORMAT_VERSION):
            raise InputError(f"{path}: is {kind!r} version {version!r}; this release reads {FORMAT!r} {FORMAT_VERSION}")
        manifest = _parse(content)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: is no manifest of converted weights ({type(error).__name__}: {error})") from None
    expected = pieces(spec)
    extra = set(manifest.arrays) - {piece.name for piece in expected}
    if extra:
        raise InputError(f"{path}: names pieces that {SPEC} does not have: {', '.join(sorted(extra))}")
    for piece in expected:
        _check_arrays(path, piece, manifest)
        _check_parts(path, piece, manifest)
        _check_files(directory / WEIGHTS, manifest.parts[piece.name])
    return manifest


def _parse(content: dict[str, Any]) -> Manifest:
    arrays = {
        piece: {name: ArrayInfo(tuple(a["shape"]), a["dtype"], a["sha256"]) for name, a in named.items()}
        for piece, named in content["arrays"].items()
    }
    parts = {
        piece: tuple(
            Part(p["directory"], {name: (start, stop) for name, (start, stop) in p["rows"].items()}, dict(p["files"]))
            for p in listed
        )
        for piece, listed in content["parts"].items()
    }
    return Manifest(arrays, parts)


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
            if not file.is_file():
                raise InputError(f"{file}: file is missing; convert the model again")
            if file.stat().st_size != size:
                raise InputError(f"{file}: has {file.stat().st_size} bytes instead of {size}; convert the model again")
