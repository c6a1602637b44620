"""A conversion killed at random moments: nothing half-made is ever visible, and a rerun gives the same bytes."""

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convert.staging import partial_path
from convert.to_hf import to_hf
from convert.to_orbax import to_orbax
from tests.convert.checkpoints import by_kind, checkpoint, random_tensors, small_llada, write_checkpoint

ROOT = checkpoint("llada").parents[3]

pytestmark = pytest.mark.slow


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the ones in which orbax notes when and under which path it wrote."""
    notes = ("_CHECKPOINT_METADATA", "commit_success.txt")
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name not in notes)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def start(source: Path, destination: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "convert", str(source), str(destination), *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_writing(process: subprocess.Popen, destination: Path) -> None:
    """Until the run has begun to write."""
    while not partial_path(destination).exists() and not destination.exists() and process.poll() is None:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("convert", "options", "kills"),
    [
        (to_orbax, [], 20),
        (functools.partial(to_hf, max_shard_bytes=200_000), ["--to", "hf", "--max-shard-bytes", "200000"], 8),
    ],
    ids=["orbax", "hf"],
)
def test_killed_at_random_moments_a_rerun_gives_the_same_bytes(tmp_path, convert, options, kills):
    model = small_llada(d_model=256, n_layers=10, n_heads=4, n_kv_heads=4, mlp_hidden_size=512)
    tensors = random_tensors(model, dtype="BF16")
    source = write_checkpoint(tmp_path / "src", model, tensors, by_kind(list(tensors)))
    destination = tmp_path / "out" / "model"

    process = start(source, destination, *options)
    wait_for_writing(process, destination)
    began = time.monotonic()
    while not destination.exists() and process.poll() is None:
        time.sleep(0.001)
    duration = time.monotonic() - began
    assert process.wait() == 0
    expected = contents(destination)
    shutil.rmtree(destination)

    interrupted = 0
    moments = random.Random(20)
    for _ in range(kills):
        process = start(source, destination, *options)
        wait_for_writing(process, destination)
        time.sleep(moments.uniform(0, duration))
        process.send_signal(signal.SIGKILL)
        killed = process.wait() == -signal.SIGKILL
        if destination.exists():  # the rename came first, so it must be whole
            assert contents(destination) == expected
            shutil.rmtree(destination)
            continue
        assert killed
        interrupted += 1
        visible = [path.name for path in destination.parent.iterdir() if not path.name.startswith(".")]
        assert visible == []
        convert(source, destination)
        assert contents(destination) == expected
        assert not partial_path(destination).exists()
        shutil.rmtree(destination)
    print(f"{interrupted} of {kills} runs were interrupted within {duration:.2f} s of writing")
    assert interrupted >= kills // 2


def test_a_chain_of_killed_runs_ends_in_a_whole_one(tmp_path):
    """Each run finds what the killed one before it left."""
    model = small_llada(n_layers=10)
    source = write_checkpoint(tmp_path / "src", model, random_tensors(model))
    destination = tmp_path / "out"
    for _ in range(3):
        process = start(source, destination)
        wait_for_writing(process, destination)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not destination.exists() and partial_path(destination).exists()
    assert start(source, destination).wait() == 0
    to_orbax(source, tmp_path / "expected")
    assert contents(destination) == contents(tmp_path / "expected")
