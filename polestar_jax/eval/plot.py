"""Accuracy against throughput: every run a named point, sweeps as curves, and the runs that no other beats in both."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from polestar_jax import unfinished
from polestar_jax.decoders import variants
from polestar_jax.errors import InputError
from polestar_jax.eval import tables
from polestar_jax.eval.labels import label

FILES = ("pareto.svg", "pareto.png")
_AXES = (("tpf", "tokens per forward pass (TPF)"), ("tps", "tokens per second (TPS), one answer at a time"))
_OURS, _OTHERS = "#C00020", ("#1F4E9C", "#0B7A4B", "#7A3B12", "#5B3FA0", "#8A6D00", "#0B7285", "#444444", "#A0247A")
_MARKERS = "osD^vP*X<>ph"
_FRONT = "0.82"


@dataclasses.dataclass(frozen=True)
class Point:
    """A run in one panel: its key, label, curve (runs of one sweep share it), and place."""

    run: str
    label: str
    curve: str
    x: float
    y: float


def check_available() -> None:
    """InputError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'polestar-jax[plots]'")


def draw(summaries: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Write the plot as SVG and PNG, a column an evaluation, and where one evaluation has sweeps, what they do; the files.

    Raises:
      InputError: no run has both an accuracy and a throughput, or matplotlib is not installed.
    """
    check_available()
    from polestar_jax.eval import plot_sweeps

    figures = {FILES: drawn(summaries)}
    if len(summaries) == 1:
        figures[plot_sweeps.FILES] = plot_sweeps.drawn(summaries[0])
    return [_save(figure, directory / name) for names, figure in figures.items() if figure for name in names]


def drawn(summaries: Sequence[dict[str, Any]]) -> Any:
    """The matplotlib figure; errors as in :func:`draw`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    having = [summary for summary in summaries if points(summary, "tpf")]
    if not having:
        raise InputError("nothing to draw: no run has an accuracy and a throughput above 0 yet")
    axes = [axis for axis in _AXES if any(points(summary, axis[0]) for summary in having)]
    figure = Figure(figsize=(8.6 * len(having), 5.6 * len(axes)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = []
    for line, (axis, meaning) in zip(figure.subplots(len(axes), len(having), squeeze=False), axes, strict=True):
        for panel, summary in zip(line, having, strict=True):
            found, styles = points(summary, axis), _styles(summary)
            panel.set_visible(bool(found))
            if found:
                _fill(panel, found, styles)
                panel.set_xlabel(meaning)
                panel.set_ylabel("accuracy, %")
                panel.set_title(title(summary), loc="left", fontsize=10)
                panels.append((panel, found, styles))
    canvas.draw()  # settles the panels' places, which the labels go by
    for panel, found, styles in panels:
        colours = [styles[point.curve][0] for point in found]
        label(panel, [(point.x, point.y) for point in found], _names(found), colours, canvas.get_renderer())
    return figure


def points(summary: dict[str, Any], axis: str) -> list[Point]:
    """The runs of a summary that have an accuracy and a throughput, "tpf" or "tps", of non-EOS tokens."""
    curves = _curves(run["run"] for run in summary["runs"])
    found = []
    for run in summary["runs"]:
        x, y = run[axis]["non_eos"], tables.accuracy(run)
        if x and y is not None:
            curve = curves[run["run"]]
            label = run["run"] if curve == run["run"] else list(variants.parse_key(run["run"])[1].items())[-1]
            found.append(Point(run["run"], label if isinstance(label, str) else "=".join(label), curve, x, y))
    return found


def front(found: Iterable[Point]) -> list[Point]:
    """The points that no other equals or beats in both directions, from left to right."""
    best, highest = [], -math.inf
    for point in sorted(found, key=lambda point: (-point.x, -point.y)):
        if point.y > highest:
            best.append(point)
            highest = point.y
    return best[::-1]


def _curves(keys: Iterable[str]) -> dict[str, str]:
    """By run, the name of its curve: runs that differ in the value of their last setting alone are one; others their own."""
    keys = list(keys)
    stems = {}
    for key in keys:
        method, settings = variants.parse_key(key)
        *fixed, last = settings.items() if settings else [None]
        stems[key] = f"{variants.run_key(method, dict(fixed))}: {last[0]}" if last else key
    several = [stem for stem, same in itertools.groupby(sorted(stems.values())) if len(list(same)) > 1]
    return {key: stem if stem in several else key for key, stem in stems.items()}


def _styles(summary: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """(colour, marker) by curve: one colour for ``polestar`` and its variants, others in turn, no pair twice."""
    curves = dict.fromkeys(_curves(run["run"] for run in summary["runs"]).values())
    used: dict[str, int] = {}
    styles = {}
    for curve in curves:
        method = curve.partition("[")[0].partition(":")[0]
        colour = _OURS if method == "polestar" else _OTHERS[len(styles) % len(_OTHERS)]
        styles[curve] = (colour, _MARKERS[used.setdefault(colour, 0) % len(_MARKERS)])
        used[colour] += 1
    return styles


def _fill(panel: Any, found: Sequence[Point], styles: dict[str, tuple[str, str]]) -> None:
    """Points, curves and the front; the limits leave room for labels."""
    best = front(found)
    panel.plot([p.x for p in best], [p.y for p in best], color=_FRONT, linewidth=4, zorder=1)
    for curve in dict.fromkeys(point.curve for point in found):
        mine = [point for point in found if point.curve == curve]
        colour, marker = styles[curve]
        xs, ys = [p.x for p in mine], [p.y for p in mine]
        if len(mine) > 1:
            panel.plot(xs, ys, color=colour, linewidth=1.2, zorder=2)
        panel.plot(xs, ys, marker, color=colour, markersize=6.5, markeredgecolor="white", markeredgewidth=0.7, zorder=3)
    xs, ys = [p.x for p in found], [p.y for p in found]
    if max(xs) > 8 * min(xs):
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        room = (max(xs) / min(xs)) ** 0.12
        panel.set_xlim(min(xs) / room, max(xs) * room)
    else:
        room = 0.12 * ((max(xs) - min(xs)) or max(xs))
        panel.set_xlim(max(0, min(xs) - room), max(xs) + room)
    room = 0.14 * max(max(ys) - min(ys), 1.0)
    panel.set_ylim(min(ys) - room, max(ys) + room)
    panel.grid(True, color="0.92", zorder=0)
    panel.spines[["top", "right"]].set_visible(False)


def _names(found: Sequence[Point]) -> list[str]:
    """What stands at each point: a curve's first point names the curve as well."""
    named: set[str] = set()
    names = []
    for point in found:
        first = point.curve != point.run and point.curve not in named
        named.add(point.curve)
        names.append(f"{point.curve.rpartition(': ')[0]}, {point.label}" if first else point.label)
    return names


def title(summary: dict[str, Any]) -> str:
    about = summary["about"]
    return f"task {about['task']['name']}, model {tables.model_name(summary)}, {about['task']['items']} items, {about['dtype']}"


def _save(figure: Any, path: Path) -> Path:
    """The figure under a temporary name, then renamed; the same bytes for the same numbers."""
    import matplotlib

    kind = path.suffix[1:]
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "polestar", "svg.fonttype": "none"}):
        figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    partial = path.with_name(f".{path.name}.partial")
    with unfinished.noted(partial):
        partial.write_bytes(data.getvalue())
        partial.replace(path)
    return path
