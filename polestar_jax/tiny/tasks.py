"""The embedded model's tasks: what it is asked, what it should answer, and when an answer is right.

List tasks in the manner of ParallelBench (arXiv 2510.04767) and arithmetic with worked steps in the manner of GSM8K. They
differ in how far an answer can be decoded in parallel: every item of a copy is known at once, the items of a shuffle depend
on each other, and each worked step needs the result of the one before.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = ("Tom", "Mia", "Ben", "Ana", "Leo", "Zoe", "Sam", "Eva", "Max", "Ivy", "Dan", "Kim")
THINGS = ["apples", "pears", "coins", "books", "cards", "pens", "shells", "stamps", "eggs", "plums", "cups", "toys"]
GAINS = ("buys {n} more", "finds {n} more", "gets {n} more")
LOSSES = ("loses {n}", "sells {n}", "eats {n}", "gives {n} to {other}")
EVALUATION_SEED = 1234
EVALUATION_FILE = pathlib.Path(__file__).with_name("evaluation.jsonl")


class Example(NamedTuple):
    task: str
    prompt: str
    answer: str


def _letters(rng: random.Random, low: int, high: int) -> list[str]:
    """Distinct letters: each item of a list is one token and names its own place."""
    return rng.sample(LETTERS, rng.randint(low, high))


def _copy(rng: random.Random) -> tuple[str, str]:
    items = _letters(rng, 4, 9)
    return f"Copy the list: {' '.join(items)}", " ".join(items)


def _reverse(rng: random.Random) -> tuple[str, str]:
    items = _letters(rng, 4, 9)
    return f"Reverse the list: {' '.join(items)}", " ".join(items[::-1])


def _sort(rng: random.Random) -> tuple[str, str]:
    items = _letters(rng, 4, 9)
    return f"Sort the list: {' '.join(items)}", " ".join(sorted(items))


def _replace(rng: random.Random) -> tuple[str, str]:
    *items, new = _letters(rng, 5, 10)
    place = rng.randrange(len(items))
    answer = [*items[:place], new, *items[place + 1 :]]
    return f"Replace {items[place]} with {new} in the list: {' '.join(items)}", " ".join(answer)


def _insert(rng: random.Random) -> tuple[str, str]:
    *items, new = _letters(rng, 5, 9)
    place = rng.randrange(len(items))
    answer = [*items[: place + 1], new, *items[place + 1 :]]
    return f"Insert {new} after {items[place]} in the list: {' '.join(items)}", " ".join(answer)


def _remove(rng: random.Random) -> tuple[str, str]:
    items = _letters(rng, 5, 9)
    place = rng.randrange(len(items))
    return f"Remove {items[place]} from the list: {' '.join(items)}", " ".join(items[:place] + items[place + 1 :])


def _shuffle(rng: random.Random) -> tuple[str, str]:
    items = _letters(rng, 4, 8)
    answer = list(items)
    while answer == items:
        rng.shuffle(answer)
    return f"Shuffle the list: {' '.join(items)}", " ".join(answer)


def _random_replace(rng: random.Random) -> tuple[str, str]:
    *items, new = _letters(rng, 5, 10)
    answer = list(items)
    answer[rng.randrange(len(items))] = new
    return f"Replace a random item with {new} in the list: {' '.join(items)}", " ".join(answer)


@functools.cache
def _latin_squares() -> tuple[tuple[tuple[int, ...], ...], ...]:
    rows = tuple(itertools.permutations((1, 2, 3, 4)))

    def grow(square: tuple) -> Iterator[tuple]:
        if len(square) == 4:
            yield square
            return
        for row in rows:
            if all(a != b for above in square for a, b in zip(above, row, strict=True)):
                yield from grow((*square, row))

    return tuple(grow(()))


def _latin(rng: random.Random) -> tuple[str, str]:
    cells = [str(cell) for row in rng.choice(_latin_squares()) for cell in row]
    given = set(rng.sample(range(4, 16), rng.choice((0, 0, 1, 2, 3, 4)))) | set(range(4))
    shown = [cell if i in given else "_" for i, cell in enumerate(cells)]
    grid = lambda cells: " / ".join(" ".join(cells[i : i + 4]) for i in range(0, 16, 4))  # noqa: E731
    return f"Complete the latin square: {grid(shown)}", grid(cells)


def _steps(rng: random.Random, count: int) -> tuple[int, list[tuple[int, str, int, int]]]:
    """A start in 5..30 and ``count`` steps (value, sign, n, result) with distinct n in 2..9 and results in 0..39."""
    start = value = rng.randint(5, 30)
    steps = []
    for n in rng.sample(range(2, 10), count):
        sign = "+" if value < n or (value + n < 40 and rng.random() < 0.5) else "-"
        result = value + n if sign == "+" else value - n
        steps.append((value, sign, n, result))
        value = result
    return start, steps


def _worked(steps: list[tuple[int, str, int, int]]) -> str:
    lines = [f"{value} {sign} {n} = {result}." for value, sign, n, result in steps]
    return " ".join(lines) + f" #### {steps[-1][3]}"


def _chain(rng: random.Random) -> tuple[str, str]:
    start, steps = _steps(rng, rng.randint(2, 5))
    return f"What is {start}" + "".join(f" {sign} {n}" for _, sign, n, _ in steps) + "?", _worked(steps)


def _word(rng: random.Random) -> tuple[str, str]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start, steps = _steps(rng, rng.randint(2, 4))
    story = f"{name} has {start} {thing}."
    for _, sign, n, _ in steps:
        event = rng.choice(GAINS if sign == "+" else LOSSES)
        other = rng.choice([other for other in NAMES if other != name])
        story += f" {name} " + event.format(n=n, other=other) + "."
    return f"{story} How many {thing} does {name} have now?", _worked(steps)


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "copy": _copy,
    "reverse": _reverse,
    "sort": _sort,
    "replace": _replace,
    "insert": _insert,
    "remove": _remove,
    "shuffle": _shuffle,
    "random_replace": _random_replace,
    "latin": _latin,
    "word": _word,
    "chain": _chain,
}
# Shares of the training data, and those from step LATE on: what is learnt late is seen more often then.
WEIGHTS = {
    "copy": 0.7, "reverse": 1.0, "sort": 1.0, "replace": 0.9, "insert": 1.5, "remove": 1.1,
    "shuffle": 0.4, "random_replace": 0.7, "latin": 0.7, "word": 2.4, "chain": 2.0,
}  # fmt: skip
LATE = 3000
LATE_WEIGHTS = {
    "copy": 0.4, "reverse": 1.4, "sort": 1.4, "replace": 0.8, "insert": 0.9, "remove": 0.9,
    "shuffle": 0.3, "random_replace": 0.4, "latin": 0.4, "word": 3.0, "chain": 2.5,
}  # fmt: skip
# The training step at which a task comes in. Copying alone is learnt in some 200 steps, and what looks things up by their
# neighbours then builds on it; all tasks at once stay on a plateau for thousands of steps.
STARTS = {
    "copy": 0, "replace": 0, "remove": 0, "insert": 400, "reverse": 400, "sort": 800, "random_replace": 800,
    "shuffle": 800, "chain": 1200, "word": 1200, "latin": 1600,
}  # fmt: skip


def score(example: Example, output: str) -> bool:
    """Whether ``output`` answers the example: any right answer counts where there are several (list and square tasks);
    for arithmetic only the number after ``####`` does."""
    output = output.strip()
    items, got = example.prompt.rpartition(": ")[2].split(), output.split()
    match example.task:
        case "shuffle":
            return sorted(items) == sorted(got) and items != got
        case "random_replace":
            new = re.search(r"with (\w) in", example.prompt).group(1)
            return len(items) == len(got) and got.count(new) == 1 and sum(map(str.__ne__, items, got)) == 1
        case "latin":
            return _latin_right([c for c in items if c != "/"], [row.split() for row in output.split(" / ")])
        case "word" | "chain":
            found = re.search(r"#### (\d+)$", output)
            return found is not None and found.group(1) == example.answer.rpartition("#### ")[2]
    return output == example.answer


