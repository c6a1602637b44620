"""Peak host memory of converting and loading: the largest tensor and a constant, whatever the checkpoint's size."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.convert.checkpoints import checkpoint, small_llada

ROOT = checkpoint("llada").parents[3]

pytestmark = pytest.mark.slow

# Beyond the arrays: an orbax checkpoint (32 MB) in flight and its compressed copy, heaps of the threads that handle it.
CONSTANT = 180_000_000

MEASURE = """
import json, re, sys
from convert.cli import main
def peak():
    return 1000 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
warm, source, out, *options = sys.argv[1:]
assert main([warm, out + "-warm", *options]) == 0
before = peak()
assert main([source, out, *options]) == 0
print(json.dumps(peak() - before))
"""

LOAD = """
import json, re, sys
from polestar_jax.loading import load_model
def peak():
    return 1000 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
warm = load_model(sys.argv[1])
before = peak()
model = load_model(sys.argv[2])
print(json.dumps(peak() - before))
"""


def measure(script: str, *arguments: object) -> int:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A 670 MB LLaDA in bf16 whose embedding and head have 256 MB each, written without holding it."""
    directory = tmp_path_factory.mktemp("large")
    model = small_llada(d_model=1024, n_layers=4, n_heads=8, n_kv_heads=8, mlp_hidden_size=4096)
    model |= {"vocab_size": 125_000, "embedding_size": 125_000}
    from convert.keymap import expected_tensors
    from polestar_jax.config import spec_from_config

    shapes = expected_tensors(spec_from_config(model, source="large"))
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = position + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for left in range(position, 0, -(1 << 22)):  # values of both signs around 1, which compress as weights do
            block = (
                rng.integers(0x3C00, 0x4000, 1 << 21).astype(np.uint16)
                | rng.integers(0, 2, 1 << 21).astype(np.uint16) << 15
            )
            file.write(block.tobytes()[:left])
    (directory / "config.json").write_text(json.dumps(model))
    yield directory, 2 * 125_000 * 1024, position
    shutil.rmtree(directory)


@pytest.mark.parametrize("options", [[], ["--dtype", "float32"], ["--to", "hf"]], ids=["orbax", "orbax-float32", "hf"])
def test_converting_takes_the_largest_tensor_and_a_constant(large, tmp_path, options):
    source, largest, total = large
    largest *= 2 if "float32" in options else 1
    grown = measure(MEASURE, checkpoint("llada_1layer"), source, tmp_path / "out", *options)
    shutil.rmtree(tmp_path / "out")
    print(f"{total / 1e6:.0f} MB converted, largest tensor {largest / 1e6:.0f} MB, peak grew by {grown / 1e6:.0f} MB")
    assert grown <= largest + CONSTANT
    if options == ["--to", "hf"]:
        assert grown <= CONSTANT  # rows go straight through


def test_loading_holds_the_weights_once(large, tmp_path):
    source, largest, total = large
    for directory in (source, tmp_path / "orbax"):
        if directory != source:
            measure(MEASURE, checkpoint("llada_1layer"), source, directory)
        grown = measure(LOAD, checkpoint("llada_1layer"), directory)
        print(f"{total / 1e6:.0f} MB loaded, peak grew by {grown / 1e6:.0f} MB")
        assert total * 0.9 <= grown <= total + 240_000_000 < total + largest
    shutil.rmtree(tmp_path / "orbax")
