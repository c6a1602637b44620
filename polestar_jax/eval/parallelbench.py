"""Tasks in the manner of ParallelBench (arXiv 2510.04767): short questions that differ in how parallel an answer can be.

Prompts, data and scores are this project's own: a seeded generator, and rules that accept every right answer where there are
several. Ten tasks change a waiting line, two complete a square of four by four, three put words into a sentence. Answers are
short enough for the 32 positions, in blocks of 8, that the Polestar paper decodes (arXiv 2607.14107, section 5.2).

The split. The Polestar paper reports an "easy" and a "hard" subset without saying what is in them; of the hard one it says that
"later tokens often depend on unresolved earlier reasoning states". Ours: a task is *easy* if each item of the answer follows from
the prompt alone, so that committing all items at once loses nothing (their total correlation, given the prompt, is zero); it is
*hard* if an item depends on other items of the answer. Easy are copy, reverse, sort and the changes at a given place. Hard are
those with several right answers, whose items must agree on one (shuffle, changes at any place, latin squares, sentences), and
sudoku, which has one answer, but whose cells follow from each other. So the figures stand beside each other, not beside
the paper's.

What is not scored: the grammar and sense of sentences. A sentence is right if it is one sentence and has all words; "bread,
knife, soup." is right.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from polestar_jax.errors import InputError
from polestar_jax.eval import parallelbench_grids as grids
from polestar_jax.eval import parallelbench_lines as lines
from polestar_jax.eval import parallelbench_words as words
from polestar_jax.eval.localdata import check_options, whole_number
from polestar_jax.eval.parallelbench_draws import Draws
from polestar_jax.eval.task import Item, Task

VERSION = "1"
COUNT, MOST, SEED = 100, 500, 0
EASY, HARD = "easy", "hard"
_LINES = {f"waiting_line_{change}": change for change in lines.CHANGES}
_GRIDS = tuple(grids.SYMBOLS)
_WORDS = {f"words_to_sentence_{level}": level for level in words.LEVELS}
_EASY_CHANGES = ("copy", "reverse", "sort", "insert_index", "remove_index", "replace_index")
NAMES = (*_LINES, *_GRIDS, *_WORDS)


def split(name: str) -> str:
    """Whether a task is "easy" or "hard", by the rule above."""
    return EASY if _LINES.get(name) in _EASY_CHANGES else HARD


def make_items(name: str, *, count: int = COUNT, seed: int = SEED) -> list[Item]:
    """The first ``count`` items of a task: ids from 1, prompts all different; fewer are a beginning of more."""
    example = lines.example(_LINES[name], Draws(seed, f"{name}/example")) if name in _LINES else ""
    draws = Draws(seed, name)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        if name in _LINES:
            prompt, target = lines.make(_LINES[name], draws, example)
        elif name in _GRIDS:
            prompt, target = grids.make(name, draws)
        else:
            prompt, target = words.make(_WORDS[name], draws)
        found.setdefault(prompt, target)
    return [
        Item(id=f"{name}/{number}", prompt=prompt, target=target, subset=split(name))
        for number, (prompt, target) in enumerate(found.items(), 1)
    ]


def score(item: Item, text: str) -> dict[str, float]:
    """1 for a right answer, else 0."""
    rule = lines if "line" in item.target else words if "words" in item.target else grids
    return {"accuracy": float(rule.right(item.target, text))}


def canonical(item: Item) -> str:
    """A right answer."""
    return item.target["answer"]


def _items(task: str, names: Sequence[str], file: pathlib.Path | None, options: Mapping[str, Any]) -> list[Item]:
    """Items of the tasks ``names``, one task after the other; of several, an item's subset is its task.

    Args:
      task: what to call it in messages.
      names: of the single tasks.
      file: None.
      options: ``count``, items of each task (100); ``seed``, what they are drawn from (0).
    """
    if file is not None:
        raise InputError(f"task {task} takes no --data: it makes its items itself")
    check_options(options, ("count", "seed"), task=task)
    count = whole_number(options, "count", default=COUNT, high=MOST)
    if not count:
        raise InputError(f"count=0 is not accepted: a whole number in 1..{MOST}")
    seed = whole_number(options, "seed", default=SEED, high=2**32 - 1)
    found = []
    for name in names:
        items = make_items(name, count=count, seed=seed)
        found += [dataclasses.replace(item, subset=name) for item in items] if len(names) > 1 else items
    return found


def _task(name: str, summary: str, names: Sequence[str], shots: int) -> Task:
    return Task(
        name=name, summary=summary, version=VERSION, items=functools.partial(_items, name, tuple(names)), score=score,
        stop=("\n\nLine:",) if set(names) & set(_LINES) else (), gen_length=32, block_length=8, shots=shots,
        defaults={"count": COUNT, "seed": SEED}, canonical=canonical,
    )  # fmt: skip


def _summaries() -> dict[str, str]:
    changes = {name: f"a waiting line after a change ({change.replace('_', ', ')})" for name, change in _LINES.items()}
    squares = {"latin_square": "a latin square of four by four to complete", "sudoku": "a sudoku of four by four"}
    return changes | squares | {
        name: f"one sentence with {count} given words of {scenes} scene{'s' if scenes > 1 else ''}"
        for name, (count, scenes) in zip(_WORDS, words.LEVELS.values(), strict=True)
    }  # fmt: skip


def _tasks() -> dict[str, Task]:
    every = lambda kind: [name for name in NAMES if split(name) == kind]  # noqa: E731
    single = [
        _task(name, f"{summary}; {split(name)}", (name,), int(name in _LINES)) for name, summary in _summaries().items()
    ]
    both = [
        # Where not every task shows an example, the set is not one of one shot.
        _task(f"parallelbench_{kind}", f"all {len(every(kind))} {kind} tasks, scores by task", every(kind), int(shown))
        for kind in (EASY, HARD)
        for shown in (set(every(kind)) <= set(_LINES),)
    ]
    return {task.name: task for task in (*single, *both)}


TASKS = _tasks()