def _latin_right(shown: list[str], rows: list[list[str]]) -> bool:
    if [len(row) for row in rows] != [4, 4, 4, 4]:
        return False
    kept = all(a in ("_", b) for a, b in zip(shown, itertools.chain(*rows), strict=True))
    return kept and all(set(line) == set("1234") for line in (*rows, *zip(*rows, strict=True)))


def evaluation_set(per_task: int = 100) -> list[Example]:
    """The fixed evaluation set, drawn from its own seed: ``per_task`` distinct prompts of each task."""
    rng = random.Random(EVALUATION_SEED)
    chosen: dict[str, Example] = {}
    for task, make in TASKS.items():
        wanted = len(chosen) + per_task
        while len(chosen) < wanted:
            prompt, answer = make(rng)
            chosen.setdefault(prompt, Example(task, prompt, answer))
    return list(chosen.values())


def load_evaluation_set(path: pathlib.Path = EVALUATION_FILE) -> list[Example]:
    """The evaluation set as shipped: one JSON object (task, prompt, answer) a line."""
    return [Example(**json.loads(line)) for line in path.read_text().splitlines()]


class TrainingExamples:
    """Endless training examples from a seed, none with a prompt of the evaluation set."""

    def __init__(self, seed: int):
        self.held_out = {example.prompt for example in evaluation_set()}
        self.rng = random.Random(seed)

    def draw(self, step: int) -> Example:
        """The next example, of a task that has come in by training step ``step``."""
        names = [task for task, start in STARTS.items() if start <= step]
        shares = WEIGHTS if step < LATE else LATE_WEIGHTS
        while True:
            task = self.rng.choices(names, [shares[name] for name in names])[0]
            prompt, answer = TASKS[task](self.rng)
            if prompt not in self.held_out:
                return Example(task, prompt, answer)
