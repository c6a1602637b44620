"""The paper's benchmarks from local files, from the command to the tables; the embedded model knows none of them."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

from polestar_jax.cli import main
from polestar_jax.eval import sandbox

LENGTHS = ["--gen-length", "16", "--block-length", "8"]
ROWS = {
    "gsm8k": {"question": "A ship carries 31,000 crates and loads 415 more. How many?", "answer": "It has.\n#### 31,415"},
    "math": {"problem": "Add $31000$ and $415$.", "solution": "It is $\\boxed{31415}$.", "type": "Algebra"},
    "humaneval": {
        "prompt": "def twice(x):\n", "entry_point": "twice", "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(3) == 6\n",
    },
    "mbpp": {
        "text": "Write a function to double a number.", "code": "def twice(x):\n    return 2 * x",
        "test_list": ["assert twice(3) == 6", "assert twice(0) == 0", "assert twice(-1) == -2"],
    },
}  # fmt: skip
OPTIONS = {name: ["--option", "shots=0"] for name in ("gsm8k", "math", "mbpp")}
METRICS = {"gsm8k": {"flexible", "strict"}, "math": {"math_verify"}}


def evaluated(tmp_path: pathlib.Path, task: str, mode: str, *more: str) -> dict:
    """The summary of two items; the second has another question, so that the prompts are of different lengths."""
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    asked = next(iter(ROWS[task]))
    rows = [ROWS[task], ROWS[task] | ({asked: f"{ROWS[task][asked]} Really?"} if task != "humaneval" else {})]
    data.write_text("".join(json.dumps(row | {"task_id": i}) + "\n" for i, row in enumerate(rows)))
    argv = ["--task", task, "--data", str(data), *OPTIONS.get(task, []), "--model", "tiny", *more]
    argv = ["--methods", "parallel", "--batch-size", "2", "--prompt-mode", mode, "--out", str(out), *argv]
    argv += ["--allow-code-execution"] if task in ("humaneval", "mbpp") else []
    assert main(["eval", *argv]) == 0
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize(
    ("task", "mode"),
    [("gsm8k", "chat_single_user"), ("math", "raw_bos"), ("humaneval", "raw"), ("mbpp", "chat_single_user")],
)
def test_a_benchmark_from_a_local_file_to_the_summary(tmp_path, capsys, task, mode):
    if task == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("math-verify (extra eval) is not installed")
    methods = "parallel,polestar" if task == "gsm8k" else "parallel"
    found = evaluated(tmp_path, task, mode, *LENGTHS, "--methods", methods)
    assert found["complete"] and [run["run"] for run in found["runs"]] == methods.split(",")
    assert found["about"]["prompt_mode"] == mode and found["about"]["task"]["name"] == task
    for run in found["runs"]:
        assert run["items"] == 2 and run["tokens"]["all"] == 32 and run["gen_length"] == 16
        assert set(run["metrics"]) >= METRICS.get(task, {"pass@1"})
        assert run["metrics"][next(iter(run["metrics"]))] == 0, "the embedded model has learnt nothing of the kind"
        assert run["tpf"]["all"] == 32 / run["nfe"]
    assert ("isolation" in found["notes"]) == (task in ("humaneval", "mbpp"))
    assert f"| {task} | 16 | parallel | 0.00 |" in capsys.readouterr().out


def test_without_namespaces_a_notice_says_what_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: ())
    evaluated(tmp_path, "mbpp", "raw", *LENGTHS)
    assert "audit hook alone stands" in capsys.readouterr().err


@pytest.mark.slow
def test_the_paper_s_lengths_are_the_default(tmp_path):
    found = evaluated(
        tmp_path, "gsm8k", "raw", "--methods", "parallel,polestar", "--set", "threshold=0", "--set", "tau_static=0"
    )
    assert [(run["gen_length"], run["block_length"]) for run in found["runs"]] == [(256, 32)] * 2
