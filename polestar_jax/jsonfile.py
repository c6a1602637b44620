"""Reading JSON objects that others wrote: whatever is wrong with one becomes a single line naming its file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from polestar_jax.errors import InputError

_MAX_DEPTH = 64  # far above any file read here, and far below the depth at which printing a value fails


def load_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a UTF-8 file; ``unique`` as in :func:`parse_json`.

    Raises:
      InputError: the file is absent, not readable, or holds no JSON object; names the file.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: file is missing") from None
    except (OSError, ValueError) as error:  # ValueError: a path no system takes
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return parse_json(raw, source=str(path), unique=unique)


def parse_json(text: str | bytes, *, source: str, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a text.

    Args:
      text: the text, or its bytes in UTF-8.
      source: what to call it in messages, usually its path.
      unique: refuse a key that stands twice in one object, where the later would hide the earlier.

    Raises:
      InputError: no JSON, not an object, nested too deep, or a number too long to read.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_unique_keys if unique else None)
    except RecursionError:
        raise InputError(f"{source}: no valid JSON (nested too deep; at most {_MAX_DEPTH} levels)") from None
    except ValueError as error:  # syntax, encoding, repeated keys, integers of thousands of digits
        raise InputError(f"{source}: no valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{source}: holds a JSON {type(value).__name__}, not an object")
    _check_depth(value, source)
    return value


def finite_float(value: object) -> float | None:
    """A JSON number as a float; None for anything else, NaN, infinities and integers beyond the range included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _check_depth(value: dict[str, Any], source: str) -> None:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in inner for child in items if isinstance(child, dict | list)]
        if not level:
            return
    raise InputError(f"{source}: no valid JSON (nested too deep; at most {_MAX_DEPTH} levels)")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise ValueError(f"duplicate key {next(key for key, _ in pairs if key in seen or seen.add(key))}")
    return result
