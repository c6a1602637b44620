"""Names beside points without one covering another: the nearest free place around each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

_SIZE = 8  # of the letters, in points
# Where a label may stand: distance from its point in label heights, nearest first, and direction.
_RADII, _DIRECTIONS = (1.0, 1.6, 2.3, 3.1, 4.0, 5.0, 6.5, 8.5, 11.0, 14.0), 32


def label(
    panel: Any, points: Sequence[tuple[float, float]], names: Sequence[str], colours: Sequence[str], renderer: Any
) -> None:
    """Write a name at every point, each at the nearest free place around it, with a line to it where that is not beside it.

    Args:
      panel: matplotlib axes whose limits and place in the figure will not change any more.
      points: in the axes' data.
      names, colours: of each point.
      renderer: of the figure's canvas; measures texts.
    """
    places = [tuple(panel.transData.transform(point)) for point in points]
    inside = panel.get_window_extent(renderer)
    taken = [_Box(x - 8, y - 8, x + 8, y + 8) for x, y in places]
    lines: list[_Box] = []
    back = panel.transData.inverted().transform
    crowd = [sum(math.dist(here, there) < 150 for there in places) for here in places]
    for place in sorted(range(len(points)), key=lambda i: (-crowd[i], -places[i][1])):
        colour = colours[place]
        text = panel.text(0, 0, names[place], fontsize=_SIZE, color=colour, ha="center", va="center", zorder=5)
        size = text.get_window_extent(renderer)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5})
        text.set_in_layout(False)  # it stays inside the axes
        own = taken[place]
        box, far = _free(
            places[place], size.width + 6, size.height + 3, [*taken, *lines], [b for b in taken if b != own], inside
        )
        text.set_position(back(((box.left + box.right) / 2, (box.low + box.high) / 2)))
        if far:
            ends = back([places[place], box.nearest(*places[place])])
            panel.plot(ends[:, 0], ends[:, 1], color=colour, linewidth=0.7, alpha=0.8, zorder=2)
            lines += _along(places[place], box)
        taken.append(box)


@dataclasses.dataclass(frozen=True)
class _Box:
    left: float
    low: float
    right: float
    high: float

    def overlap(self, other: _Box) -> float:
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.high, other.high) - max(self.low, other.low)
        return width * height if width > 0 and height > 0 else 0.0

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        return min(max(x, self.left), self.right), min(max(y, self.low), self.high)


def _free(
    point: tuple[float, float], width: float, height: float, taken: Sequence[_Box], crossed: Sequence[_Box], inside: Any
) -> tuple[_Box, bool]:
    """The nearest box of this size around a point that covers nothing ``taken`` and whose line to the point goes over nothing
    ``crossed``, else the one that does so least; and whether it needs that line."""
    best: tuple[float, _Box, bool] | None = None
    for ring, radius in enumerate(_RADII):
        for step in range(_DIRECTIONS):
            angle = 2 * math.pi * step / _DIRECTIONS
            x = point[0] + math.cos(angle) * (radius * height + width / 2)
            y = point[1] + math.sin(angle) * (radius * height + height / 2)
            box = _Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            outside = box.left < inside.x0 or box.right > inside.x1 or box.low < inside.y0 or box.high > inside.y1
            covered = sum(map(box.overlap, taken)) + (width * height if outside else 0)
            if ring and covered == 0:
                covered = sum(part.overlap(other) for part in _along(point, box) for other in crossed)
            if best is None or covered < best[0]:
                best = (covered, box, ring > 0)
            if covered == 0:
                return box, ring > 0
    return best[1:]


def _along(point: tuple[float, float], box: _Box) -> list[_Box]:
    """Small boxes along the line from a point to a box."""
    end = box.nearest(*point)
    count = max(2, int(math.dist(point, end) / 5))
    steps = [
        (point[0] + (end[0] - point[0]) * i / count, point[1] + (end[1] - point[1]) * i / count) for i in range(count)
    ]
    return [_Box(x - 1.5, y - 1.5, x + 1.5, y + 1.5) for x, y in steps]
