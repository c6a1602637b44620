"""Checking a checkpoint's tensors against the spec from headers alone, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from convert.dtypes import WEIGHT_DTYPES
from convert.keymap import canonical, expected_tensors, foreign_name, pieces
from convert.safetensors_file import Entry
from polestar_jax.errors import InputError
from polestar_jax.spec import ModelSpec

_SHOWN = 5


def canonical_entries(entries: Mapping[str, Entry], spec: ModelSpec) -> dict[str, Entry]:
    """The entries under full names; InputError where one tensor is there under both its names."""
    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        full = canonical(name, spec.family)
        if full in result:
            other = result[full]
            raise InputError(f"{entry.file}: tensor {name} is the same as {other.name} in {other.file.name}")
        result[full] = entry
    return result


def check_tensors(
    entries: Mapping[str, Entry], spec: ModelSpec, *, directory: Path, dtype: str | None, allow_unknown: bool
) -> list[str]:
    """Check names, shapes and element types of a checkpoint.

    Args:
      entries: canonical name -> entry.
      spec: what ``config.json`` describes.
      directory: where they come from, for messages.
      dtype: the type weights will be cast to, or None to keep each as stored.
      allow_unknown: leave tensors the model does not have unread instead of refusing them.

    Returns:
      The unknown tensors (empty unless allowed).

    Raises:
      InputError: one line listing what is missing, unknown, misshapen or of an unsupported type, with file names.
    """
    expected = expected_tensors(spec)
    foreign = None if allow_unknown else foreign_name([entry.name for entry in entries.values()], spec.family)
    if foreign:
        name, kind = foreign
        raise InputError(
            f"{directory}: config.json describes a {spec.family} text model, but tensor {name} belongs to {kind}"
        )
    unknown = [name for name in entries if name not in expected]
    problems = [
        _listing("missing", [name for name in expected if name not in entries]),
        _listing("unknown", [] if allow_unknown else [_located(entries[name]) for name in unknown]),
        _listing(
            "misshapen",
            [
                f"{_located(entries[name])} is {list(entries[name].shape)} instead of {list(shape)}"
                for name, shape in expected.items()
                if name in entries and entries[name].shape != shape
            ],
        ),
        _listing(
            f"unsupported (accepted: {', '.join(WEIGHT_DTYPES)})",
            [
                f"{_located(entries[name])} is {entries[name].dtype}"
                for name in expected
                if name in entries and entries[name].dtype not in WEIGHT_DTYPES
            ],
        ),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise InputError(f"{directory}: " + "; ".join(found))
    if dtype is None:
        _check_fusable(entries, spec, directory)
    return unknown


def _check_fusable(entries: Mapping[str, Entry], spec: ModelSpec, directory: Path) -> None:
    for piece in pieces(spec):
        for slot in piece.slots:
            dtypes = {entries[tensor.name].dtype for tensor in slot.sources}
            if len(dtypes) > 1:
                listing = ", ".join(f"{tensor.name} is {entries[tensor.name].dtype}" for tensor in slot.sources)
                raise InputError(f"{directory}: {listing}; they are stored as one array, so name one dtype to cast to")


def _located(entry: Entry) -> str:
    return f"{entry.name} (in {entry.file.name})"


def _listing(state: str, items: list[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{state} tensors: {', '.join(items[:_SHOWN])}{more}"
