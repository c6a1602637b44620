"""The command as a process: Ctrl-C at any moment, and standard streams that are closed, full or left by their reader."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LLADA = str(ROOT / "tests/data/checkpoints/llada")
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""}
SMALL = ["--model", LLADA, "--method", "vanilla", "--gen-length", "16", "--block-length", "8", "--cache-dir", "off"]
# Every pass decides one of 480 positions of 64 sequences: minutes, for this model.
LONG = ["--model", LLADA, "--method", "vanilla", "--gen-length", "480", "--batch-size", "64", "--cache-dir", "off"]


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "polestar_jax", *argv]


def shell(redirection: str, *argv: str) -> subprocess.CompletedProcess:
    """Run with a redirection that only a shell can express, such as ``>&-``."""
    line = ["bash", "-c", f'"$@" {redirection}', "bash", *command(*argv)]
    return subprocess.run(line, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def start(*argv: str, env: dict[str, str] | None = None, **streams) -> subprocess.Popen:
    # A child of a shell's background job would ignore SIGINT; one of a process that handles it does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        environment = ENVIRONMENT | (env or {})
        return subprocess.Popen(command(*argv), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, **streams)
    finally:
        signal.signal(signal.SIGINT, before)


def until(process: subprocess.Popen, words: str) -> None:
    """Read standard error up to the line with these words."""
    seen = [process.stderr.readline()]
    while words not in seen[-1]:
        assert seen[-1], f"ended early: {''.join(seen)[-2000:]}"
        seen.append(process.stderr.readline())


def interrupt(process: subprocess.Popen) -> tuple[list[str], float]:
    """(what was said on standard error from then on, the seconds until the end)."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return said.splitlines(), time.monotonic() - began


@pytest.mark.parametrize("moment", ["Compiling jit(_decode)", "Finished XLA compilation of jit(_decode)"])
def test_interrupt_while_decoding(tmp_path, moment):
    """While the loop is compiled, and while it runs on the device, where Python alone would not notice for minutes."""
    source, target = tmp_path / "in.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"prompt_ids": [5, 6, 7]}\n' * 64)
    target.write_text("old")
    argv = ["generate", "--input", str(source), "--output", str(target), "--json", *LONG]
    process = start(*argv, env={"JAX_LOG_COMPILES": "1"})
    until(process, moment)
    assert [path.suffix for path in tmp_path.glob(".polestar-*")] == [".partial"], "the answers' file is open by now"
    time.sleep(0.5)
    assert process.poll() is None
    said, seconds = interrupt(process)
    assert process.returncode == 1
    assert said[-1] == "polestar: interrupted" and "Traceback" not in "".join(said)
    assert seconds < 30, "the whole decode takes longer"
    assert target.read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "in.jsonl"]


def test_interrupt_while_importing():
    """An interrupt inside the set-up of an extension module must not come out as that module's failure."""
    process = start("generate", "--prompt-ids", "1,2,3", *SMALL, env={"PYTHONPROFILEIMPORTTIME": "1"})
    until(process, "numpy._globals")
    said, _ = interrupt(process)
    assert process.returncode == 1
    assert [line for line in said if not line.startswith("import time:")] == ["polestar: interrupted"]


def test_closed_standard_output_is_an_error_before_the_work():
    done = shell(">&-", "generate", "--prompt-ids", "1,2,3", *SMALL)
    assert done.returncode == 2
    assert done.stderr == "polestar generate: error: standard output is closed; name a file with --output\n"
    done = shell(">&-", "--help")
    assert done.returncode == 1 and done.stderr == "polestar: error: standard output is closed\n"


def test_closed_streams_do_not_touch_the_answers(tmp_path):
    """What is meant for a closed stream goes nowhere: not to standard output, nor among the answers."""
    source, target = tmp_path / "in.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"prompt_ids": [5, 6, 7]}\n{"prompt_ids": [8]}\n')
    argv = ["generate", "--input", str(source), "--json", *SMALL]
    one, all_three = shell("2>&-", *argv), shell("<&- >&- 2>&-", *argv, "--output", str(target))
    assert one.returncode == all_three.returncode == 0
    printed, written = ([json.loads(line) for line in text.splitlines()] for text in (one.stdout, target.read_text()))
    assert [answer["id"] for answer in printed] == [0, 1]
    assert [answer["tokens"] for answer in printed] == [answer["tokens"] for answer in written]


def test_files_do_not_take_the_place_of_closed_streams(tmp_path):
    """What a library prints to descriptor 2 must not end up in the file that was opened next."""
    code = """
import os, sys
from polestar_jax.cli.process import end_with

def main():
    with open(sys.argv[1], "w") as file:
        for descriptor in (1, 2):
            os.write(descriptor, b"noise")
        file.write("answer")
    return 0

end_with(main, "polestar")
"""
    line = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code, str(tmp_path / "file")]
    assert subprocess.run(line, cwd=ROOT, env=ENVIRONMENT, timeout=60).returncode == 0
    assert (tmp_path / "file").read_text() == "answer"


def test_a_reader_that_leaves_ends_the_command_quietly():
    argv = ["generate", "--prompt-ids", "1,2,3", "--stream", "--json", *SMALL]
    process = start(*argv, stdout=subprocess.PIPE)
    assert json.loads(process.stdout.readline())["nfe"] == 1
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=60) == 1
    reader, writer = os.pipe()
    os.close(reader)  # gone before the first word, which is written out at the very end
    process = start("--help", stdout=writer)
    os.close(writer)
    assert process.stderr.read() == "" and process.wait(timeout=60) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_device_is_one_line():
    done = shell("> /dev/full", "--help")
    assert done.returncode == 1 and done.stderr == "polestar: error: [Errno 28] No space left on device\n"
