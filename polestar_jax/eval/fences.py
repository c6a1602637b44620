"""The code blocks of an answer in Markdown."""

from __future__ import annotations

import dataclasses
import re

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`~]*)[^`~]*$")
_SAME_LINE = re.compile(r"(```+)[ \t]*(\w*)[ \t]+(\S.*?)[ \t]*\1[ \t]*$", re.MULTILINE)
# A block in one of these is no Python; anything else is tried, as models mislabel.
_OTHER_LANGUAGES = frozenset(
    "bash sh shell console text txt output plaintext json yaml markdown md java c cpp javascript".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """A text taken apart.

    Attributes:
      fenced: whether there is a fence at all.
      blocks: the contents of the fenced blocks that may be Python and are not empty, in order.
      outside: the lines outside of every fence.
    """

    fenced: bool
    blocks: tuple[str, ...]
    outside: str


def split(text: str) -> Split:
    """Blocks between lines of three or more backticks or tildes, with or without a language, and the text around them.

    A block that is never closed runs to the end; a fence with a language inside a block closes that and opens its own.

    Args:
      text: with line ends ``\\n``.
    """
    text = _SAME_LINE.sub(r"\1\2\n\3\n\1", text)
    blocks: list[str] = []
    outside: list[str] = []
    mark, lines = "", outside
    kept, fenced = True, False
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if not fence or (mark and (fence[1][0] != mark[0] or len(fence[1]) < len(mark))):
            lines.append(line)
            continue
        fenced = True
        if mark:
            _add(blocks, lines, kept)
        if not mark or fence[2]:
            mark, lines, kept = fence[1], [], fence[2].lower() not in _OTHER_LANGUAGES
        else:
            mark, lines = "", outside
    if mark:
        _add(blocks, lines, kept)
    return Split(fenced=fenced, blocks=tuple(blocks), outside="\n".join(outside))


def _add(blocks: list[str], lines: list[str], kept: bool) -> None:
    if kept and any(line.strip() for line in lines):
        blocks.append("\n".join(lines))
