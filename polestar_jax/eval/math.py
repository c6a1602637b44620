r"""MATH (arXiv 2103.03874): competition problems whose answer is an expression, judged by the package math-verify.

The prompt has the layout of the Minerva paper (arXiv 2206.14858, appendix D.2), with four examples written for this project;
scores are therefore near, not equal, to those of lm-eval's ``minerva_math``, whose examples are other problems.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from polestar_jax.errors import InputError
from polestar_jax.eval import math_judge
from polestar_jax.eval.localdata import check_options, read_rows, row_ids, whole_number
from polestar_jax.eval.task import Item, Task

EXAMPLES = (
    (
        "A line passes through the points $(1,4)$ and $(3,10)$. What is the $y$-coordinate of its point with $x=7$?",
        r"The slope of the line is $\frac{10-4}{3-1}=3$. From $x=1$ to $x=7$ the value of $y$ grows by $3\cdot 6=18$, so it is "
        r"$4+18=\boxed{22}$.",
        "22",
    ),
    (
        "What is the remainder when $3^{50}$ is divided by $7$?",
        r"Since $3^6=729=7\cdot 104+1$, we have $3^{48}=(3^6)^8\equiv 1\pmod 7$. Hence $3^{50}\equiv 3^2=9\equiv 2\pmod 7$, and "
        r"the remainder is $\boxed{2}$.",
        "2",
    ),
    (
        "A bag holds $4$ red and $6$ blue marbles. Two of them are drawn at random without replacement. What is the "
        "probability that both have the same color? Give a common fraction.",
        r"There are $\binom{10}{2}=45$ equally likely pairs. Of these, $\binom{4}{2}=6$ are red and $\binom{6}{2}=15$ are blue. "
        r"The probability is $\frac{6+15}{45}=\boxed{\frac{7}{15}}$.",
        r"\frac{7}{15}",
    ),
    (
        r"Find all real $x$ with $x^2-5x+4\le 0$. Give the answer as an interval.",
        r"We factor $x^2-5x+4=(x-1)(x-4)$. The product is not positive exactly when $x$ lies between the roots or is one of "
        r"them, so $x\in\boxed{[1,4]}$.",
        "[1,4]",
    ),
)
_STATED = re.compile(r"final answer is\s*:?", re.IGNORECASE)
_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{$][^$\n]*?)\s*(?=\$|\n|\.\s|\.?\Z)")  # without braces: as far as the formula
_FORMULA = re.compile(r"\s*(\$\$.+?\$\$|\\\[.+?\\\])", re.DOTALL)
_SENTENCE = re.compile(r"\s*(.*?)(?:\.(?=\s|$)|\n|$)")


def items(file: pathlib.Path | None, options: Mapping[str, Any]) -> list[Item]:
    r"""The problems of a file with the fields ``problem`` and ``solution``, whose last ``\boxed`` is the answer.

    Args:
      file: ``--data``. A field ``answer`` is taken instead of the solution's; ``type`` or ``subject`` becomes the subset.
      options: ``shots``, how many of the four examples come first (4).

    Raises:
      InputError: math-verify is not installed, an unknown option, or a file that does not fit.
      RunError: math-verify does not work here.
    """
    check_options(options, ("shots",), task="math")
    math_judge.require()
    shots = whole_number(options, "shots", default=len(EXAMPLES), high=len(EXAMPLES))
    rows = read_rows(file, {"problem": str, "solution": str}, task="math")
    start = "".join(
        f"Problem:\n{problem}\n\nSolution: {solution}\nFinal Answer: The final answer is ${answer}$.\n\n"
        for problem, solution, answer in EXAMPLES[:shots]
    )
    math_judge.self_check()
    made = []
    for name, row in zip(row_ids(rows, file=file), rows, strict=True):
        given = row.get("answer")
        target = given if isinstance(given, str) and given.strip() else _last_box(row["solution"])
        if not target:
            raise InputError(rf"{file}: the solution of row {name} has no \boxed answer")
        subset = row.get("type") or row.get("subject")
        prompt = f"{start}Problem:\n{row['problem']}\n\nSolution:"
        made.append(Item(id=name, prompt=prompt, target=target, subset=subset if isinstance(subset, str) else ""))
    return made


def score(item: Item, text: str) -> dict[str, float]:
    """``math_verify``: the answer equals the target; ``answered``: there is an answer."""
    answer = final_answer(text)
    same = answer is not None and (answer == item.target.strip() or math_judge.same(item.target, answer))
    return {"math_verify": float(same), "answered": float(answer is not None)}


def final_answer(text: str) -> str | None:
    r"""What a solution gives as its answer: its last ``\boxed``, or what its last "final answer is" is followed by.

    Of the two the later one counts. A statement ends with its sentence or line; a displayed formula may span lines.

    Returns:
      The answer in LaTeX without the dollar signs, or None where there is neither.
    """
    stated = max((match.end() for match in _STATED.finditer(text)), default=-1)
    box = max((start for start, _ in _boxes(text)), default=-1)
    if box > stated or stated < 0:
        return _last_box(text)
    rest = text[stated:].lstrip(" *")
    found = _FORMULA.match(rest) or _SENTENCE.match(rest)
    answer = re.sub(r"\$|\\[()\[\]]", "", found[1]).strip(" *\n")
    return answer or None


def _last_box(text: str) -> str | None:
    contents = [content.strip() for _, content in sorted(_boxes(text))]
    return (contents or [""])[-1] or None


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    """(start, content) of each box that is closed; braces within are balanced, and escaped ones are text."""
    yield from ((match.start(), match[1]) for match in _BARE_BOX.finditer(text))
    for match in _BOX.finditer(text):
        depth, at = 1, match.end()
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 2 if text[at] == "\\" else 1
        if not depth:
            yield match.start(), text[match.end() : at - 1]


TASK = Task(
    name="math",
    summary=r"competition problems, 4 worked examples; the \boxed answer, judged by math-verify",
    version="1",
    items=items,
    score=score,
    needs_data=True,
    stop=("Problem:",),
    shots=len(EXAMPLES),
    defaults={"shots": len(EXAMPLES)},
    packages=("math-verify", "latex2sympy2_extended", "sympy"),
    canonical=lambda item: f"\\boxed{{{item.target}}}",
)
