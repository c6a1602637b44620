"""From answers to the numbers that are reported: sums over items, divided at the end."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polestar_jax.eval.records import Line, Record, locked, replace
from polestar_jax.eval.tables import comma_separated, markdown

COUNTS = ("all", "non_eos", "pre_eos")  # every position; neither end of text nor of turn; before the first of those
SUMMARY = ("summary.json", "summary.md", "summary.csv")
Summary = dict[str, Any]


def summarise(record: Record, lines: Sequence[Line]) -> Summary:
    """The summary of an evaluation, as JSON: ``about`` and ``notes`` of its record, and its ``runs`` with their numbers.

    A run is complete when every item has its answer, and as many as the notes say are timed.

    Of each run: ``items`` answered of ``items_asked``, metrics (means), tokens counted in three forms, TPF and TPS in the same
    forms (tokens of all items over their passes; tokens over seconds, both of the timed answers alone, None without any), passes
    by kind, and the same by subset.
    """
    about = record.about
    batch_of_one = about["batch_size"] == 1
    runs = []
    for key, own in record.runs.items():
        mine = sorted((line for line in lines if line["run"] == key), key=lambda line: line["place"])
        answers = [line for line in mine if not line["timed"]]
        timed = answers if batch_of_one else [line for line in mine if line["timed"]]
        tokens = {line["place"]: line["tokens"] for line in answers}
        alike = sum(tokens.get(line["place"]) == line["tokens"] for line in timed)
        subsets = about["task"]["subsets"]
        numbers = _numbers(answers, timed)
        numbers["timed"] |= {"same_tokens": alike, "compile_seconds": sum(line["compile_seconds"] for line in mine)}
        whole = len(answers) == about["task"]["items"] and len(timed) >= record.notes.get("timed", 0)
        runs.append(
            {"run": key, "complete": whole, "items_asked": about["task"]["items"]}
            | numbers
            | {
                "subsets": {
                    name: {"items_asked": count}
                    | _numbers(*([line for line in part if line["subset"] == name] for part in (answers, timed)))
                    for name, count in subsets.items()
                }
            }
            | own
        )
    return {
        "complete": all(run["complete"] for run in runs),
        "tokens_counted": "non_eos: generated tokens that are neither end of text nor end of turn; pre_eos: those before the "
        "first of these; all: every position; sums over items, then divided",
        "about": about,
        "notes": record.notes,
        "runs": runs,
    }


def write(directory: Path, summaries: Sequence[Summary], *, lock: bool = False) -> None:
    """The summary files; ``lock`` where the caller does not hold the directory."""
    if lock:
        with locked(directory):
            write(directory, summaries)
        return
    whole = summaries[0] if len(summaries) == 1 else {"evaluations": list(summaries)}
    texts = (json.dumps(whole, indent=1, allow_nan=False) + "\n", markdown(summaries), comma_separated(summaries))
    for name, text in zip(SUMMARY, texts, strict=True):
        replace(directory / name, text)


def _numbers(answers: Sequence[Line], timed: Sequence[Line]) -> dict[str, Any]:
    """The numbers of some answers, and of those of them that were timed."""
    total = lambda name, lines=answers: sum(line[name] for line in lines)  # noqa: E731
    names = list(answers[0]["metrics"]) if answers else []
    seconds = total("seconds", timed)
    return {
        "items": len(answers),
        "metrics": {name: _over(sum(line["metrics"][name] for line in answers), len(answers)) for name in names},
        "tokens": {form: total(f"tokens_{form}") for form in COUNTS},
        "tpf": {form: _over(total(f"tokens_{form}"), total("nfe")) for form in COUNTS},
        "tps": {form: _over(total(f"tokens_{form}", timed), seconds) for form in COUNTS},
        "timed": {
            "items": len(timed), "digest": f"{zlib.crc32(json.dumps([line['id'] for line in timed]).encode()):08x}",
            "seconds": seconds, "seconds_mean": _over(seconds, len(timed)),
            "passes_per_second": _over(total("nfe", timed), seconds),
        },
        "nfe": total("nfe"),
        "nfe_mean": _over(total("nfe"), len(answers)),
        "full_forwards": total("full_forwards"),
        "partial_forwards": total("partial_forwards"),
        "refreshes": total("refreshes"),
        "rows": total("rows"),
        "commits": {
            reason: sum(line["commits"].get(reason, 0) for line in answers)
            for reason in dict.fromkeys(reason for line in answers for reason in line["commits"])
        },
        "near_ties": _over(sum(line["near_ties"] * line["tokens_all"] for line in answers), total("tokens_all")),
        "repetition": _over(total("repetition"), len(answers)),
    }  # fmt: skip


def _over(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None
