"""Converted directories: what is in them, what becomes of damaged and unfinished ones; none appears half-made."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from convert import orbax_dir, staging
from convert.to_hf import to_hf
from convert.to_orbax import to_orbax
from convert.verify import verify
from polestar_jax.errors import InputError, RunError
from polestar_jax.loading import load, load_model, load_spec
from tests.convert.checkpoints import (
    checkpoint,
    copy_of,
    random_tensors,
    raw_tensors,
    small_dream,
    small_llada,
    write_checkpoint,
)

ROOT = checkpoint("llada").parents[3]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return _convert(tmp_path_factory.mktemp("converted"))


def _convert(base):
    to_orbax(checkpoint("llada_1layer"), base / "m")
    return base / "m"


@pytest.fixture
def damaged(converted, tmp_path):
    """A copy to damage."""
    return shutil.copytree(converted, tmp_path / "m")


def test_b33_twelve_layers_keep_their_order_and_no_rng_state_is_kept(tmp_path):
    model = small_llada(n_layers=12)
    tensors = random_tensors(model)
    source = write_checkpoint(tmp_path / "src", model, tensors)
    to_orbax(source, tmp_path / "orbax")
    loaded = load_model(tmp_path / "orbax")
    for index, layer in enumerate(loaded.layers):
        q = tensors[f"model.transformer.blocks.{index}.q_proj.weight"]
        np.testing.assert_array_equal(np.asarray(layer.qkv[...])[:, :, 0], q.T.reshape(16, 2, 8))
    state = nnx.to_flat_state(nnx.state(loaded))
    assert {type(leaf) for _, leaf in state} == {nnx.Param}
    names = {
        name
        for piece in json.loads((tmp_path / "orbax" / "manifest.json").read_text())["arrays"].values()
        for name in piece
    }
    assert names == {
        "embedding",
        "attn_norm.weight",
        "qkv",
        "out",
        "mlp_norm.weight",
        "gate_up",
        "down",
        "norm.weight",
        "head",
    }


def test_both_layouts_load_the_same_model(converted, forward):
    first, second = load_model(checkpoint("llada_1layer")), load_model(converted)
    assert first.spec == second.spec == load_spec(converted)
    tokens = np.arange(20)
    np.testing.assert_array_equal(forward(first, tokens), forward(second, tokens))
    for (path, a), (other, b) in zip(
        nnx.to_flat_state(nnx.state(first)), nnx.to_flat_state(nnx.state(second)), strict=True
    ):
        assert path == other and np.asarray(a[...]).tobytes() == np.asarray(b[...]).tobytes()


def test_load_gives_no_tokenizer_where_there_is_none(converted):
    for directory in (converted, checkpoint("llada_1layer")):
        model, tokenizer = load(directory, dtype="float32")
        assert model.spec.vocab_size == 260 and tokenizer is None


def test_a_loaded_model_does_not_change_with_its_files(tmp_path):
    source = copy_of("llada_1layer", tmp_path / "m")
    model = load_model(source)
    before = np.asarray(model.embedding[...]).copy()
    path = source / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-200_000, os.SEEK_END)
        file.write(b"\x11" * 200_000)
    np.testing.assert_array_equal(np.asarray(model.embedding[...]), before)


def test_b33_other_layouts_are_refused_clearly(tmp_path, refuses_to_load):
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "bare", {"params": {"0": {"kernel": np.ones((2, 2), np.float32)}}})
    checkpointer.wait_until_finished()
    checkpointer.close()
    assert "bare orbax checkpoint" in refuses_to_load(tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refuses_to_load(tmp_path / "empty")
    assert "no model" in refuses_to_load(tmp_path / "absent") and "nothing is downloaded" in refuses_to_load(
        "GSAI-ML/LLaDA-8B-Base"
    )


def test_b33_a_manifest_of_other_arrays_is_refused(damaged, refuses_to_load):
    path = damaged / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"qkv"', '"q_proj"'))
    message = refuses_to_load(damaged)
    assert "layer_000" in message and "q_proj" in message and "qkv" in message
    path.write_text(text.replace('"format_version": 1', '"format_version": 2'))
    assert "version 2" in refuses_to_load(damaged)
    path.write_text(text.replace("[64, 2, 192]", "[64, 2, 191]"))
    assert "gate_up" in refuses_to_load(damaged)
    path.write_text(text.replace('"rows": {"embedding": [0, 260]', '"rows": {"embedding": [0, 100]'))
    assert "embedding" in refuses_to_load(damaged)
    path.write_text(text.replace('"directory": "head.00"', '"directory": "../head.00"'))
    assert "head" in refuses_to_load(damaged)
    path.write_text("{")
    assert "manifest.json" in refuses_to_load(damaged)


def test_b33_pieces_that_do_not_fit_the_spec_are_refused(damaged, refuses_to_load):
    path = damaged / "spec.json"
    text = path.read_text()
    path.write_text(text.replace('"n_layers": 1', '"n_layers": 2'))
    assert "layer_001 is missing" in refuses_to_load(damaged)
    path.write_text(text.replace('"d_model": 64', '"d_model": 32'))
    assert "expected [260, 32]" in refuses_to_load(damaged)
    path.write_text(text.replace('"d_model"', '"width"'))
    assert "spec.json" in refuses_to_load(damaged)
    path.unlink()
    assert "spec.json" in refuses_to_load(damaged)


def test_b35_an_unfinished_directory_is_refused(damaged, refuses_to_load):
    (damaged / "manifest.json").unlink()
    assert "did not finish" in refuses_to_load(damaged)
    hidden = damaged.rename(damaged.parent / ".m.partial")
    assert "unfinished" in refuses_to_load(hidden)


def test_b35_missing_and_shortened_files_are_named(damaged, refuses_to_load):
    file = damaged / "weights" / "layer_000.00" / "down" / "0.0"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert str(file) in refuses_to_load(damaged)
    file.unlink()
    assert str(file) in refuses_to_load(damaged)
    file.write_bytes(data)
    for part in ("head.00", "embedding.00"):
        shutil.rmtree(damaged / "weights" / part)
        assert part in refuses_to_load(damaged)


def test_changed_weights_are_found_by_their_checksum(damaged, tmp_path):
    """Same size, another value: one array of another model of the same shape."""
    other = _convert(tmp_path / "other")
    tensors = random_tensors(json.loads((damaged / "config.json").read_text()), seed=5)
    to_orbax(
        write_checkpoint(tmp_path / "src", json.loads((damaged / "config.json").read_text()), tensors), tmp_path / "o"
    )
    target = damaged / "weights" / "head.00" / "norm.weight" / "0"
    shutil.copy(tmp_path / "o" / "weights" / "head.00" / "norm.weight" / "0", target)
    manifest = json.loads((damaged / "manifest.json").read_text())
    manifest["parts"]["head"][0]["files"]["norm.weight/0"] = target.stat().st_size
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"head\.00: array norm\.weight does not match its checksum"):
        to_hf(damaged, tmp_path / "hf")
    with pytest.raises(InputError, match="checksum"):
        verify(other, damaged)


def test_b35_relative_paths_are_resolved(tmp_path, monkeypatch):
    copy_of("llada_1layer", tmp_path / "src")
    monkeypatch.chdir(tmp_path)
    to_orbax("src", "deep/er/out")
    assert (tmp_path / "deep" / "er" / "out" / "manifest.json").exists()
    assert load_model("deep/er/out").spec.n_layers == 1
    to_hf("deep/er/out", "back")
    assert verify("src", "back", logits=False).same


def test_an_existing_destination_is_never_touched(tmp_path):
    for name, make in {
        "dir": lambda p: (p.mkdir(), (p / "keep").write_text("x")),
        "file": lambda p: p.write_text("x"),
    }.items():
        make(tmp_path / name)
        for convert in (to_orbax, to_hf):
            with pytest.raises(InputError, match=name):
                convert(checkpoint("llada_1layer"), tmp_path / name)
    assert (tmp_path / "dir" / "keep").read_text() == (tmp_path / "file").read_text() == "x"
    (tmp_path / "empty").mkdir()
    to_orbax(checkpoint("llada_1layer"), tmp_path / "empty")
    assert load_model(tmp_path / "empty").spec.n_layers == 1
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    to_hf(checkpoint("llada_1layer"), tmp_path / "link")
    assert (tmp_path / "elsewhere" / "config.json").exists()


@pytest.mark.parametrize("convert", [to_orbax, to_hf])
def test_what_a_killed_run_left_is_cleared(tmp_path, convert):
    left = tmp_path / ".out.partial"
    (left / "weights" / "layer_000.00.orbax-checkpoint-tmp").mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    convert(checkpoint("llada_1layer"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert not (tmp_path / "out" / "weights" / "layer_000.00.orbax-checkpoint-tmp").exists()
    assert verify(checkpoint("llada_1layer"), tmp_path / "out", logits=False).same


def test_two_runs_cannot_write_the_same_destination(tmp_path):
    inside, release = threading.Event(), threading.Event()

    def hold():
        with staging.staged(tmp_path / "out") as partial:
            (partial / "mine").write_text("x")
            inside.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    with pytest.raises(InputError, match="another run is writing it"):
        to_hf(checkpoint("llada_1layer"), tmp_path / "out")
    release.set()
    thread.join()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_b35_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("convert.to_hf.os.fsync", full)
    monkeypatch.setattr("convert.to_orbax.copy_side_files", full)
    for convert in (to_hf, to_orbax):
        with pytest.raises(RunError, match="No space left on device") as caught:
            convert(checkpoint("llada_1layer"), tmp_path / "out")
        assert "\n" not in str(caught.value) and str(tmp_path / "out") in str(caught.value)
        assert list(tmp_path.iterdir()) == []


def test_b35_errors_of_the_background_writer_reach_the_caller(tmp_path, monkeypatch):
    def fail(self):
        raise ValueError("PERMISSION_DENIED: the disk is gone\nsecond line")

    monkeypatch.setattr(ocp.StandardCheckpointer, "wait_until_finished", fail)
    with pytest.raises(RunError, match=r"embedding\.00.*PERMISSION_DENIED: the disk is gone$"):
        to_orbax(checkpoint("llada_1layer"), tmp_path / "out")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from convert.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_b35_a_file_system_that_refuses_large_files_gives_exit_status_1(tmp_path, to):
    """A real write error in orbax's background thread, not a stub: files may not grow beyond 20 kB."""
    command = [
        sys.executable,
        "-c",
        LIMITED,
        "20000",
        str(checkpoint("llada_1layer")),
        str(tmp_path / "out"),
        "--to",
        to,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("convert: ")]
    assert len(errors) == 1 and errors[0].startswith("error: writing ") and "File too large" in errors[0]
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


