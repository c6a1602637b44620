"""Squares of four rows and columns, some cells given: latin squares, which have several completions, and sudokus with one."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polestar_jax.eval.parallelbench_draws import Draws

SIZE, CELLS = 4, 16
SYMBOLS = {"latin_square": "ABCD", "sudoku": "1234"}
HIDDEN = "_"
_ROWS = tuple(range(i, i + SIZE) for i in range(0, CELLS, SIZE))
_COLUMNS = tuple(range(i, CELLS, SIZE) for i in range(SIZE))
_BOXES = tuple((i, i + 1, i + SIZE, i + SIZE + 1) for i in (0, 2, 8, 10))
_GROUPS = {"latin_square": (*_ROWS, *_COLUMNS), "sudoku": (*_ROWS, *_COLUMNS, *_BOXES)}


def make(kind: str, draws: Draws) -> tuple[str, dict[str, Any]]:
    """A prompt and its target: the given cells row by row, "_" where none is, and under "answer" a completion as text.

    Letters are written with blanks between them and digits without, so that a cell is a token of its own in common vocabularies
    and 20 tokens are enough.
    """
    cells = draws.choice(squares(kind))
    given = (_few_given if kind == "latin_square" else _enough_given)(kind, cells, draws)
    rules = {
        "latin_square": "Each of A, B, C and D stands once in every row and once in every column.",
        "sudoku": "Each of 1, 2, 3 and 4 stands once in every row, every column and every quarter of two rows and two columns.",
    }
    prompt = (
        f"Fill in a square of four rows and four columns. {rules[kind]} Keep the given cells; {HIDDEN} marks those to fill. "
        f"Write the four full rows alone, each on a line of its own.\n\n{_text(kind, given)}"
    )
    return prompt, {"kind": kind, "given": given, "answer": _text(kind, cells)}


def right(target: Mapping[str, Any], text: str) -> bool:
    """Whether the text's square keeps the given cells and follows the rules."""
    kind, given = target["kind"], target["given"]
    cells = read_square(text, SYMBOLS[kind])
    return cells is not None and _keeps(cells, given) and _valid(kind, cells)


def completions(kind: str, given: str) -> list[str]:
    """All squares of the kind that keep the given cells."""
    return [cells for cells in squares(kind) if _keeps(cells, given)]


@functools.cache
def squares(kind: str) -> tuple[str, ...]:
    """All full squares of the kind, each as its 16 cells row by row: 576 latin squares, 288 sudokus."""
    rows = ["".join(row) for row in itertools.permutations(SYMBOLS[kind])]

    def grow(above: str) -> Iterator[str]:
        if len(above) == CELLS:
            yield above
            return
        for row in rows:
            if all(row[i % SIZE] != cell for i, cell in enumerate(above)):
                yield from grow(above + row)

    return tuple(cells for cells in grow("") if _valid(kind, cells))


def _few_given(kind: str, cells: str, draws: Draws) -> str:
    """The first row and one or two cells more, such that at least two completions are left."""
    while True:
        shown = {*range(SIZE), *draws.sample(range(SIZE, CELLS), draws.between(1, 2))}
        given = _hidden_but(cells, shown)
        if len(completions(kind, given)) > 1:
            return given


def _enough_given(kind: str, cells: str, draws: Draws) -> str:
    """Six to eight cells (more where those are not enough) that leave one completion."""
    wanted = draws.between(6, 8)
    shown = set(range(CELLS))
    for cell in draws.shuffled(range(CELLS)):
        if len(shown) > wanted and len(completions(kind, _hidden_but(cells, shown - {cell}))) == 1:
            shown.remove(cell)
    return _hidden_but(cells, shown)


def _hidden_but(cells: str, shown: set[int]) -> str:
    return "".join(cell if i in shown else HIDDEN for i, cell in enumerate(cells))


def _keeps(cells: str, given: str) -> bool:
    return all(cells[i] == cell for i, cell in enumerate(given) if cell != HIDDEN)


def _valid(kind: str, cells: str) -> bool:
    return all(len({cells[i] for i in group}) == SIZE for group in _GROUPS[kind])


def _text(kind: str, cells: str) -> str:
    blank = " " if kind == "latin_square" else ""
    return "\n".join(blank.join(cells[row.start : row.stop]) for row in _ROWS)


def read_square(text: str, symbols: str) -> str | None:
    """The 16 cells of the last full square in a text, or None.

    A square is four lines with four symbols and no other letter or digit each, blank lines between them or not; where there is
    none, 16 symbols with no letter or digit between them. Blanks, commas, bars, quotes and brackets do not count, nor does
    "Row 1:" before a row.
    """
    text = re.sub(r"(?im)^(\W*)row\s*\d+\s*[:.)-]?", r"\1", text.upper())
    rows = [re.sub(r"[\W_]", "", line) for line in text.splitlines()]
    is_row = lambda row: len(row) == SIZE and set(row) <= set(symbols)  # noqa: E731
    stacks = _stacks([row for row in rows if row], is_row)
    squares_ = ["".join(stack) for stack in stacks if len(stack) == SIZE]
    run = rf"(?<![^\W_])[{symbols}](?:[\W_]*[{symbols}])*(?![^\W_])"
    squares_ = squares_ or [
        c for c in (re.sub(r"[\W_]", "", m.group()) for m in re.finditer(run, text)) if len(c) == CELLS
    ]
    return squares_[-1] if squares_ else None


def _stacks(rows: Sequence[str], is_row: Any) -> list[list[str]]:
    """Runs of lines that are rows."""
    return [list(stack) for good, stack in itertools.groupby(rows, is_row) if good]
