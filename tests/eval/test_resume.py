"""An evaluation that is stopped and started again: the same summary, nothing redone, nothing counted twice, nothing mixed."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from polestar_jax import generation
from polestar_jax.decode import engine
from polestar_jax.decoders import variants
from polestar_jax.errors import InputError
from polestar_jax.eval import about, prompts, records, run, summary
from polestar_jax.eval.task import Item, Task
from polestar_jax.loading import load

ITEMS = [
    Item(id=f"{i}", prompt=f"Copy the list: {text}", target=text, subset="ab"[i % 2])
    for i, text in enumerate(("a b c d", "e f g h", "k l m n", "p q r s", "t u v w"))
]
TASK = Task(
    name="copying", summary="", version="1", items=lambda file, options: ITEMS,
    score=lambda item, text: {"exact": float(text.strip() == item.target)},
)  # fmt: skip
TIMES = ("tps", "seconds", "seconds_mean", "passes_per_second", "compile_seconds", "notes")


def timeless(value):
    """A summary without what depends on the clock."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def work():
    model, tokenizer = load("tiny", dtype="float32")
    # The default threshold under two keys: two runs, and one program to compile.
    runs = variants.build("parallel,parallel[threshold=0.9]", gen_length=8, block_default=4)
    return run.Evaluation(
        model=model, tokenizer=tokenizer, task=TASK, items=ITEMS, batch_size=2, timed=[0, 1],
        prompts=prompts.prompt_ids(ITEMS, "chat_single_user", tokenizer, model.spec, 8), runs=runs,
    )  # fmt: skip


@pytest.fixture(scope="module")
def record(work):
    return about.record(work, prompt_mode="chat_single_user", options={}, versions={"polestar-jax": "0"}, notes={})


@pytest.fixture(scope="module")
def unbroken(work, record, tmp_path_factory):
    """(answers.jsonl, summary) of an evaluation that nobody stopped."""
    directory = tmp_path_factory.mktemp("unbroken")
    keep, engine.forget_programs = engine.forget_programs, lambda: None
    try:
        found = evaluate(directory, work, record)
    finally:
        engine.forget_programs = keep
    return (directory / records.ANSWERS).read_bytes(), found


@pytest.fixture(autouse=True)
def programs_are_kept(monkeypatch):
    monkeypatch.setattr(engine, "forget_programs", lambda: None)


def evaluate(directory, work, record, **options) -> summary.Summary:
    with records.opened(directory, record) as answers:
        assert run.evaluate(work, answers, **options) == {}
        found = summary.summarise(answers.record, answers.lines)
        summary.write(directory, [found])
    return found


def decoded(monkeypatch) -> list[int]:
    """How many prompts each call of the decode loop gets from now on, warm-up runs included."""
    real, calls = generation.run, []
    monkeypatch.setattr(generation, "run", lambda *args, **more: calls.append(len(args[2])) or real(*args, **more))
    return calls


def left_behind(directory, record, data: bytes) -> None:
    """What a killed process leaves: the record, and a file of answers that ends anywhere."""
    with records.opened(directory, record):
        pass
    (directory / records.ANSWERS).write_bytes(data)


def test_stopped_at_any_byte_gives_the_same_summary(work, record, unbroken, tmp_path, monkeypatch):
    whole, expected = unbroken
    assert expected["complete"] and [len(r["subsets"]) for r in expected["runs"]] == [2, 2]
    calls = decoded(monkeypatch)
    rng = random.Random(0)
    edges = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for n, end in enumerate([0, *edges, *(e - 1 for e in edges[::4]), *rng.sample(range(len(whole)), 6)]):
        directory = tmp_path / str(n)
        left_behind(directory, record, whole[:end])
        calls.clear()
        assert timeless(evaluate(directory, work, record)) == timeless(expected)
        data = (directory / records.ANSWERS).read_bytes()
        lines = [json.loads(line) for line in data.splitlines()]
        assert len(lines) == 2 * (5 + 2), "nothing missing, nothing twice"
        assert {(x["run"], x["timed"], x["place"]): x["tokens"] for x in lines} == {
            (x["run"], x["timed"], x["place"]): x["tokens"] for x in map(json.loads, whole.splitlines())
        }
        kept = 0
        while kept < len(lines) and data.split(b"\n")[kept] == whole.split(b"\n")[kept]:
            kept += 1
        assert kept >= sum(edge <= end for edge in edges) - 1, "at most the batch being written is done again"
        assert sum(calls) <= 2 * (6 + 2) - kept + 1, "a short batch is filled up; what is there is not decoded"


def test_interrupted_between_batches(work, record, unbroken, tmp_path, monkeypatch):
    class Stop(BaseException):
        pass

    def stop_after(count):
        def on_batch(key, timed, size):
            nonlocal count
            count -= 1
            if not count:
                raise Stop

        return on_batch

    for batches in (1, 3, 4):
        with pytest.raises(Stop):
            evaluate(tmp_path, work, record, on_batch=stop_after(batches))
    calls = decoded(monkeypatch)
    assert timeless(evaluate(tmp_path, work, record)) == timeless(unbroken[1])
    assert calls == [1, 1], "of ten batches eight were there: each start had gone on where the last one stopped"
    assert json.loads((tmp_path / "summary.json").read_text())["complete"]


