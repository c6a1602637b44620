"""What a setting does: a panel a sweep, with accuracy and tokens per forward pass over the setting's values."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

from polestar_jax.eval import plot

FILES = ("sweeps.svg", "sweeps.png")
_ACROSS, _ROOM = 3, 0.15
_ACCURACY, _TPF = "#C00020", "#1F4E9C"


def curves(summary: dict[str, Any]) -> dict[str, list[plot.Point]]:
    """The sweeps of a summary by name, such as ``polestar: alpha``, with their runs in order."""
    found: dict[str, list[plot.Point]] = {}
    for point in plot.points(summary, "tpf"):
        if point.curve != point.run:
            found.setdefault(point.curve, []).append(point)
    return found


def drawn(summary: dict[str, Any]) -> Any | None:
    """The matplotlib figure; None where nothing was swept. All panels have the same two scales; stars mark the settings that
    several sweeps have in common, which are the defaults."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = curves(summary)
    if not found:
        return None
    across = min(_ACROSS, len(found))
    down = math.ceil(len(found) / across)
    figure = Figure(figsize=(4.2 * across, 2.7 * down), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    points = [point for curve in found.values() for point in curve]
    limits = [_limits([point.y for point in points]), _limits([point.x for point in points])]
    common = _common(summary, found)
    panels = figure.subplots(down, across, squeeze=False).flat
    for panel, name in itertools.zip_longest(panels, found):
        panel.set_visible(name is not None)
        if name is not None:
            _fill(panel, name, found[name], limits, common)
    figure.suptitle(plot.title(summary), x=0.01, ha="left", fontsize=10)
    return figure


def _fill(
    panel: Any, name: str, curve: Sequence[plot.Point], limits: Sequence[tuple[float, float]], common: set[str]
) -> None:
    places = range(len(curve))
    other = panel.twinx()
    sides = ((panel, _ACCURACY, [point.y for point in curve]), (other, _TPF, [point.x for point in curve]))
    for (axes, colour, values), limit, what in zip(sides, limits, ("accuracy, %", "TPF"), strict=True):
        axes.plot(places, values, "o-", color=colour, linewidth=1.3, markersize=4)
        starred = [i for i in places if curve[i].run in common]
        axes.plot(starred, [values[i] for i in starred], "*", color=colour, markersize=11)
        axes.set_ylim(*limit)
        axes.set_ylabel(what, color=colour, fontsize=8)
        axes.tick_params(axis="y", labelsize=7, colors=colour)
        axes.spines["top"].set_visible(False)
    panel.set_xticks(places, [point.label.partition("=")[2] for point in curve], fontsize=7)
    panel.set_xlim(-0.3, len(curve) - 0.7)
    panel.grid(True, axis="y", color="0.92", zorder=0)
    panel.set_title(name, loc="left", fontsize=8)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    room = _ROOM * ((max(values) - min(values)) or 1.0)
    return min(values) - room, max(values) + room


def _common(summary: dict[str, Any], found: dict[str, list[plot.Point]]) -> set[str]:
    """Runs whose settings runs of other sweeps have, too."""
    settings = {run["run"]: json.dumps(run["settings"], sort_keys=True) for run in summary["runs"]}
    owners: dict[str, set[str]] = {}
    for name, curve in found.items():
        for point in curve:
            owners.setdefault(settings[point.run], set()).add(name)
    return {point.run for curve in found.values() for point in curve if len(owners[settings[point.run]]) > 1}
