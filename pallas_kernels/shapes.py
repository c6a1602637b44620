"""The real shapes kernels meet, by name: tests and benchmarks take them from here."""

from __future__ import annotations

import dataclasses

VOCABULARIES = {"llada": 126_464, "dream": 152_064, "tiny": 416}
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
