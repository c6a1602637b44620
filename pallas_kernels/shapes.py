"""The real shapes kernels meet, by name: tests and benchmarks take them from here."""

from __future__ import annotations

import dataclasses

VOCABULARIES = {"llada": 126_464, "dream": 152_064, "tiny": 416}
DEPTHS = {"llada": 4096, "dream": 3584, "tiny": 128}  # of the rows that the head multiplies
# The mask, and the rows of the table that no token has.
BARRED = {
    "llada": (126_336, *range(126_349, 126_464)),
    "dream": tuple(range(151_666, 152_064)),
    "tiny": (1,),
}
ROWS = (1, 8, 32, 33, 64)  # one position; a small block; a block; a shifted block; two sequences


@dataclasses.dataclass(frozen=True)
class VocabShape:
    """Logits [rows, vocab] of one model, with the ids that must not be chosen."""

    name: str
    rows: int
    vocab: int
    barred: tuple[int, ...]


VOCAB_SCORES = tuple(
    VocabShape(f"{model}-{rows}", rows, vocab, BARRED[model]) for model, vocab in VOCABULARIES.items() for rows in ROWS
)


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Rows [rows, depth] and the head [depth, vocab] of one model, with the ids that must not be chosen."""

    name: str
    rows: int
    depth: int
    vocab: int
    barred: tuple[int, ...]


HEAD_SCORES = tuple(HeadShape(s.name, s.rows, DEPTHS[s.name.split("-")[0]], s.vocab, s.barred) for s in VOCAB_SCORES)


@dataclasses.dataclass(frozen=True)
class WindowShape:
    """A window of hidden states [1, rows, width] of one model, with the clusters it falls into."""

    name: str
    rows: int
    width: int
    clusters: int


WINDOWS = tuple(
    WindowShape(f"{model}-{rows}-{clusters}", rows, width, clusters)
    for model, width in {"llada": 4096, "dream": 3584, "tiny": 64}.items()
    for rows, clusters in ((96, 8), (1, 1), (33, 1024))  # three blocks; a single row; a shifted block
)
