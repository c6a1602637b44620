"""The Pareto plot: every run named where it can be read, sweeps as curves, the front; and what there is without matplotlib."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from polestar_jax.decoders import METHODS, variants
from polestar_jax.errors import InputError
from polestar_jax.eval import plot, plot_sweeps


def run(key: str, accuracy: float, tpf: float, tps: float | None = None) -> dict:
    settings = variants.apart({"alpha": "2", "history": "5"} | variants.parse_key(key)[1])
    return {
        "run": key, "method": key.partition("[")[0], "settings": settings, "metrics": {"accuracy": accuracy / 100},
        "tpf": {"non_eos": tpf}, "tps": {"non_eos": tps},
    }  # fmt: skip


def summary(*runs: dict) -> dict:
    about = {"task": {"name": "tiny", "items": 1100}, "dtype": "float32"}
    return {"about": about, "notes": {"model": "tiny"}, "runs": list(runs)}


SWEEP = [run(f"polestar[alpha={alpha}]", 74 + alpha, 1.5 + alpha / 10, 100 + alpha) for alpha in (1, 2, 4)]


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"polestar-jax\[plots\]"):
        plot.draw([summary(run("parallel", 80, 2))], tmp_path)
    from polestar_jax.cli import main

    assert main(["eval", "--task", "tiny", "--out", str(tmp_path / "out"), "--plot"]) == 2
    assert "polestar-jax[plots]" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_front_is_what_no_other_run_beats():
    places = {"vanilla": (90, 1), "parallel": (85, 2), "klass": (84, 1.5), "polestar": (60, 3), "dawn": (85, 1.9)}
    points = plot.points(summary(*(run(name, *place) for name, place in places.items())), "tpf")
    assert [point.run for point in plot.front(points)] == ["vanilla", "parallel", "polestar"]
    assert plot.points(summary(run("vanilla", 90, 1)), "tps") == [], "not timed, not drawn"


def test_runs_of_a_sweep_are_a_curve_and_variants_are_not():
    keys = [
        "polestar", "polestar[alpha=1]", "polestar[alpha=2]", "polestar[history=1,alpha=1]", "polestar[cache=none]",
        "parallel[threshold=0.5]", "parallel[threshold=0.9]",
    ]  # fmt: skip
    curves = {point.run: point.curve for point in plot.points(summary(*(run(key, 80, 1) for key in keys)), "tpf")}
    assert curves["polestar[alpha=1]"] == curves["polestar[alpha=2]"] == "polestar: alpha"
    assert curves["parallel[threshold=0.5]"] == curves["parallel[threshold=0.9]"] == "parallel: threshold"
    single = ("polestar", "polestar[history=1,alpha=1]", "polestar[cache=none]")
    assert all(curves[key] == key for key in single)


def test_joined_settings_are_one_curve():
    keys = [f"polestar[a:b=1:2,window_prefix:window_suffix={value}]" for value in ("16:0", "16:16", "32:16")]
    found = plot.points(summary(*(run(key, 80 + i, 1) for i, key in enumerate(keys))), "tpf")
    assert {point.curve for point in found} == {"polestar[a:b=1:2]: window_prefix:window_suffix"}
    assert plot._names(found)[0] == "polestar[a:b=1:2], window_prefix:window_suffix=16:0"
    assert plot._names(found)[1] == "window_prefix:window_suffix=16:16"


@pytest.fixture(scope="module")
def crowded():
    """All methods in one corner and in two heaps, and a sweep."""
    pytest.importorskip("matplotlib")
    heap = [run(name, 80 + 0.1 * (i % 3), 1.5 + 0.02 * (i % 4), 100 + i) for i, name in enumerate(METHODS)]
    return plot.drawn([summary(*heap, *SWEEP)])


def test_every_run_is_named_and_no_name_covers_another(crowded):
    renderer = crowded.canvas.get_renderer()
    tpf, tps = crowded.axes
    for panel in (tpf, tps):
        texts = {text.get_text(): text.get_window_extent(renderer) for text in panel.texts}
        assert set(texts) == {*METHODS, "polestar, alpha=1", "alpha=2", "alpha=4"}
        inside = panel.get_window_extent(renderer)
        for name, box in texts.items():
            assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1, name
        for (one, a), (other, b) in itertools.combinations(texts.items(), 2):
            width = min(a.x1, b.x1) - max(a.x0, b.x0)
            height = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert width <= 0 or height <= 0, (one, other)


def test_a_sweep_is_drawn_as_one_line_through_its_points(crowded):
    lines = [line for line in crowded.axes[0].lines if len(line.get_xdata()) == 3 and line.get_linestyle() == "-"]
    assert any(list(line.get_xdata()) == [1.6, 1.7, 1.9] and list(line.get_ydata()) == [75, 76, 78] for line in lines)


def test_files_hold_every_name_and_are_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    found = [summary(run("vanilla", 90, 1, 10), run("parallel", 85, 2, 200), *SWEEP)]
    paths = plot.draw(found, tmp_path)
    assert [path.name for path in paths] == ["pareto.svg", "pareto.png", "sweeps.svg", "sweeps.png"]
    assert sorted(paths) == sorted(tmp_path.iterdir())
    text, image, sweeps, _ = files = [path.read_bytes() for path in paths]
    assert all(
        name.encode() in text for name in ("vanilla", "parallel", "polestar, alpha=1", "alpha=4", "tokens per second")
    )
    assert image.startswith(b"\x89PNG") and b"polestar: alpha" in sweeps
    assert [path.read_bytes() for path in plot.draw(found, tmp_path)] == files
    assert len(plot.draw(found[:1] * 2, tmp_path)) == 2, "of several evaluations the one plot"


def test_a_panel_a_sweep_with_accuracy_and_tpf_over_the_values():
    pytest.importorskip("matplotlib")
    histories = [run(f"polestar[history={history}]", 76 - history, 1.9, None) for history in (0, 5)]
    figure = plot_sweeps.drawn(summary(run("vanilla", 90, 1), *SWEEP, *histories))
    alpha, history, *rest = (panel for panel in figure.axes if panel.get_visible())
    assert (alpha.get_title("left"), history.get_title("left")) == ("polestar: alpha", "polestar: history")
    assert [text.get_text() for text in alpha.get_xticklabels()] == ["1", "2", "4"]
    accuracy, star = alpha.lines
    assert list(accuracy.get_ydata()) == [75, 76, 78] and alpha.get_ylim() == history.get_ylim()
    assert list(star.get_xdata()) == [1] and list(history.lines[1].get_xdata()) == [1], "the settings of both sweeps"
    assert [list(panel.lines[0].get_ydata()) for panel in rest] == [[1.6, 1.7, 1.9], [1.9, 1.9]]
    assert plot_sweeps.drawn(summary(run("vanilla", 90, 1))) is None


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="nothing to draw"):
        plot.draw([summary(run("vanilla", 90, 1) | {"metrics": {}})], tmp_path)
    assert not any(tmp_path.iterdir())
