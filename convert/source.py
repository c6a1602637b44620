"""One view of a model's weights for every reader, whichever of the two directory layouts holds them.

A source gives rows of checkpoint tensors by their full names, and whole fused weights piece by piece. Opening one reads
headers only.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert import manifest as manifests
from convert.check import canonical_entries, check_tensors
from convert.dtypes import WEIGHT_DTYPES, cast
from convert.fuse import fuse, fused_rows
from convert.index import holds_safetensors, list_tensors
from convert.keymap import Piece, Slot, pieces
from convert.orbax_dir import read_piece
from convert.safetensors_file import Entry, read_rows
from convert.staging import is_partial
from polestar_jax.config import read_config, spec_from_config
from polestar_jax.errors import InputError
from polestar_jax.loading import model_directory
from polestar_jax.spec import ModelSpec


class Source(abc.ABC):
    """A model directory opened for reading.

    Attributes:
      directory: where it is.
      layout: "hf" or "orbax".
      spec: what the model is.
      entries: full tensor name -> file, element type and shape, in the order of the forward pass.
    """

    layout: str

    def __init__(self, directory: Path, spec: ModelSpec, entries: dict[str, Entry]):
        self.directory = directory
        self.spec = spec
        self.entries = entries

    def check(self, *, dtype: str | None = None, allow_unknown: bool = False) -> list[str]:
        """Check every tensor against the spec (:func:`convert.check.check_tensors`); returns the unknown ones."""
        return check_tensors(
            self.entries, self.spec, directory=self.directory, dtype=dtype, allow_unknown=allow_unknown
        )

    @abc.abstractmethod
    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of one tensor as stored, contiguous."""

    @abc.abstractmethod
    def weights(self, piece: Piece, dtype: str | None = None) -> Iterator[tuple[Slot, np.ndarray]]:
        """The fused weights of one piece in the order of its slots, in host memory, in ``dtype`` or as stored."""


class HuggingFaceSource(Source):
    """A directory of safetensors files with a ``config.json``."""

    layout = "hf"

    def __init__(self, directory: Path):
        spec = spec_from_config(read_config(directory), source=str(directory / "config.json"))
        super().__init__(directory, spec, canonical_entries(list_tensors(directory), spec))

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return read_rows(self.entries[name], start, stop)

    def weights(self, piece: Piece, dtype: str | None = None) -> Iterator[tuple[Slot, np.ndarray]]:
        for slot in piece.slots:
            stored = dtype or self.entries[slot.sources[0].name].dtype
            yield slot, fuse(slot, self.rows, WEIGHT_DTYPES[stored])


class ConvertedSource(Source):
    """A directory written by :func:`convert.to_orbax.to_orbax`.

    The array read last is kept, with the place reached in its piece, so that reading tensors in the order of the
    forward pass restores every part once.
    """

    layout = "orbax"

    def __init__(self, directory: Path, *, checksums: bool):
        spec = manifests.read_spec(directory)
        self._manifest = manifests.read_manifest(directory, spec)
        self._checksums = checksums
        self._places: dict[str, tuple[Piece, Slot, int]] = {}
        self._reached: tuple[Slot, np.ndarray] | None = None
        self._ahead: tuple[str, Iterator[tuple[Slot, np.ndarray]]] = ("", iter(()))
        entries = {}
        for piece in pieces(spec):
            for slot in piece.slots:
                dtype = self._manifest.arrays[piece.name][manifests.array_name(slot)].dtype
                for index, tensor in enumerate(slot.sources):
                    nbytes = math.prod(tensor.shape) * WEIGHT_DTYPES[dtype].itemsize
                    place = directory / manifests.WEIGHTS / piece.name
                    entries[tensor.name] = Entry(tensor.name, place, dtype, tensor.shape, 0, nbytes)
                    self._places[tensor.name] = (piece, slot, index)
        super().__init__(directory, spec, entries)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        piece, slot, index = self._places[name]
        if self._reached is None or self._reached[0] != slot:
            self._advance(piece, slot)
        return fused_rows(slot, index, self._reached[1], start, stop)

    def weights(self, piece: Piece, dtype: str | None = None) -> Iterator[tuple[Slot, np.ndarray]]:
        for slot, array in self._read(piece):
            yield slot, cast(array, WEIGHT_DTYPES[dtype], ".".join(map(str, slot.path))) if dtype else array

    def _read(self, piece: Piece) -> Iterator[tuple[Slot, np.ndarray]]:
        return read_piece(self.directory, piece, self._manifest, checksums=self._checksums)

    def _advance(self, piece: Piece, slot: Slot) -> None:
        """Read on to ``slot``, from the start of its piece where that lies behind."""
        self._reached = None  # frees the old array before the next is read
        for iterator in (self._ahead[1] if self._ahead[0] == piece.name else iter(()), self._read(piece)):
            self._ahead = (piece.name, iterator)
            for found, array in iterator:
                if found == slot:
                    self._reached = (found, array)
                    return
                del array
        raise AssertionError(slot.path)


def open_source(directory: str | Path, *, checksums: bool = True) -> Source:
    """Open a model directory of either layout.

    Args:
      directory: the model directory, or "tiny" for the embedded model.
      checksums: compare converted weights with their checksums as they are read.

    Raises:
      InputError: it does not exist, is unfinished, or holds another kind of checkpoint.
    """
    directory = model_directory(directory)
    if not os.path.isdir(directory):
        raise InputError(f"{directory}: no such model directory (nothing is downloaded)")
    if is_partial(directory):
        raise InputError(f"{directory}: is what an unfinished conversion left behind; convert the model again")
    if (directory / manifests.MANIFEST).exists():
        return ConvertedSource(directory, checksums=checksums)
    if (directory / manifests.WEIGHTS).is_dir() or (directory / manifests.SPEC).exists():
        raise InputError(f"{directory}: has no {manifests.MANIFEST}: its conversion did not finish; convert it again")
    if not holds_safetensors(directory) and any(
        (directory / name).exists() for name in ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "checkpoint")
    ):
        raise InputError(
            f"{directory}: is a bare orbax checkpoint, whose layout is unknown; expected a directory written by"
            " `polestar convert` or a Hugging Face directory"
        )
    return HuggingFaceSource(directory)
