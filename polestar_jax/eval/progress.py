"""Where an evaluation stands, on standard error."""

from __future__ import annotations

import sys
import time


class Progress:
    """Lines on standard error: where it stands, and how long the rest takes at the pace so far."""

    def __init__(self, left: dict[tuple[str, bool], int]):
        self._left = dict(left)
        self._total = dict(left)
        self._rates: dict[bool, list[float]] = {False: [0.0, 0.0], True: [0.0, 0.0]}
        self._since = self._said = time.monotonic()

    def __call__(self, run: str, timed: bool, count: int) -> None:
        now = time.monotonic()
        self._rates[timed][0] += now - self._since
        self._rates[timed][1] += count
        self._since = now
        self._left[run, timed] -= count
        if self._left[run, timed] and now - self._said < 2:
            return
        self._said = now
        total = self._total[run, timed]
        what = "timed answers" if timed else "answers"
        line = f"{run}: {total - self._left[run, timed]}/{total} {what}, about {_spoken(self.remaining())} left in all"
        print(line, file=sys.stderr, flush=True)

    def ended(self, run: str) -> None:
        """Of a run that could not be finished nothing is left, either."""
        self._left |= {(run, timed): 0 for timed in (False, True)}

    def remaining(self) -> float:
        """Seconds; a kind of answer that has not been seen is taken to cost what the other does."""
        seen = [rate for rate in self._rates.values() if rate[1]]
        pace = {kind: (rate if rate[1] else seen[0]) for kind, rate in self._rates.items()} if seen else {}
        return sum(count * pace[timed][0] / pace[timed][1] for (_, timed), count in self._left.items() if count)


def _spoken(seconds: float) -> str:
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    return f"{round(whole / 60)} min" if whole < 5400 else f"{whole // 3600} h {whole % 3600 // 60:02} min"
