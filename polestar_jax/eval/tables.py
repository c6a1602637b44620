"""Summaries as tables: Markdown in the layout of the Polestar paper's (its Table 1), and CSV with everything."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from polestar_jax.decoders.variants import BASELINES

_EMPTY = "-"


def model_name(summary: dict[str, Any]) -> str:
    return PurePath(summary["notes"].get("model") or summary["about"]["model"]["family"]).name


def accuracy(run: dict[str, Any]) -> float | None:
    """The main metric in percent, None before the first answer."""
    first = next(iter(run["metrics"].values()), None)
    return None if first is None else 100 * first


def speedups(summary: dict[str, Any]) -> dict[str, float]:
    """By run, TPS over that of the plain method with the same length; none where it or ``parallel`` was not measured too: a cache
    may well be slower than both."""
    found = {}
    for run in summary["runs"]:
        peers = [peer for peer in summary["runs"] if peer["gen_length"] == run["gen_length"] and peer["tps"]["non_eos"]]
        base = next((peer for peer in peers if peer["method"] == BASELINES[0]), None)
        if run in peers and base and {peer["method"] for peer in peers} >= set(BASELINES):
            found[run["run"]] = run["tps"]["non_eos"] / base["tps"]["non_eos"]
    return found


def markdown(summaries: Sequence[dict[str, Any]]) -> str:
    """All tables, each evaluation's details below the common one."""
    parts = [_comparison(summaries)]
    for summary in summaries:
        parts += [f"### {_benchmark(summary)}, {model_name(summary)}: costs", _costs(summary)]
        if len(summary["about"]["task"]["subsets"]) > 1:
            parts += [f"### {_benchmark(summary)}, {model_name(summary)}: accuracy by subset, %", _by_subset(summary)]
        parts.append(_made_with(summary))
    return "\n\n".join(parts) + "\n"


def _comparison(summaries: Sequence[dict[str, Any]]) -> str:
    """Benchmark, length, method; accuracy, TPF and TPS (speed-up) of each model."""
    models = list(dict.fromkeys(map(model_name, summaries)))
    rows: dict[tuple, dict[str, list[str]]] = {}
    for summary in summaries:
        faster = speedups(summary)
        for run in summary["runs"]:
            times = f" ({faster[run['run']]:.1f}×)" if run["run"] in faster else ""  # noqa: RUF001
            cells = [
                _number(accuracy(run), 2),
                _number(run["tpf"]["non_eos"], 2),
                _number(run["tps"]["non_eos"], 2) + times,
            ]
            if not run["complete"]:
                cells[0] += f" ({run['items']} of {run['items_asked']} items)"
            place = rows.setdefault((_benchmark(summary), run["gen_length"], run["run"]), {})
            place[model_name(summary)] = cells
    of = (lambda model: f"{model}: ") if len(models) > 1 else (lambda model: "")
    head = ["benchmark", "gen len", "method"]
    head += [of(model) + name for model in models for name in ("accuracy, %", "TPF", "TPS")]
    body = [
        [*map(str, key), *(cell for model in models for cell in cells.get(model, [_EMPTY] * 3))]
        for key, cells in rows.items()
    ]
    return table(head, body)


def _costs(summary: dict[str, Any]) -> str:
    """The three forms of TPF and TPS, and what the passes were."""
    head = [
        "method", "TPF all", "TPF non-EOS", "TPF pre-EOS", "TPS all", "TPS non-EOS", "TPS pre-EOS", "timed", "s an answer",
        "NFE", "full", "partial", "refreshes", "rows a pass", "near ties", "repetition", "compile, s",
    ]  # fmt: skip
    others = list(dict.fromkeys(name for run in summary["runs"] for name in list(run["metrics"])[1:]))
    body = []
    for run in summary["runs"]:
        mean = lambda name, run=run: _number(run[name] / run["items"] if run["items"] else None, 1)  # noqa: E731
        body.append(
            [run["run"], *(_number(run["tpf"][form], 2) for form in ("all", "non_eos", "pre_eos"))]
            + [*(_number(run["tps"][form], 1) for form in ("all", "non_eos", "pre_eos")), str(run["timed"]["items"])]
            + [_number(run["timed"]["seconds_mean"], 3), mean("nfe"), mean("full_forwards"), mean("partial_forwards")]
            + [mean("refreshes"), _number(run["rows"] / run["nfe"] if run["nfe"] else None, 1)]
            + [_number(run["near_ties"], 3), _number(run["repetition"], 3), _number(run["timed"]["compile_seconds"], 1)]
            + [_number(100 * run["metrics"][name] if name in run["metrics"] else None, 2) for name in others]
        )
    return table(head + [f"{name}, %" for name in others], body)


