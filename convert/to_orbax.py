"""A model directory -> an orbax directory that loads piece by piece."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from convert import orbax_dir
from convert.dtypes import WEIGHT_DTYPES, parse_dtype
from convert.keymap import expected_tensors, pieces
from convert.side_files import copy_side_files
from convert.source import Source, open_source
from convert.staging import staged

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was written: tensors and bytes of weights, their element types, the unknown tensors left out."""

    family: str
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]
    unknown: tuple[str, ...]


def to_orbax(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    allow_unknown: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a model directory (either layout) into an orbax directory.

    Host memory holds one array of the denoiser at a time, besides a constant. The destination appears only when it is
    complete.

    Args:
      source: directory to read.
      destination: directory to make; must not exist or be empty.
      dtype: "bfloat16", "float16", "float32", or None to keep each tensor as stored.
      allow_unknown: leave out tensors the model does not have instead of refusing them.
      progress: called with a short line after each piece.

    Raises:
      InputError: the source is not a complete, supported model, or the destination is taken.
      RunError: writing failed; nothing is left under the destination.
    """
    stored = parse_dtype(dtype)
    opened = open_source(source)
    unknown = opened.check(dtype=stored, allow_unknown=allow_unknown)
    with staged(destination) as partial:
        copy_side_files(opened.directory, partial, stored)
        with orbax_dir.writer(partial) as writer:
            todo = pieces(opened.spec)
            for number, piece in enumerate(todo, 1):
                writer.write(piece, opened.weights(piece, stored))
                if progress:
                    progress(f"{number}/{len(todo)} {piece.name}")
            writer.finish(opened.spec)
    return summarize(opened, stored, unknown)


def summarize(source: Source, dtype: str | None, unknown: list[str]) -> Conversion:
    """The account of a conversion of ``source`` to ``dtype``."""
    sizes = {
        name: (dtype or source.entries[name].dtype, math.prod(shape))
        for name, shape in expected_tensors(source.spec).items()
    }
    return Conversion(
        family=source.spec.family,
        tensors=len(sizes),
        bytes=sum(WEIGHT_DTYPES[stored].itemsize * count for stored, count in sizes.values()),
        dtypes=tuple(sorted({stored for stored, _ in sizes.values()})),
        unknown=tuple(unknown),
    )
