"""An evaluation's directory: what is evaluated (``runs.json``), and every answer (``answers.jsonl``), kept through kills.

Answers are appended a batch at a time. After a kill the file may end in half a line or half a batch; both are dropped when it is
opened again, and the batch is decoded anew, with the same companions. What is there must have been made with what is asked for
now: another model, prompt, setting or version under a run's key is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polestar_jax import unfinished
from polestar_jax.errors import InputError
from polestar_jax.jsonfile import load_json

RUNS, ANSWERS = "runs.json", "answers.jsonl"
Line = dict[str, Any]
# What an answer's line holds. place: of its item; batch: place of the first item decoded with it, and how many they were;
# timed: decoded alone beside the batches, for the time alone; tokens: all generated ids; seconds: of the whole batch;
# compile_seconds: on the batch's first line alone; near_ties, repetition: shares, as generation.Stats.
FIELDS = (
    "run", "id", "subset", "timed", "place", "batch", "metrics", "text", "tokens", "prompt_tokens", "tokens_all",
    "tokens_non_eos", "tokens_pre_eos", "nfe", "full_forwards", "partial_forwards", "refreshes", "rows", "commits", "seconds",
    "compile_seconds", "near_ties", "repetition",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What makes answers comparable, as JSON values.

    Attributes:
      about: the same for all runs of a directory: task, items, model, prompts, versions, ...
      runs: by key, what is a run's own: method and settings.
      notes: what may differ from one start to the next: paths, cores.
    """

    about: dict[str, Any]
    runs: dict[str, dict[str, Any]]
    notes: dict[str, Any]


class Answers:
    """The answers of a directory that is open for more.

    Attributes:
      record: what they were made with, those of earlier starts included.
      lines: all of them, as read and appended; ``tokens`` as an array, for a long evaluation has millions of them.
    """

    def __init__(self, path: Path, record: Record, lines: list[Line]):
        self.record = record
        self.lines = lines
        self._file = open(path, "ab")  # noqa: SIM115 -- closed by opened()

    def done(self, run: str, *, timed: bool) -> set[int]:
        """The places of a run's items that have an answer of this kind."""
        return {line["place"] for line in self.lines if line["run"] == run and line["timed"] is timed}

    def append(self, batch: Sequence[Line]) -> None:
        """Write a batch's answers down for good."""
        self._file.write(b"".join(map(_encoded, batch)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.extend(line | {"tokens": array("i", line["tokens"])} for line in batch)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def opened(directory: Path, record: Record) -> Iterator[Answers]:
    """The directory, made if need be, for answers of ``record``'s runs beside those it has. A run of an earlier start that has
    no answer and is not asked for again is forgotten.

    Raises:
      InputError: it is none, cannot be written, is being written by another process, or holds answers that were made with
        something else. Nothing is changed then.
    """
    check(directory)
    record = _as_json(record)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {directory} cannot be made: {error.strerror}") from None
    with locked(directory):
        old, lines = read(directory) if _is_evaluation(directory) else (None, [])
        if old:
            _check_same(directory, old, record)
        answered = {line["run"] for line in lines}
        kept = {key: run for key, run in old.runs.items() if key in answered} if old else {}
        known = Record(about=record.about, runs=kept | record.runs, notes=record.notes)
        replace(directory / RUNS, json.dumps(dataclasses.asdict(known), indent=1) + "\n")
        whole = b"".join(map(_encoded, lines))
        path = directory / ANSWERS
        if not path.exists() or path.stat().st_size != len(whole):
            replace(path, whole.decode())
        with contextlib.closing(Answers(path, known, lines)) as answers:
            yield answers


def check(directory: Path) -> None:
    """Refuse a directory that cannot take an evaluation, before there is one to write."""
    try:
        if directory.exists() and not directory.is_dir():
            raise InputError(f"--out {directory} is a file; a directory is needed")
        parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        stray = (directory / ANSWERS).exists() and not _is_evaluation(directory)
    except OSError as error:
        raise InputError(f"--out {directory} cannot be used: {error.strerror}") from None
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"--out {directory}: {parent} is {'not writable' if parent.is_dir() else 'a file'}")
    if stray:
        raise InputError(f"--out {directory}: {ANSWERS} is there without {RUNS}, which says what made it")


def read(directory: Path) -> tuple[Record, list[Line]]:
    """What an evaluation's directory holds: of the answers, those whose batch is complete.

    Raises:
      InputError: it is no such directory, or a file in it is damaged other than by a kill; names file and line.
    """
    if not _is_evaluation(directory):
        raise InputError(f"{directory} holds no evaluation ({RUNS} is missing)")
    value = load_json(directory / RUNS)
    if set(value) != {field.name for field in dataclasses.fields(Record)}:
        raise InputError(f"{directory / RUNS}: not what an evaluation writes; give another directory")
    record = Record(**value)
    path = directory / ANSWERS
    data = path.read_bytes() if path.exists() else b""
    lines = [_line(text, f"{path} line {n + 1}", record) for n, text in enumerate(data.split(b"\n")[:-1])]
    batches: dict[tuple, list[Line]] = {}
    for line in lines:
        batches.setdefault((line["run"], line["timed"], line["batch"][0]), []).append(line)
    for (run, _, first), batch in batches.items():
        if len({line["place"] for line in batch}) != len(batch):
            raise InputError(f"{path}: run {run} has an answer twice, in the batch of item {first}")
    kept = {key for key, batch in batches.items() if len(batch) == batch[0]["batch"][1]}
    return record, [line for line in lines if (line["run"], line["timed"], line["batch"][0]) in kept]


def replace(path: Path, text: str) -> None:
    """Write a file under another name and rename it; for a directory that is locked."""
    partial = path.with_name(f".{path.name}.partial")
    with unfinished.noted(partial):
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """No other process may write to the directory meanwhile; a process that dies lets go of it."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{directory} is being written by another evaluation") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


def difference(old: Any, new: Any, name: str = "") -> str | None:
    """The first difference of two JSON values, in words; None where there is none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            found = difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
            if found:
                return found
        return None
    return None if old == new else f"{name} was {json.dumps(old)} and is {json.dumps(new)}"


def _as_json(record: Record) -> Record:
    """With tuples as lists and so on, as it comes back from a file."""
    return Record(**json.loads(json.dumps(dataclasses.asdict(record))))


def _check_same(directory: Path, old: Record, new: Record) -> None:
    found = difference(old.about, new.about)
    if found:
        raise InputError(f"{directory} holds another evaluation: {found}; give another directory")
    for key in new.runs:
        found = difference(old.runs[key], new.runs[key]) if key in old.runs else None
        if found:
            raise InputError(
                f"{directory} has run {key} made otherwise: {found}; give another directory, or name the run by its setting: "
                f"{new.runs[key].get('method', key)}[KEY=VALUE]"
            )


def _line(text: bytes, where: str, record: Record) -> Line:
    try:
        line = json.loads(text)
        good = set(FIELDS) <= set(line) and line["run"] in record.runs and isinstance(line["timed"], bool)
        good = good and 0 <= line["place"] - line["batch"][0] < line["batch"][1]
        line["tokens"] = array("i", line["tokens"])
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        good = False
    if not good:
        raise InputError(f"{where} is no answer of this evaluation; remove the line to have its batch decoded again")
    return line


def _encoded(line: Line) -> bytes:
    return json.dumps(line, ensure_ascii=False, allow_nan=False, default=list).encode() + b"\n"


def _is_evaluation(directory: Path) -> bool:
    return (directory / RUNS).is_file()