def test_a_finished_evaluation_decodes_nothing_and_takes_more_runs(work, record, unbroken, tmp_path, monkeypatch):
    left_behind(tmp_path, record, unbroken[0])
    calls = decoded(monkeypatch)
    before = (tmp_path / records.ANSWERS).read_bytes()
    assert timeless(evaluate(tmp_path, work, record)) == timeless(unbroken[1])
    assert calls == [] and (tmp_path / records.ANSWERS).read_bytes() == before
    more = dataclasses.replace(work, runs=variants.build("parallel[eos=allow]", gen_length=8, block_default=4))
    own = {key: about.run_record(key, decoder) for key, decoder in more.runs.items()}
    found = evaluate(tmp_path, more, dataclasses.replace(record, runs=own))
    assert [r["run"] for r in found["runs"]] == ["parallel", "parallel[threshold=0.9]", "parallel[eos=allow]"]
    assert timeless(found["runs"][:2]) == timeless(unbroken[1]["runs"]) and found["runs"][2]["complete"]


def changed(record: records.Record, path: str, value) -> records.Record:
    found = copy.deepcopy(dataclasses.asdict(record))
    *places, last = path.split("/")
    inner = found
    for place in places:
        inner = inner[place]
    assert inner[last] != value
    inner[last] = value
    return records.Record(**found)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("about/model/weights", "00000000", "model.weights was"),
        ("about/task/digest", "0", "task.digest was"),
        ("about/prompts", "0", "prompts was"),
        ("about/prompt_mode", "raw", 'prompt_mode was "chat_single_user" and is "raw"'),
        ("about/batch_size", 1, "batch_size was 2 and is 1"),
        ("about/versions/polestar-jax", "1", 'versions.polestar-jax was "0" and is "1"'),
        ("about/dtype", "bfloat16", "dtype was"),
        (
            "runs/parallel[threshold=0.9]/settings/threshold",
            0.6,
            "run parallel[threshold=0.9] made otherwise: settings.threshold",
        ),
    ],
)
def test_anything_else_under_the_same_name_is_refused(record, unbroken, tmp_path, path, value, words):
    left_behind(tmp_path, record, unbroken[0])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(InputError) as error, records.opened(tmp_path, changed(record, path, value)):
        pass
    assert words in str(error.value) and "\n" not in str(error.value)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with records.opened(tmp_path, dataclasses.replace(record, notes={"model": "elsewhere"})) as answers:
        assert len(answers.lines) == 14, "paths and cores are only noted"


def test_damage_is_named(record, unbroken, tmp_path):
    lines = unbroken[0].split(b"\n")
    for n, (bad, words) in enumerate(
        [
            ([*lines[:2], b'{"run": 1}', *lines[2:]], "answers.jsonl line 3"),
            ([b"\0\0\0", *lines], "answers.jsonl line 1"),
            ([*lines[:2], *lines[:2], *lines[2:]], "twice"),
            (
                [lines[-2].replace(b"threshold=0.9", b"threshold=0.6"), *lines[1:]],
                "line 1 is no answer of this evaluation",
            ),
        ]
    ):
        left_behind(tmp_path / str(n), record, b"\n".join(bad))
        with pytest.raises(InputError, match=words), records.opened(tmp_path / str(n), record):
            pass
        assert (tmp_path / str(n) / records.ANSWERS).read_bytes() == b"\n".join(bad)
    (tmp_path / "0" / records.RUNS).write_text("{}")
    with pytest.raises(InputError, match=r"runs.json: not what an evaluation writes"):
        records.read(tmp_path / "0")


def test_two_at_once_are_refused(record, tmp_path):
    with records.opened(tmp_path, record):
        with pytest.raises(InputError, match="being written by another"), records.opened(tmp_path, record):
            pass
        summary_of_now = summary.summarise(*records.read(tmp_path))
    assert not summary_of_now["complete"]
    with records.opened(tmp_path, record):
        pass


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path):
    """A real process, killed ten times between its start and its end, against one that was left alone."""
    argv = [
        sys.executable, "-m", "polestar_jax", "eval", "--task", "tiny", "--limit", "4", "--methods", "vanilla,parallel",
        "--gen-length", "16", "--block-length", "8", "--batch-size", "2", "--timed", "1", "--cache-dir", str(tmp_path / "cache"),
    ]  # fmt: skip
    start = lambda out: subprocess.Popen(  # noqa: E731
        [*argv, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    whole = start(tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    rng, out, kills, sizes = random.Random(1), tmp_path / "killed", 0, []
    answers = out / records.ANSWERS
    while kills < 10:
        size = answers.stat().st_size if answers.exists() else 0
        process = start(out)
        # Most of a process's life is its start; the kill comes some time after it has begun to decode.
        while process.poll() is None and (answers.stat().st_size if answers.exists() else 0) <= size:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.15)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        assert process.wait() in (0, -signal.SIGKILL), process.stderr.read()
        sizes.append(os.path.getsize(answers))
        if process.returncode == 0:
            break
    assert kills == 10 and len(set(sizes)) > 5, (kills, sizes)
    last = start(out)
    assert last.wait() == 0, last.stderr.read()
    left, right = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "killed"))
    assert timeless(left) == timeless(right) and left["complete"]
    for name in ("whole", "killed"):
        assert len((tmp_path / name / records.ANSWERS).read_text().splitlines()) == 2 * (44 + 11)
    assert not list(out.glob(".*"))
