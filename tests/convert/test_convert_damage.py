"""Damaged JSON files, odd paths and values that are not finite: each refusal is one line naming file, key and value."""

import json
import os
import sys

import numpy as np
import pytest

from convert.cli import main
from convert.safetensors_file import read_header
from convert.to_orbax import to_orbax
from convert.verify import verify
from polestar_jax.config import read_config, spec_from_config
from polestar_jax.errors import InputError
from polestar_jax.jsonfile import load_json
from polestar_jax.loading import load, load_model, load_spec
from polestar_jax.spec import ModelSpec
from tests.convert.checkpoints import checkpoint, random_tensors, small_llada, write_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def shared_converted(tmp_path_factory):
    target = tmp_path_factory.mktemp("damage") / "m"
    to_orbax(checkpoint("llada_1layer"), target)
    return target


@pytest.fixture
def converted(shared_converted):
    """A converted directory whose spec, manifest and configuration are put back afterwards."""
    saved = {name: (shared_converted / name).read_bytes() for name in ("spec.json", "manifest.json", "config.json")}
    yield shared_converted
    for name, data in saved.items():
        (shared_converted / name).write_bytes(data)


def refused(call, *words):
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def fails(capsys, arguments, *words):
    """The command line ends with exit status 2 and one line that holds the words."""
    assert main([str(word) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_verify_reports_logits_that_are_not_finite_as_valid_json(tmp_path, capsys):
    tensors = random_tensors(small_llada())
    write_checkpoint(tmp_path / "a", small_llada(), tensors)
    name = "model.transformer.ln_f.weight"
    write_checkpoint(tmp_path / "b", small_llada(), tensors | {name: np.full_like(tensors[name], np.nan)})

    def constant(word):
        raise AssertionError(word)

    for other, same in (("a", False), ("b", True)):
        places = [str(tmp_path / other), str(tmp_path / "b")]
        assert main(["verify", *places, "--json"]) == (0 if same else 1)
        report = json.loads(capsys.readouterr().out, parse_constant=constant)
        assert report["max_logit_difference"] is None and report["logits_finite"] is False and report["same"] is same
        main(["verify", *places])
        assert "logits not finite" in capsys.readouterr().out
    report = verify(tmp_path / "a", tmp_path / "a")
    assert report.logits_finite is True and report.max_logit_difference == 0.0


def test_writing_a_hugging_face_directory_needs_the_configuration(converted, tmp_path, capsys):
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    fails(capsys, [converted, tmp_path / "hf", "--to", "hf"], "config.json: does not describe")
    (converted / "config.json").unlink()
    fails(capsys, [converted, tmp_path / "hf", "--to", "hf"], "config.json: file is missing")
    assert load_spec(converted).n_layers == 1 and list(tmp_path.iterdir()) == []


BAD_SPEC = [
    *[("n_layers", value) for value in ("2", 1.0, 0, True, 10**9)],
    *[("mask_id", value) for value in (None, -1, 10**9, 1.5)],
    *[("stop_ids", value) for value in ([[1]], [], ["x"], 3, [True], [10**9])],
    *[("norm_eps", value) for value in ("x", -1, 0, float("inf"))],
    *[("max_length", value) for value in ("9", -1)],
    *[("family", value) for value in ("gpt", None, [])],
    *[("logit_shift", value) for value in (5, 1, None)],
    *[("rope_theta", value) for value in (0, float("nan"), 10**400)],
    *[("eos_id", 10**9), ("bos_id", "1"), ("qkv_bias", 1), ("n_kv_heads", 3), ("head_dim", 31)],
]


@pytest.mark.parametrize(("key", "value"), BAD_SPEC, ids=lambda value: str(value)[:12])
def test_a_spec_with_a_wrong_value_is_refused_before_anything_is_loaded(converted, refuses_to_load, key, value):
    spec = json.loads((converted / "spec.json").read_text())
    (converted / "spec.json").write_text(json.dumps(spec | {key: value}))
    message = refuses_to_load(converted)
    assert f"{converted / 'spec.json'}: {key} is {json.dumps(value)}; accepted: " in message


def test_a_spec_with_missing_or_unknown_keys_is_refused(converted, refuses_to_load):
    spec = json.loads((converted / "spec.json").read_text())
    for key in spec:
        (converted / "spec.json").write_text(json.dumps({k: v for k, v in spec.items() if k != key}))
        assert f"spec.json: key {key} is missing" in refuses_to_load(converted)
    (converted / "spec.json").write_text(json.dumps(spec | {"width": 1}))
    assert "spec.json: unknown key 'width'" in refuses_to_load(converted)


def test_a_spec_survives_its_json():
    spec = load_spec(checkpoint("dream"))
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["parts"]["head"][0].update(directory=5), "directory is 5; expected text"),
        (lambda m: m["parts"]["head"][0].update(directory=None), "directory is null; expected text"),
        (lambda m: m["parts"]["head"][0]["rows"].update(head=[0, None]), "rows of head are [0, null]"),
        (lambda m: m["parts"]["head"][0].update(files={"x" * 300: 1}), "file is missing"),
        (lambda m: m["parts"]["head"][0].update(files={"x": "1"}), 'x is "1"; expected a whole number'),
        (lambda m: m["parts"].update(head=None), "parts are null"),
        (lambda m: m["arrays"]["head"]["head"].update(dtype=[]), "array head: dtype is []; expected text"),
        (lambda m: m["arrays"]["head"]["head"].update(shape=[None]), "shape is [null]"),
        (lambda m: m["arrays"]["head"].update(head=3), "array head: key shape is missing"),
        (lambda m: m.pop("arrays"), "key arrays is missing"),
        (lambda m: m.update(format=[]), "is [] version 1"),
    ],
)
def test_a_manifest_with_a_wrong_value_is_refused(converted, refuses_to_load, change, words):
    manifest = json.loads((converted / "manifest.json").read_text())
    change(manifest)
    (converted / "manifest.json").write_text(json.dumps(manifest))
    message = refuses_to_load(converted)
    assert words in message and str(converted) in message


