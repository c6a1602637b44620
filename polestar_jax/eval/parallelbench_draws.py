"""Draws that are the same in every Python version: Python promises that of ``random()`` alone, not of what is built on it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of draws of its own for every seed and name.

    Args:
      seed: a whole number.
      name: what the draws are for; streams of different names have nothing to do with each other.
    """

    def __init__(self, seed: int, name: str):
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def below(self, bound: int) -> int:
        """A whole number in 0..bound - 1; uneven by less than bound / 2^53."""
        return int(self._random.random() * bound)

    def between(self, low: int, high: int) -> int:
        """A whole number in low..high."""
        return low + self.below(high - low + 1)

    def choice(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """The values in a random order (Fisher and Yates)."""
        order = list(values)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def sample(self, values: Sequence[T], count: int) -> list[T]:
        """``count`` different places of the values, in a random order."""
        return self.shuffled(values)[:count]
