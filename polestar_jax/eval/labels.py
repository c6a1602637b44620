"""Names beside points without one covering another: the nearest free place around each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

_SIZE = 8  # of the letters, in points
_SAME = 6  # pixels within which points count as one
# Where a label may stand: distance from its point in letters' heights, nearest first, and direction.
_RADII, _DIRECTIONS = (1.0, 1.6, 2.3, 3.1, 4.0, 5.0, 6.5, 8.5, 11.0, 14.0), 32


def label(
    panel: Any, points: Sequence[tuple[float, float]], names: Sequence[str], colours: Sequence[str], renderer: Any
) -> None:
    """Write a name at every point, each at the nearest free place around it, with a line to it where that is not beside it.

    The names of points that lie on each other stand in one column.

    Args:
      panel: matplotlib axes whose limits and place in the figure will not change any more.
      points: in the axes' data.
      names, colours: of each point.
      renderer: of the figure's canvas; measures texts.
    """
    places = [tuple(panel.transData.transform(point)) for point in points]
    groups: list[list[int]] = []
    for i, place in enumerate(places):
        near = next((group for group in groups if math.dist(places[group[0]], place) <= _SAME), None)
        near.append(i) if near else groups.append([i])
    inside = panel.get_window_extent(renderer)
    taken = [_Box(x - 8, y - 8, x + 8, y + 8) for x, y in places]
    lines: list[_Box] = []
    back = panel.transData.inverted().transform
    crowd = [sum(math.dist(here, there) < 150 for there in places) for here in places]
    for group in sorted(groups, key=lambda group: (-len(group), -crowd[group[0]], -places[group[0]][1])):
        place = places[group[0]]
        texts = [panel.text(0, 0, names[i], fontsize=_SIZE, color=colours[i], va="center", zorder=5) for i in group]
        sizes = [text.get_window_extent(renderer) for text in texts]
        height = max(size.height for size in sizes) + 3
        others = [box for box, at in zip(taken, places, strict=False) if math.dist(at, place) > _SAME]
        crossed = others + taken[len(places) :]
        size = (max(size.width for size in sizes) + 6, height * len(group))
        box, far = _free(place, size, height, [*taken, *lines], crossed, inside)
        _column(texts, box, place, height, back)
        if far:
            ends = back([place, box.nearest(*place)])
            panel.plot(ends[:, 0], ends[:, 1], color=colours[group[0]], linewidth=0.7, alpha=0.8, zorder=2)
            lines += _along(place, box)
        taken.append(box)


def _column(texts: Sequence[Any], box: _Box, place: tuple[float, float], height: float, back: Any) -> None:
    """Put texts below each other into a box, towards its point's side."""
    if box.left >= place[0]:
        side, x = "left", box.left + 3
    elif box.right <= place[0]:
        side, x = "right", box.right - 3
    else:
        side, x = "center", (box.left + box.right) / 2
    for n, text in enumerate(texts):
        text.set_horizontalalignment(side)
        text.set_position(back((x, box.high - (n + 0.5) * height)))
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5})
        text.set_in_layout(False)  # it stays inside the axes


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
    point: tuple[float, float], size: tuple[float, float], gap: float, taken: Sequence[_Box], crossed: Sequence[_Box],
    inside: Any,
) -> tuple[_Box, bool]:  # fmt: skip
    """The nearest box of this size around a point that covers nothing ``taken`` and whose line to the point goes over nothing
    ``crossed``, else the one that does so least; and whether it needs that line. ``gap``: what distances are multiples of."""
    width, height = size
    best: tuple[float, _Box, bool] | None = None
    for ring, radius in enumerate(_RADII):
        for step in range(_DIRECTIONS):
            angle = 2 * math.pi * step / _DIRECTIONS
            x = point[0] + math.cos(angle) * (radius * gap + width / 2)
            y = point[1] + math.sin(angle) * (radius * gap + height / 2)
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
