"""Summaries as tables: Markdown in the layout of the Polestar paper's (its Table 1), and CSV with everything."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from polestar_jax.decoders import variants

_EMPTY = "-"


def model_name(summary: dict[str, Any]) -> str:
    """The last part of the model's path; of a snapshot in the hub's cache, the model's name there."""
    path = PurePath(summary["notes"].get("model") or summary["about"]["model"]["family"])
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def names(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each evaluation: its model's; of several of one benchmark and model, with what tells them apart."""
    keys = [(_benchmark(summary), model_name(summary)) for summary in summaries]
    details = [
        {
            "prompts": about["prompt_mode"], "dtype": about["dtype"], "batch": about["batch_size"],
            "items": about["task"]["items"], "text": about["post_processing"], "seed": about["seed"],
            "weights": about["model"]["weights"], "options": json.dumps(about["task"]["options"]),
        }
        for about in (summary["about"] for summary in summaries)
    ]  # fmt: skip
    found = []
    for i, key in enumerate(keys):
        alike = [j for j, other in enumerate(keys) if other == key]
        differ = [name for name in details[i] if len({details[j][name] for j in alike}) > 1]
        told = [f"{name} {details[i][name]}" for name in differ]
        same = [j for j in alike if all(details[j][name] == details[i][name] for name in differ)]
        told += [f"no. {same.index(i) + 1}"] if len(same) > 1 else []
        found.append(key[1] + (f" ({', '.join(told)})" if told else ""))
    return found


def accuracy(run: dict[str, Any]) -> float | None:
    """The main metric in percent, None before the first answer."""
    first = next(iter(run["metrics"].values()), None)
    return None if first is None else 100 * first


def speedups(summary: dict[str, Any]) -> dict[str, float]:
    """By run, TPS over that of the plain method with the same length; none where it or ``parallel``, as they are by
    default, was not timed on the same items: a cache may well be slower than both."""
    found = {}
    for run in summary["runs"]:
        alike = lambda peer, run=run: (  # noqa: E731
            peer["tps"]["non_eos"] and peer["gen_length"] == run["gen_length"]
            and peer["timed"]["digest"] == run["timed"]["digest"]
        )  # fmt: skip
        bases = [
            [
                peer
                for peer in summary["runs"]
                if alike(peer) and variants.is_baseline(name, peer["method"], peer["settings"])
            ]
            for name in variants.BASELINES
        ]
        if run["tps"]["non_eos"] and all(bases):
            plain = next((peer for peer in bases[0] if peer["block_length"] == run["block_length"]), bases[0][0])
            found[run["run"]] = run["tps"]["non_eos"] / plain["tps"]["non_eos"]
    return found


def markdown(summaries: Sequence[dict[str, Any]]) -> str:
    """All tables, each evaluation's details below the common one."""
    parts = [_comparison(summaries)]
    for summary, name in zip(summaries, names(summaries), strict=True):
        parts += [f"### {_benchmark(summary)}, {name}: costs of an answer", _costs(summary)]
        parts += [f"### {_benchmark(summary)}, {name}: tokens counted in three ways", _counted(summary)]
        if len(summary["about"]["task"]["subsets"]) > 1:
            parts += [f"### {_benchmark(summary)}, {name}: accuracy by subset, %", _by_subset(summary)]
        parts.append(_made_with(summary))
    return "\n\n".join(parts) + "\n"


def _comparison(summaries: Sequence[dict[str, Any]]) -> str:
    """Benchmark, length, method; accuracy, TPF and TPS (speed-up) of each model."""
    named = names(summaries)
    models = list(dict.fromkeys(named))
    rows: dict[tuple, dict[str, list[str]]] = {}
    for summary, name in zip(summaries, named, strict=True):
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
            place[name] = cells
    of = (lambda model: f"{model}: ") if len(models) > 1 else (lambda model: "")
    head = ["benchmark", "gen len", "method"]
    head += [of(model) + name for model in models for name in ("accuracy, %", "TPF", "TPS")]
    body = [
        [*map(str, key), *(cell for model in models for cell in cells.get(model, [_EMPTY] * 3))]
        for key, cells in rows.items()
    ]
    return table(head, body)


def _costs(summary: dict[str, Any]) -> str:
    """What an answer took on average, and what stands beside its score."""
    head = "method|NFE|full|partial|refreshes|rows a pass|s an answer|compile, s|near ties|repetition".split("|")
    others = list(dict.fromkeys(name for run in summary["runs"] for name in list(run["metrics"])[1:]))
    body = []
    for run in summary["runs"]:
        mean = lambda name, run=run: _number(run[name] / run["items"] if run["items"] else None, 1)  # noqa: E731
        body.append(
            [run["run"], *map(mean, ("nfe", "full_forwards", "partial_forwards", "refreshes"))]
            + [_number(run["rows"] / run["nfe"] if run["nfe"] else None, 1), _number(run["timed"]["seconds_mean"], 3)]
            + [_number(run["timed"]["compile_seconds"], 1), _number(run["near_ties"], 3), _number(run["repetition"], 3)]
            + [_number(100 * run["metrics"][name] if name in run["metrics"] else None, 2) for name in others]
        )
    return table(head + [f"{name}, %" for name in others], body)


def _counted(summary: dict[str, Any]) -> str:
    """TPF and TPS in the three forms that papers count tokens in, and of how many answers the latter are."""
    forms = {"all": "all", "non_eos": "non-EOS", "pre_eos": "pre-EOS"}
    head = ["method", *(f"{rate} {name}" for rate in ("TPF", "TPS") for name in forms.values()), "timed"]
    body = []
    for run in summary["runs"]:
        tpf, tps = ([_number(run[rate][form], digits) for form in forms] for rate, digits in (("tpf", 2), ("tps", 1)))
        body.append([run["run"], *tpf, *tps, str(run["timed"]["items"])])
    return table(head, body)


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
        text += f" No speed-up is given without both {' and '.join(variants.BASELINES)}."
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
            "prompt_mode",
            "dtype",
            "batch_size",
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
    named = {id(summary): name for summary, name in zip(summaries, names(summaries), strict=True)}
    for summary, run in lists:
        about, faster = summary["about"], speedups(summary).get(run["run"])
        for name, part in (("all", run), *(item for item in run["subsets"].items() if len(run["subsets"]) > 1)):
            row = [about["task"]["name"], named[id(summary)], about["prompt_mode"], about["dtype"], about["batch_size"]]
            row += [run["gen_length"], run["block_length"]]
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
