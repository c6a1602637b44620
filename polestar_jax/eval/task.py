"""What an evaluation is made of: items with a prompt and a target, and a score for a text."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polestar_jax.settings import Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One question.

    Attributes:
      id: unique in its task; what a resumed run goes by.
      prompt: a text, which goes through the model's chat template unless the run's prompt mode says otherwise, or chat messages.
      target: what the score compares with; JSON.
      subset: what scores are broken down by; "" for none.
    """

    id: str
    prompt: str | list[dict[str, str]]
    target: Any
    subset: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A set of items and how an answer to one is scored.

    Attributes:
      name: as ``polestar eval --task`` takes it.
      summary: one line.
      version: of the items and the score; part of every record.
      items: (file, options) -> items; ``file`` is ``--data``, or None where the task makes its items itself; ``options`` are
        those of ``--option KEY=VALUE``, and ``allow_code_execution`` (True) where scoring runs code and that was allowed.
      score: (item, text) -> metrics by name, each in [0, 1]; the first is the main one. ``text`` has been cut at the first end
        of text and at the first of ``stop``.
      needs_data: whether ``--data`` must be given.
      stop: strings that end an answer, applied to its text after all of it was decoded.
      gen_length, block_length: what the paper decodes it with.
      shots: examples in the prompt, for the record.
      runs_code: whether scoring executes what a model wrote.
      options: the options by name, checked and filled up before ``items`` gets them; None: ``items`` gets texts, and refuses
        those that it does not know.
      defaults: what options are that are not given, for the record, where ``options`` is None.
      packages: distributions that decide about scores, for the record.
      canonical: item -> a text that must score 1; an evaluation tries some before it decodes anything. None: not known.
    """

    name: str
    summary: str
    version: str
    items: Callable[[pathlib.Path | None, Mapping[str, Any]], Sequence[Item]]
    score: Callable[[Item, str], dict[str, float]]
    needs_data: bool = False
    stop: tuple[str, ...] = ()
    gen_length: int = 256
    block_length: int = 32
    shots: int = 0
    runs_code: bool = False
    options: Mapping[str, Setting] | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    packages: tuple[str, ...] = ()
    canonical: Callable[[Item], str] | None = None


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    ends = [text.find(mark) for mark in stop if mark and mark in text]
    return text[: min(ends)] if ends else text