def _by_subset(summary: dict[str, Any]) -> str:
    names = list(summary["about"]["task"]["subsets"])
    body = [
        [run["run"], _number(accuracy(run), 1), *(_number(accuracy(run["subsets"][name]), 1) for name in names)]
        for run in summary["runs"]
    ]
    return table(["method", "all", *names], body)


def _made_with(summary: dict[str, Any]) -> str:
    """What the numbers hold for, in a paragraph."""
    about, notes = summary["about"], summary["notes"]
    task, machine = about["task"], about["machine"]
    device = machine.get("cpu") or machine["device"]
    blocks = sorted({run["block_length"] for run in summary["runs"]})
    early = [run["run"] for run in summary["runs"] if run["eos_rule"]["stop_at_eos"]]
    length = f"Decoding stops at an end of text in {', '.join(early)}" if early else "Full-length decoding"
    text = (
        f"Task {task['name']} version {task['version']}, {task['items']} items, {task['shots']} shots, prompt mode "
        f"{about['prompt_mode']}; blocks of {', '.join(map(str, blocks))}; {about['dtype']}, batch {about['batch_size']}; "
        f"{device}, {notes.get('cores', '?')} cores; polestar-jax {about['versions'].get('polestar-jax', '?')}, jax "
        f"{about['versions'].get('jax', '?')}. {length}; text by {about['post_processing']}. TPF and TPS count "
        "non-EOS tokens unless named; TPS is of answers decoded one at a time, compiling and warm-up left out."
    )
    timed = [run for run in summary["runs"] if run["timed"]["items"]]
    if timed and not speedups(summary):
        text += f" No speed-up is given without both {' and '.join(BASELINES)}."
    return text


def comma_separated(summaries: Sequence[dict[str, Any]]) -> str:
    """A row a run, and one for each of its subsets."""
    lists = [(summary, run) for summary in summaries for run in summary["runs"]]
    metrics = list(dict.fromkeys(name for _, run in lists for name in run["metrics"]))
    forms = ("all", "non_eos", "pre_eos")
    plain = ("nfe", "full_forwards", "partial_forwards", "refreshes", "rows", "near_ties", "repetition")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "benchmark",
            "model",
            "gen_length",
            "block_length",
            "method",
            "run",
            "subset",
            "items",
            "accuracy_percent",
            "speedup",
        ]
        + [f"{name}_{form}" for name in ("tpf", "tps", "tokens") for form in forms]
        + [*plain, "timed_items", "timed_seconds", *metrics]
    )
    for summary, run in lists:
        faster = speedups(summary).get(run["run"])
        for name, part in (("all", run), *(item for item in run["subsets"].items() if len(run["subsets"]) > 1)):
            row = [summary["about"]["task"]["name"], model_name(summary), run["gen_length"], run["block_length"]]
            row += [run["method"], run["run"], name, part["items"], accuracy(part), faster if part is run else None]
            row += [part[kind][form] for kind in ("tpf", "tps", "tokens") for form in forms]
            row += [part[field] for field in plain] + [part["timed"]["items"], part["timed"]["seconds"]]
            writer.writerow(row + [part["metrics"].get(metric) for metric in metrics])
    return out.getvalue()


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table of texts."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *body)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    rule = "|" + "|".join("---" for _ in head) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _benchmark(summary: dict[str, Any]) -> str:
    task = summary["about"]["task"]
    return f"{task['name']} ({task['shots']}-shot)" if task["shots"] else task["name"]


def _number(value: float | None, digits: int) -> str:
    return _EMPTY if value is None else f"{value:.{digits}f}"
