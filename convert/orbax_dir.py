"""Writing and reading the weights of a converted directory.

``weights/`` holds orbax checkpoints of at most some tens of MB: the small arrays of a piece
(:func:`convert.keymap.pieces`) together, and large arrays cut into slabs of rows. Orbax keeps compressed copies of
everything it is writing, so the size of a checkpoint, not of the model, bounds the memory beyond the array at hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert import manifest as manifests
from convert.dtypes import WEIGHT_DTYPES, bits, page_aligned, release_heap
from convert.keymap import Piece, Slot
from convert.manifest import ArrayInfo, Manifest, Part, array_name
from polestar_jax.errors import InputError, RunError
from polestar_jax.spec import ModelSpec

# Bytes of weights in one orbax checkpoint (a single row may exceed it), and in one of its files.
PART_BYTES = 32 << 20
_FILE_BYTES = 4 << 20
# Files in which orbax notes when and under which path it wrote.
_NOTES = ("_CHECKPOINT_METADATA", "commit_success.txt")


class Writer:
    """Writes pieces into ``directory / weights`` and, at the end, the spec and the manifest."""

    def __init__(self, directory: Path, checkpointer: Any):
        self._directory = directory
        self._checkpointer = checkpointer
        self._arrays: dict[str, dict[str, ArrayInfo]] = {}
        self._parts: dict[str, list[Part]] = {}

    def write(self, piece: Piece, weights: Iterable[tuple[Slot, np.ndarray]]) -> None:
        """Write one piece, given its weights in order; RunError with the cause where that fails."""
        self._arrays[piece.name], self._parts[piece.name] = {}, []
        pending: dict[str, tuple[int, np.ndarray]] = {}
        size = 0
        for slot, array in weights:
            name = array_name(slot)
            self._arrays[piece.name][name] = _describe(array)
            step = max(1, PART_BYTES // max(array.nbytes // array.shape[0], 1))
            for start in range(0, array.shape[0], step):
                slab = array[start : start + step]
                if pending and (size + slab.nbytes > PART_BYTES or name in pending):
                    self._save(piece, pending)
                    pending, size = {}, 0
                pending[name] = (start, slab)
                size += slab.nbytes
            if array.nbytes > PART_BYTES:  # a slab left pending would keep the whole array alive
                self._save(piece, pending)
                pending, size = {}, 0
        if pending:
            self._save(piece, pending)

    def _save(self, piece: Piece, slabs: dict[str, tuple[int, np.ndarray]]) -> None:
        import orbax.checkpoint as ocp

        parts = self._parts[piece.name]
        directory = f"{piece.name}.{len(parts):02d}"
        target = self._directory / manifests.WEIGHTS / directory
        cpu = jax.devices("cpu")[0]
        tree = _tree({name: jax.device_put(slab, cpu) for name, (_, slab) in slabs.items()})
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_FILE_BYTES), tree)
        try:
            # The checkpointer works in the background: only waiting for it brings its errors here.
            self._checkpointer.save(target, tree, save_args=save_args)
            self._checkpointer.wait_until_finished()
        except Exception as error:
            raise RunError(f"writing {directory} failed: {_first_line(error)}") from error
        rows = {name: (start, start + len(slab)) for name, (start, slab) in slabs.items()}
        paths = sorted(path for path in target.rglob("*") if path.is_file() and path.name not in _NOTES)
        files = {path.relative_to(target).as_posix(): path.stat().st_size for path in paths}
        parts.append(Part(directory, rows, files))
        del tree
        release_heap()

    def finish(self, spec: ModelSpec) -> None:
        """Write the spec and the manifest: from now on the directory counts as complete."""
        parts = {piece: tuple(listed) for piece, listed in self._parts.items()}
        manifests.write(self._directory, spec, Manifest(self._arrays, parts))


@contextlib.contextmanager
def writer(directory: Path) -> Iterator[Writer]:
    """A :class:`Writer` on an existing directory."""
    (directory / manifests.WEIGHTS).mkdir()
    with _checkpointer() as checkpointer:
        yield Writer(directory, checkpointer)


def read_piece(
    directory: Path, piece: Piece, manifest: Manifest, *, checksums: bool
) -> Iterator[tuple[Slot, np.ndarray]]:
    """One piece's weights in the order of its slots, in host memory, as stored; one array is held at a time.

    Args:
      directory: the converted directory.
      piece, manifest: what is expected there (:func:`convert.manifest.read_manifest`).
      checksums: also compare each array with its checksum.

    Raises:
      InputError: a part is damaged; names it.
    """
    arrays = manifest.arrays[piece.name]
    slots = {array_name(slot): slot for slot in piece.slots}
    whole: np.ndarray | None = None
    for part in manifest.parts[piece.name]:
        release_heap()
        for name, slab in _restore(directory, part, arrays).items():
            slot, (start, stop) = slots[name], part.rows[name]
            if start == 0:
                whole = page_aligned(slot.shape, slab.dtype)
            bits(whole)[start:stop] = bits(slab)
            if stop == slot.shape[0]:
                if checksums and _checksum(whole) != arrays[name].sha256:
                    where = directory / manifests.WEIGHTS / part.directory
                    raise InputError(f"{where}: array {name} does not match its checksum in {manifests.MANIFEST}")
                yield slot, whole
                whole = None


def _restore(directory: Path, part: Part, arrays: dict[str, ArrayInfo]) -> dict[str, np.ndarray]:
    target = directory.absolute() / manifests.WEIGHTS / part.directory
    # Uninitialised arrays take no memory until they are written; they only say that host arrays are wanted.
    wanted = {
        name: np.empty((stop - start, *arrays[name].shape[1:]), WEIGHT_DTYPES[arrays[name].dtype])
        for name, (start, stop) in part.rows.items()
    }
    try:
        with _checkpointer() as checkpointer:
            tree = checkpointer.restore(target, _tree(wanted))
            restored = {name: np.asarray(_leaf(tree, name)) for name in wanted}
    except Exception as error:
        raise InputError(f"{target}: cannot be restored ({_first_line(error)})") from error
    for name, slab in restored.items():
        if slab.shape != wanted[name].shape or slab.dtype != wanted[name].dtype:
            raise InputError(f"{target}: array {name} is {slab.dtype} {list(slab.shape)}, not as in the manifest")
    return restored


def _tree(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, leaf = name.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def _leaf(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[key]
    return tree


def _describe(array: np.ndarray) -> ArrayInfo:
    dtype = next(name for name, dtype in WEIGHT_DTYPES.items() if dtype == array.dtype)
    return ArrayInfo(array.shape, dtype, _checksum(array))


def _checksum(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(bits(array))).hexdigest()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """A checkpointer with one file per chunk, which reports by exceptions alone."""
    import orbax.checkpoint as ocp

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # otherwise a failed write is also printed, three times with its stack
    checkpointer = ocp.StandardCheckpointer(use_ocdbt=False)
    try:
        yield checkpointer
    except BaseException:
        with contextlib.suppress(Exception):  # a failed write fails again here, and would hide the error on its way
            checkpointer.close()
        raise
    else:
        checkpointer.close()
    finally:
        logger.setLevel(level)
