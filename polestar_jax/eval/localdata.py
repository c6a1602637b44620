"""Reading what a task is given: rows of a local JSON Lines file, and its options."""

from __future__ import annotations

import gzip
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from polestar_jax.errors import InputError
from polestar_jax.jsonfile import parse_json

_KINDS = {str: "a text", list: "a list of texts"}
# Data sets name their rows differently, or not at all.
_ID_FIELDS = ("id", "task_id", "unique_id")


def read_rows(file: pathlib.Path | str | None, fields: Mapping[str, type], *, task: str) -> list[dict[str, Any]]:
    """The rows of a ``.jsonl`` or ``.jsonl.gz`` file, one JSON object a line; empty lines are skipped.

    Args:
      file: the path; None is refused.
      fields: what each row must have: ``str`` for a text, ``list`` for a list of at least one text. Others are kept as they are.
      task: named in messages.

    Raises:
      InputError: no file, or one that cannot be read; names the file, the line and the field at fault.
    """
    if file is None:
        raise InputError(f"{task} needs --data F.jsonl, one JSON object a line with the fields {', '.join(fields)}")
    file = pathlib.Path(file)
    rows = []
    for number, line in enumerate(_read(file).split(b"\n"), 1):
        if line.strip():
            row = parse_json(line, source=f"{file}, line {number}")
            for name, kind in fields.items():
                if not _is(row.get(name), kind):
                    raise InputError(f"{file}, line {number}: {task} needs the field {name}, {_KINDS[kind]}")
            rows.append(row)
    if not rows:
        raise InputError(f"{file}: holds no rows; {task} needs one JSON object a line")
    return rows


def row_ids(rows: Iterable[Mapping[str, Any]], *, file: pathlib.Path | str) -> list[str]:
    """Each row's ``id``, ``task_id`` or ``unique_id``; its number, from 1, where it has none.

    Raises:
      InputError: two rows have the same.
    """
    ids: list[str] = []
    for number, row in enumerate(rows, 1):
        names = (row[name] for name in _ID_FIELDS if isinstance(row.get(name), str | int))
        ids.append(str(next(names, number)))
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise InputError(f"{file}: two rows are called {twice}; ids must differ")
    return ids


def check_options(options: Mapping[str, Any], accepted: Iterable[str], *, task: str) -> None:
    """Refuse options the task does not have; ``allow_code_execution`` is one of every task, for runs over several.

    Raises:
      InputError: names the option and those accepted.
    """
    accepted = tuple(accepted)
    for name in options:
        if name not in (*accepted, "allow_code_execution"):
            raise InputError(f"{task} has no option {name}; accepted: {', '.join(accepted) or 'none'}")


def whole_number(options: Mapping[str, Any], name: str, *, default: int, high: int) -> int:
    """An option that is a whole number in 0..``high``, as a number or as its digits.

    Raises:
      InputError: it is anything else.
    """
    value = options.get(name, default)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise InputError(f"{name}={value} is not accepted: a whole number in 0..{high}")
    return value


def _read(file: pathlib.Path) -> bytes:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).removeprefix(b"\xef\xbb\xbf")
    except FileNotFoundError:
        raise InputError(f"{file}: file is missing") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _is(value: object, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
    return isinstance(value, kind)
