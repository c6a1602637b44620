"""GSM8K (arXiv 2110.14168): word problems whose answer is a number, asked with worked examples.

Prompt, stop strings and both ways to read the answer are those of lm-eval 0.4.8's ``gsm8k``, version 3. So are the examples:
drawn anew for each question, in the file's order, from one generator, hence the same ones given the same two files and seed.
"""

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polestar_jax.errors import InputError
from polestar_jax.eval.localdata import check_options, read_rows, row_ids, whole_number
from polestar_jax.eval.task import Item, Task

SHOTS, SEED = 5, 1234
_FIELDS = {"question": str, "answer": str}
# A run of two or more of these characters, or one digit. A run without digits ("...") counts too: lm-eval takes it.
_NUMBER = re.compile(r"-?(?:[$0-9.,]{2,}|[0-9])")
_MARKED = re.compile(r"#### (-?[0-9.,]+)")


def items(file: pathlib.Path | None, options: Mapping[str, Any]) -> list[Item]:
    """The questions of a file with the fields ``question`` and ``answer`` (which ends with ``#### `` and the number).

    Args:
      file: ``--data``.
      options: ``shots``, how many examples (5); ``shots_file``, a second file of the same fields to draw them from, needed
        unless ``shots`` is 0; ``seed`` of the draw (1234).

    Raises:
      InputError: an unknown option, no examples to draw from, or a file that does not fit.
    """
    check_options(options, ("shots", "shots_file", "seed"), task="gsm8k")
    shots = whole_number(options, "shots", default=SHOTS, high=64)
    rows = read_rows(file, _FIELDS, task="gsm8k")
    seed = whole_number(options, "seed", default=SEED, high=2**32 - 1)
    drawn = _draw(rows, file, options.get("shots_file"), shots=shots, seed=seed)
    names = row_ids(rows, file=file)
    made = []
    for name, row, examples in zip(names, rows, drawn, strict=True):
        parts = [f"Question: {example['question']}\nAnswer: {example['answer']}\n\n" for example in examples]
        target = _comparable(row["answer"].rpartition("#### ")[2])
        if not _NUMBER.fullmatch(target):
            raise InputError(f"{file}: the answer of row {name} does not end with '#### ' and a number")
        made.append(Item(id=name, prompt=f"{''.join(parts)}Question: {row['question']}\nAnswer:", target=target))
    return made


def score(item: Item, text: str) -> dict[str, float]:
    """``flexible``: the last number of the text is the target; ``strict``: the number after the first ``####`` is."""
    numbers, marked = _NUMBER.findall(text), _MARKED.findall(text)
    return {
        "flexible": float(bool(numbers) and _comparable(numbers[-1]) == item.target),
        "strict": float(bool(marked) and _comparable(marked[0]) == item.target),
    }


def _comparable(number: str) -> str:
    """Numbers are compared as texts, without commas, dollar signs and a last full stop: 18 and 18.0 differ."""
    return number.strip().replace(",", "").replace("$", "").removesuffix(".")


def _draw(
    rows: Sequence[dict[str, Any]], file: pathlib.Path, source: str | None, *, shots: int, seed: int
) -> list[list[dict[str, Any]]]:
    """Each row's examples; a row is never an example of its own question."""
    if shots == 0:
        return [[] for _ in rows]
    if source is None:
        raise InputError(
            f"gsm8k: {shots} shots need shots_file=F.jsonl to draw them from (fields question, answer); shots=0 asks without"
        )
    examples = read_rows(source, _FIELDS, task="gsm8k")
    spare = int(pathlib.Path(source).resolve() == pathlib.Path(file).resolve())
    if len(examples) < shots + spare:
        raise InputError(f"{source}: holds {len(examples)} rows; shots={shots} needs {shots + spare}")
    generator = random.Random(seed)
    return [[shot for shot in generator.sample(examples, shots + spare) if shot != row][:shots] for row in rows]


TASK = Task(
    name="gsm8k",
    summary="grade-school word problems, 5 worked examples; last number, and number after ####",
    version="1",
    items=items,
    score=score,
    needs_data=True,
    stop=("Question:", "</s>", "<|im_end|>"),
    shots=SHOTS,
    defaults={"shots": SHOTS, "seed": SEED},
    canonical=lambda item: f"#### {item.target}",
)
