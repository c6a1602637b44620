"""``python -m convert`` and what it leaves: exit statuses, JSON, side files; no code of a checkpoint is ever run."""

import json
import os
import subprocess
import sys

import pytest

from convert.cli import main
from convert.to_hf import to_hf
from convert.to_orbax import to_orbax
from tests.convert.checkpoints import checkpoint, config, copy_of, raw_tensors

ROOT = checkpoint("llada").parents[3]


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "convert", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def test_module_converts_and_verifies(tmp_path):
    done = run(checkpoint("llada_1layer"), tmp_path / "o", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and "layer_000" in done.stderr
    assert (report["tensors"], report["bytes"], report["dtypes"], report["unknown"]) == (12, 346880, ["F32"], [])
    assert report["destination"] == str(tmp_path / "o") and report["family"] == "llada"
    done = run("verify", checkpoint("llada_1layer"), tmp_path / "o", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["same"] and report["tensors"] == 12 and report["max_logit_difference"] == 0.0


def test_verify_of_different_models_exits_with_1(tmp_path, capsys):
    assert main([str(checkpoint("llada_1layer")), str(tmp_path / "o"), "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert main(["verify", str(checkpoint("llada_1layer")), str(tmp_path / "o")]) == 1
    out = capsys.readouterr().out
    assert "model.transformer.wte.weight: dtype F32 and BF16" in out and "2 more differences" in out
    assert out.splitlines()[-1].startswith("different (12 differences)")
    assert main(["verify", str(checkpoint("llada_1layer")), str(tmp_path / "o"), "--json", "--no-logits"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["difference_count"] == 12 and report["max_logit_difference"] is None and not report["same"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["{missing}", "{out}"],
        ["{source}", "{out}", "--dtype", "int8"],
        ["{source}", "{out}", "--max-shard-bytes", "5"],
        ["{source}", "{out}", "--to", "hf", "--max-shard-bytes", "0"],
        ["{source}", "{source}"],
        ["verify", "{source}", "{missing}"],
    ],
)
def test_wrong_input_is_one_line_and_exit_status_2(tmp_path, capsys, arguments):
    places = {"source": checkpoint("llada_1layer"), "missing": tmp_path / "no", "out": tmp_path / "out"}
    assert main([word.format(**places) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_exit_with_2(tmp_path, capsys):
    for arguments in ([], ["a"], ["a", "b", "--to", "gguf"], ["verify", "a"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0 and "example: python -m convert LLaDA" in capsys.readouterr().out


SIDE = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
]


def test_tokenizer_files_travel_code_and_pickles_do_not(tmp_path):
    source = copy_of("llada_1layer", tmp_path / "src")
    for name in SIDE[1:]:
        (source / name).write_text(f"contents of {name}")
    for name in (
        "modeling_llada.py",
        "configuration_llada.py",
        "pytorch_model.bin",
        "training_args.bin",
        "x.pt",
        "notes.md",
    ):
        (source / name).write_bytes(b"\x80\x02cos\nsystem\n")
    to_orbax(source, tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "back")
    for directory, own in (
        (tmp_path / "orbax", ["manifest.json", "spec.json", "weights"]),
        (tmp_path / "back", ["model.safetensors"]),
    ):
        assert sorted(path.name for path in directory.iterdir()) == sorted([*SIDE, *own])
        for name in SIDE:
            assert (directory / name).read_bytes() == (source / name).read_bytes()


PROBE = """
import sys
from pathlib import Path
from convert.cli import main
assert main([sys.argv[1], sys.argv[2]]) == 0
assert main(["verify", sys.argv[1], sys.argv[2]]) == 0
from polestar_jax.loading import load_model
load_model(sys.argv[1]), load_model(sys.argv[2])
for name in ("torch", "tensorflow", "pickletools", "modeling_llada", "transformers.models.llada"):
    assert name not in sys.modules, name
"""


def test_no_code_of_a_checkpoint_runs_and_torch_is_not_imported(tmp_path):
    source = copy_of("llada_1layer", tmp_path / "src")
    mark = tmp_path / "executed"
    assert "auto_map" in config("llada_1layer")
    for name in ("modeling_llada.py", "configuration_llada.py", "tokenization_llada.py", "__init__.py"):
        (source / name).write_text(f"open({str(mark)!r}, 'w').close()\n")
    command = [sys.executable, "-c", PROBE, str(source), str(tmp_path / "o")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert not mark.exists()
    to_hf(tmp_path / "o", tmp_path / "back")
    assert raw_tensors(tmp_path / "back") == raw_tensors(checkpoint("llada_1layer"))