@pytest.mark.parametrize("fields", [{"dtype": ["F32"]}, {"dtype": {}}, {"shape": [2**200]}, {"shape": [1] * 1000}])
def test_a_header_entry_of_wrong_types_is_refused(tmp_path, fields):
    path = tmp_path / "model.safetensors"
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | fields}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    refused(lambda: read_header(path), str(path), "tensor a ")


HOSTILE = [
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"a": ' + "9" * 5000 + "}",
    '{"a": ' + "[" * 90 + "]" * 90 + "}",
    "\xff",
    "3",
]


@pytest.mark.parametrize("text", HOSTILE, ids=["lists", "objects", "digits", "depth", "latin-1", "number"])
def test_hostile_json_is_refused_in_every_file(converted, tmp_path, refuses_to_load, text):
    raw = text.encode("latin-1")
    source = write_checkpoint(tmp_path / "src", small_llada(), {})
    (source / INDEX).write_bytes(raw)
    assert INDEX in refuses_to_load(source)
    (source / "config.json").write_bytes(raw)
    assert "config.json" in refuses_to_load(source)
    (tmp_path / "t.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    refused(lambda: read_header(tmp_path / "t.safetensors"), "t.safetensors")
    for name in ("manifest.json", "spec.json"):
        (converted / name).write_bytes(raw)
        assert name in refuses_to_load(converted)


def test_a_json_file_that_is_absent_or_a_directory_is_refused(tmp_path):
    refused(lambda: load_json(tmp_path / "x.json"), "x.json: file is missing")
    (tmp_path / "config.json").mkdir()
    refused(lambda: read_config(tmp_path), "config.json: cannot be read")


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_numbers_beyond_the_range_of_floats_are_refused(key):
    refused(lambda: spec_from_config(small_llada(**{key: 10**400}), source="config.json"), "config.json", key)


def test_sizes_that_no_model_has_are_refused_at_once():
    refused(lambda: spec_from_config(small_llada(n_layers=10**9), source="config.json"), "n_layers is 1000000000")
    refused(lambda: spec_from_config(small_llada(d_model=2**40), source="config.json"), "d_model")


@pytest.mark.parametrize(
    ("name", "words"), [("~nouser_/x", "~nouser_"), ("x" * 300, "xxx"), ("", "empty"), ("a\0b", "a")]
)
def test_odd_model_names_are_refused(capsys, tmp_path, name, words):
    refused(lambda: load_model(name), words)
    fails(capsys, [name, tmp_path / "out"], words)
    fails(capsys, ["verify", "tiny", name], words)


def test_a_shard_name_too_long_for_the_system_is_refused(tmp_path, refuses_to_load):
    source = write_checkpoint(tmp_path / "src", small_llada(), {})
    shard = "s" * 300 + ".safetensors"
    (source / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    message = refuses_to_load(source)
    assert shard in message and "file is missing" in message


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_destinations_that_cannot_be_made_are_refused(tmp_path, capsys, to):
    (tmp_path / "file").write_text("x")
    source = checkpoint("llada_1layer")
    for below in ("x", "x/y"):
        fails(capsys, [source, tmp_path / "file" / below, "--to", to], f"{tmp_path / 'file'} is not a directory")
    fails(capsys, [source, tmp_path / ("d" * 250), "--to", to], "ddd: cannot be made")
    fails(capsys, [source, "", "--to", to], "destination's name is empty")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_embedded_model_is_known_by_its_name(tmp_path, capsys):
    assert main(["verify", "tiny", "tiny", "--no-logits"]) == 0
    assert main(["tiny", str(tmp_path / "o")]) == 0
    capsys.readouterr()
    assert load_spec(tmp_path / "o") == load_spec("tiny")


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
def test_a_directory_whose_name_is_not_utf8_loads(tmp_path, capsys):
    source = tmp_path / os.fsdecode(b"m\xff")
    assert main(["tiny", str(source), "--to", "hf"]) == 0
    assert "m\ufffd: llada" in capsys.readouterr().out
    model, tokenizer = load(source)
    assert model.spec == load_spec("tiny") and tokenizer is not None


def test_the_shard_size_option_is_named(tmp_path, capsys):
    arguments = [checkpoint("llada_1layer"), tmp_path / "out", "--to", "hf", "--max-shard-bytes"]
    fails(capsys, [*arguments, 0], "--max-shard-bytes 0 is not accepted")


def test_a_damaged_configuration_stops_a_cast(converted, tmp_path):
    (converted / "config.json").write_text("{")
    refused(lambda: to_orbax(converted, tmp_path / "o", dtype="bfloat16"), "config.json")
    assert list(tmp_path.iterdir()) == []
