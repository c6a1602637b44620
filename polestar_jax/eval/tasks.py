"""The tasks by name. A task's module is imported when the task is asked for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polestar_jax.errors import InputError, RunError
from polestar_jax.eval.task import Item, Task
from polestar_jax.tiny.tasks import Example, load_evaluation_set, score

# Tasks in modules of their own (attribute TASK), and modules with several tasks (TASKS, by name).
_MODULES = {name: f"polestar_jax.eval.{name}" for name in ("gsm8k", "math", "humaneval", "mbpp")}
_FAMILIES = ("polestar_jax.eval.parallelbench",)


def names() -> tuple[str, ...]:
    """Every task there is."""
    single = [name for name, module in _MODULES.items() if importlib.util.find_spec(module)]
    return ("tiny", *single, *(name for family in _families() for name in family))


def get(name: str) -> Task:
    """The task of this name; InputError lists those there are."""
    if name not in names():
        raise InputError(f"unknown task {name!r}; tasks: {', '.join(names())}")
    if name == "tiny":
        return tiny()
    if name in _MODULES:
        return importlib.import_module(_MODULES[name]).TASK
    return next(family[name] for family in _families() if name in family)


def _families() -> Iterable[Mapping[str, Task]]:
    for module in _FAMILIES:
        if importlib.util.find_spec(module):
            yield importlib.import_module(module).TASKS


def tiny() -> Task:
    """The embedded model's evaluation set: 100 prompts of each of its tasks, none of them seen in training."""
    return Task(
        name="tiny",
        summary="lists, latin squares and sums in words, 100 prompts each: what the embedded model was trained on",
        version=digest(_tiny_items(None, {})),
        items=_tiny_items,
        score=lambda item, text: {"accuracy": float(score(Example(item.subset, item.prompt, item.target), text))},
        gen_length=64,
        block_length=16,
        options={},
        canonical=lambda item: item.target,
    )


def _tiny_items(file: pathlib.Path | None, options: Mapping[str, Any]) -> list[Item]:
    if file is not None:
        raise InputError("task tiny takes no --data: its items come with the package")
    counts: dict[str, int] = {}
    items = []
    for example in load_evaluation_set():
        counts[example.task] = counts.get(example.task, -1) + 1
        name = f"{example.task}-{counts[example.task]:03}"
        items.append(Item(id=name, prompt=example.prompt, target=example.answer, subset=example.task))
    return items


def digest(items: Sequence[Item]) -> str:
    """16 hexadecimal digits that change with any item."""
    text = json.dumps([[item.id, item.prompt, item.target, item.subset] for item in items], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def chosen(task: Task, file: pathlib.Path | None, options: Mapping[str, Any], limit: int | None) -> list[Item]:
    """The task's items, at most ``limit`` of each subset, in the task's order.

    Raises:
      InputError: data that is missing or cannot be used, no items, or an id given twice.
    """
    if task.needs_data and file is None:
        raise InputError(f"task {task.name} needs its data: --data F.jsonl")
    items = list(task.items(file, options))
    where = str(file) if file else f"task {task.name}"
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise InputError(f"{where}: two items have the id {item.id!r}")
        seen.add(item.id)
    if not items:
        raise InputError(f"{where}: no items")
    return items if limit is None else [items[place] for place in first_of_each(items, limit)]


def first_of_each(items: Sequence[Item], count: int) -> list[int]:
    """The places of the first ``count`` items of each subset, in order."""
    seen: dict[str, int] = {}
    places = []
    for place, item in enumerate(items):
        seen[item.subset] = seen.get(item.subset, 0) + 1
        if seen[item.subset] <= count:
            places.append(place)
    return places


def check_score(task: Task, items: Sequence[Item]) -> None:
    """Refuse to start with a scorer that does not work here: of each subset's first item, the canonical answer must score 1
    and an empty one less.

    Raises:
      RunError: it does not; names the item.
    """
    for place in first_of_each(items, 1) if task.canonical else ():
        item = items[place]
        right, empty = (next(iter(task.score(item, text).values())) for text in (task.canonical(item), ""))
        if right != 1 or empty == 1:
            raise RunError(
                f"task {task.name} scores wrongly here: item {item.id!r} gives {right:g} for its right answer, {empty:g} for none"
            )