def test_a_converted_directory_can_be_cast_and_converted_again(tmp_path):
    source = write_checkpoint(tmp_path / "src", small_dream(), random_tensors(small_dream()))
    to_orbax(source, tmp_path / "a")
    to_orbax(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    to_orbax(source, tmp_path / "c", dtype="bfloat16")
    assert verify(tmp_path / "b", tmp_path / "c").same
    to_hf(tmp_path / "a", tmp_path / "d")
    assert raw_tensors(tmp_path / "d") == raw_tensors(source)


def test_weights_go_to_the_default_device_once(converted, monkeypatch):
    sizes = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda array, *a, **k: (sizes.append(array.nbytes), put(array, *a, **k))[1])
    model = load_model(converted)
    assert len(sizes) == 9 and sum(sizes) == sum(leaf[...].nbytes for _, leaf in nnx.to_flat_state(nnx.state(model)))


def test_reading_a_piece_restores_each_part_once(converted, monkeypatch, tmp_path):
    restored = []
    restore = orbax_dir._restore
    monkeypatch.setattr(
        orbax_dir, "_restore", lambda d, part, arrays: (restored.append(part.directory), restore(d, part, arrays))[1]
    )
    to_hf(converted, tmp_path / "hf")
    assert restored == ["embedding.00", "layer_000.00", "head.00"]
