"""Waiting lines: a line of people and one change to it; the answer is the line after the change."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polestar_jax.eval.parallelbench_draws import Draws

NAMES = (
    "Alice Amy Ben Bob Carl Clara Dan David Emma Eric Fiona Frank George Grace Henry Helen Ivan Jack Jane Julia "
    "Kate Kevin Laura Leo Lucy Maria Mark Nick Nina Oscar Paul Peter Rosa Ruth Sam Sara Tina Tom Victor Wendy"
).split()
SHORTEST, LONGEST = 4, 7


class Change(NamedTuple):
    """One change.

    Attributes:
      words: what the prompt says; ``{new}`` is a person who joins, ``{number}`` a place counted from 1.
      after: (line, place, new, draws) -> a right answer.
      accepts: (answer, line, new) -> whether the answer is right; None where ``after`` is the only one.
      places: (length of the line) -> how many places ``{number}`` may name, from the first.
    """

    words: str
    after: Callable[[list[str], int, str, Draws], list[str]]
    accepts: Callable[[list[str], list[str], str], bool] | None = None
    places: Callable[[int], int] = lambda length: length


def _another_order(line: list[str], draws: Draws) -> list[str]:
    order = list(line)
    while order == line:
        order = draws.shuffled(line)
    return order


def _inserted(line: Sequence[str], place: int, new: str) -> list[str]:
    return [*line[:place], new, *line[place:]]


def _removed(line: Sequence[str], place: int) -> list[str]:
    return [*line[:place], *line[place + 1 :]]


def _replaced(line: Sequence[str], place: int, new: str) -> list[str]:
    return [*line[:place], new, *line[place + 1 :]]


CHANGES = {
    "copy": Change("none; write the line as it is", lambda line, place, new, draws: list(line)),
    "reverse": Change(
        "all turn round, so that the last person is now the first", lambda line, place, new, draws: line[::-1]
    ),
    "sort": Change("all stand in alphabetical order", lambda line, place, new, draws: sorted(line)),
    "shuffle": Change(
        "the same people stand in another order, whichever you like",
        lambda line, place, new, draws: _another_order(line, draws),
        lambda answer, line, new: Counter(answer) == Counter(line) and answer != line,
    ),
    "insert_index": Change(
        "{new} joins and is now number {number} of the line",
        lambda line, place, new, draws: _inserted(line, place, new),
        places=lambda length: length + 1,
    ),
    "insert_random": Change(
        "{new} joins, at whichever place you like",
        lambda line, place, new, draws: _inserted(line, draws.below(len(line) + 1), new),
        lambda answer, line, new: any(answer == _inserted(line, i, new) for i in range(len(line) + 1)),
    ),
    "remove_index": Change("person number {number} leaves", lambda line, place, new, draws: _removed(line, place)),
    "remove_random": Change(
        "one person leaves, whichever you like",
        lambda line, place, new, draws: _removed(line, draws.below(len(line))),
        lambda answer, line, new: any(answer == _removed(line, i) for i in range(len(line))),
    ),
    "replace_index": Change(
        "{new} takes the place of person number {number}",
        lambda line, place, new, draws: _replaced(line, place, new),
    ),
    "replace_random": Change(
        "{new} takes the place of one person, whichever you like",
        lambda line, place, new, draws: _replaced(line, draws.below(len(line)), new),
        lambda answer, line, new: any(answer == _replaced(line, i, new) for i in range(len(line))),
    ),
}


def make(name: str, draws: Draws, example: str) -> tuple[str, dict[str, Any]]:
    """A prompt and its target: the line, the change, who joins (or ""), and under "answer" a right answer as text.

    Args:
      name: of the change.
      draws: what the line is drawn from.
      example: the solved example that the prompt shows, from :func:`example`.
    """
    question, target = _question(name, draws)
    lead = (
        "A line of people is given, from the first to the last, and a change to it. Write the line after the change: "
        "the names alone, in order, separated by commas."
    )
    return f"{lead}\n\n{example}\n\n{question}", target


def example(name: str, draws: Draws) -> str:
    """A solved question about the change."""
    question, target = _question(name, draws)
    return f"{question} {target['answer']}"


def _question(name: str, draws: Draws) -> tuple[str, dict[str, Any]]:
    change = CHANGES[name]
    line = draws.sample(NAMES, draws.between(SHORTEST, LONGEST) + 1)
    new = line.pop()
    place = draws.below(change.places(len(line)))
    answer = change.after(line, place, new, draws)
    words = change.words.format(new=new, number=place + 1)
    target = {"change": name, "line": line, "new": new if "{new}" in change.words else "", "answer": ", ".join(answer)}
    return f"Line: {', '.join(line)}\nChange: {words}\nNew line:", target


def right(target: Mapping[str, Any], text: str) -> bool:
    """Whether the text's line is a right answer; capitals do not matter."""
    fold = lambda names: [name.casefold() for name in names]  # noqa: E731
    answer, accepts = fold(read_line(text)), CHANGES[target["change"]].accepts
    if accepts is None:
        return answer == fold(target["answer"].split(", "))
    return accepts(answer, fold(target["line"]), target["new"].casefold())


_KNOWN = frozenset(name.casefold() for name in NAMES)
_NUMBERING = re.compile(r"(?:^|(?<=\s))(?:\d+[.)]|[-*•])\s+", re.MULTILINE)
_BORDER = re.compile(r"[.:!?()\[\]{}]")
_SEPARATOR = re.compile(r"(?:[,;/|>→]|->|\band\b)+", re.IGNORECASE)
_WRAPPING = " \t\"'`*_-\u201c\u201d\u2018\u2019\u00ab\u00bb"  # quotes, straight and curly, and marks of Markdown


def read_line(text: str) -> list[str]:
    """The names of the last line of people in a text: two or more items between separators, at least one a known name.

    Separators are commas, semicolons, line breaks, arrows and "and", or blanks between known names; quotes, brackets, numbers
    before names and marks of Markdown do not count. Names that are not known are kept, so that an invented person makes an
    answer wrong; several words that are no names are prose, which ends a line and may begin another ("the line is Amy, Bob").
    """
    lines: list[list[str]] = []
    for stretch in _BORDER.split(_NUMBERING.sub("\n", text)):
        lines.append([])
        for row in stretch.splitlines():
            for place, piece in enumerate(_SEPARATOR.split(row)):
                before, after = _names(piece)
                # "Dan are in line" goes on with the line before a comma, but not with the one in the row above.
                lines[-1] += before if place or after is None else []
                if after is not None:
                    lines.append(after)
    return next((line for line in reversed(lines) if len(line) > 1 and any(map(_known, line))), [])


def _known(word: str) -> bool:
    return word.casefold() in _KNOWN


def _names(piece: str) -> tuple[list[str], list[str] | None]:
    """The names of what stands between two separators: all, None; or, of prose, those it begins with, those it ends with."""
    words = [word for word in (part.strip(_WRAPPING) for part in piece.split()) if word]
    if len(words) < 2 or all(map(_known, words)):
        return words, None
    if len(words) < 4 and all(word[0].isupper() for word in words):
        return [" ".join(words)], None  # a person with two names
    before = list(itertools.takewhile(_known, words))
    return before, list(itertools.takewhile(_known, reversed(words)))[::-1]
