"""MBPP (arXiv 2108.07732): small Python programs from one sentence and three tests.

The prompt is that of the paper's section 4.1, between ``[BEGIN]`` and ``[DONE]``, with three examples written for this
project in place of the data's tasks 2, 3 and 4; scores are therefore near, not equal, to those of lm-eval's ``mbpp``.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from polestar_jax.errors import InputError
from polestar_jax.eval import sandbox
from polestar_jax.eval.extraction import extract, positional
from polestar_jax.eval.humaneval import tested
from polestar_jax.eval.localdata import check_options, read_rows, row_ids, whole_number
from polestar_jax.eval.statements import parse, statements
from polestar_jax.eval.task import Item, Task

_FIELDS = {"text": str, "code": str, "test_list": list}
EXAMPLES = (
    {
        "text": "Write a python function to add up the odd numbers of a list.",
        "code": "def sum_of_odds(numbers):\n  total = 0\n  for number in numbers:\n    if number % 2 == 1:\n"
        "      total += number\n  return total",
        "test_list": [
            "assert sum_of_odds([1, 2, 3]) == 4",
            "assert sum_of_odds([2, 4]) == 0",
            "assert sum_of_odds([-1, 5, 8]) == 4",
        ],
    },
    {
        "text": "Write a function to find the longest word of a sentence, and of several the one that comes first.",
        "code": "def longest_word(sentence):\n  return max(sentence.split(), key=len)",
        "test_list": [
            'assert longest_word("the quick fox") == "quick"',
            'assert longest_word("one two six") == "one"',
            'assert longest_word("a bb") == "bb"',
        ],
    },
    {
        "text": "Write a function to merge two sorted lists into one sorted list.",
        "code": "import heapq\ndef merge_sorted(first, second):\n  return list(heapq.merge(first, second))",
        "test_list": [
            "assert merge_sorted([1, 4], [2, 3]) == [1, 2, 3, 4]",
            "assert merge_sorted([], [7]) == [7]",
            "assert merge_sorted([5, 5], [5]) == [5, 5, 5]",
        ],
    },
)


def items(file: pathlib.Path | None, options: Mapping[str, Any]) -> list[Item]:
    """The programs of a file with the fields ``text``, ``code`` (a right answer) and ``test_list`` (of which three are shown).

    Args:
      file: ``--data``. A field ``test_setup_code`` is run before the tests.
      options: ``allow_code_execution``, which must be True; ``shots``, how many of the three examples come first (3).

    Raises:
      InputError: no leave to run code, an unknown option, or a file that does not fit.
      RunError: code cannot be run here.
    """
    check_options(options, ("shots",), task="mbpp")
    sandbox.require_consent(options.get("allow_code_execution"), task="mbpp")
    shots = whole_number(options, "shots", default=len(EXAMPLES), high=len(EXAMPLES))
    rows = read_rows(file, _FIELDS, task="mbpp")
    start = "".join(f"{_question(example)}{example['code']}\n[DONE]\n\n" for example in EXAMPLES[:shots])
    sandbox.self_check()
    made = []
    for name, row in zip(row_ids(rows, file=file), rows, strict=True):
        setup = row.get("test_setup_code")
        setup = setup if isinstance(setup, str) else ""
        tests = "\n".join([setup, *row["test_list"]])
        # The set-up makes what the tests pass on, often by the code's classes: what it calls counts where they call nothing.
        entry_point = _entry_point(row["code"], "\n".join(row["test_list"])) or _entry_point(row["code"], setup)
        if entry_point is None:
            raise InputError(f"{file}: the tests of row {name} call nothing that its code defines")
        target = {"entry_point": entry_point, "tests": tests, "code": row["code"], "allow_code_execution": True}
        made.append(Item(id=name, prompt=start + _question(row), target=target))
    return made


def score(item: Item, text: str) -> dict[str, float]:
    """``pass@1``, by running all of the item's tests, and the other metrics of HumanEval."""
    name, tests = item.target["entry_point"], item.target["tests"]
    calls = parse(tests)
    program = extract(text, entry_point=name, arguments=positional(calls, name) if calls else None)
    return tested(program, tests, allow_code_execution=item.target.get("allow_code_execution"))


def _question(row: Mapping[str, Any]) -> str:
    tests: Sequence[str] = row["test_list"][:3]
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} Your code should pass these tests:\n\n"
        + "".join(f"{test}\n" for test in tests)
        + "[BEGIN]\n"
    )


def _entry_point(code: str, tests: str) -> str | None:
    """The first name that the tests call and the code gives a value to."""
    given = {name for item in statements(code) for name in item.binds}
    tree = parse(tests)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree else []
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    return next((node.func.id for node in calls if isinstance(node.func, ast.Name) and node.func.id in given), None)


TASK = Task(
    name="mbpp",
    summary="small Python programs from a sentence and three tests, 3 worked examples; pass@1 of one answer",
    version="1",
    items=items,
    score=score,
    needs_data=True,
    stop=("[DONE]",),
    shots=len(EXAMPLES),
    defaults={"shots": len(EXAMPLES)},
    runs_code=True,
    canonical=lambda item: item.target["code"],
)
