"""Hugging Face -> orbax -> Hugging Face keeps every bit; what does not fit is refused; verify tells what differs."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from convert import orbax_dir
from convert.to_hf import to_hf
from convert.to_orbax import to_orbax
from convert.verify import verify
from polestar_jax.errors import InputError
from polestar_jax.loading import load_model
from tests.convert.checkpoints import (
    CHECKPOINTS,
    by_kind,
    checkpoint,
    config,
    copy_of,
    random_tensors,
    raw_header,
    raw_tensors,
    small_dream,
    small_llada,
    write_checkpoint,
)
from tests.oracles.numpy_model import read_tensors

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_golden_checkpoints_resharded_by_kind_come_back_byte_equal(tmp_path, name):
    tensors = read_tensors(checkpoint(name))
    shards = by_kind(list(tensors))
    assert all(shards.values()) and len(shards) == 5
    source = write_checkpoint(tmp_path / "src", config(name), tensors, shards)
    done = to_orbax(source, tmp_path / "orbax")
    assert (done.tensors, done.bytes, done.dtypes) == (len(tensors), sum(t.nbytes for t in tensors.values()), ("F32",))
    for other in (source, checkpoint(name)):
        report = verify(other, tmp_path / "orbax")
        assert report.same and report.tensors == len(tensors) and report.max_logit_difference == 0.0
    to_hf(tmp_path / "orbax", tmp_path / "back", max_shard_bytes=250_000)
    assert raw_tensors(tmp_path / "back") == raw_tensors(checkpoint(name))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config(name)


def odd_bits(tensors):
    """Put signed zeros, subnormals, infinities and NaNs with payloads into every tensor."""
    patterns = {
        2: [0x8000, 0x0001, 0x8003, 0x7FA5, 0xFFC1, 0x7F81, 0xFF80],
        4: [0x80000000, 0x00000001, 0x7F800ABC, 0xFFC00001],
    }
    result = {}
    for name, array in tensors.items():
        array = array.copy()
        raw = array.reshape(-1).view({2: np.uint16, 4: np.uint32}[array.itemsize])
        raw[: len(patterns[array.itemsize])] = patterns[array.itemsize]
        result[name] = array
    return result


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("model", [small_llada(), small_llada(n_heads=2, n_kv_heads=1), small_dream()])
def test_b20_b24_round_trip_keeps_every_bit(tmp_path, model, dtype):
    tensors = odd_bits(random_tensors(model, dtype=dtype))
    source = write_checkpoint(tmp_path / "src", model, tensors)
    to_orbax(source, tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "back")
    back = raw_tensors(tmp_path / "back")
    assert back == raw_tensors(source)
    assert {name: entry[0] for name, entry in back.items()} == dict.fromkeys(tensors, dtype)
    assert verify(source, tmp_path / "back", logits=False).same


@pytest.mark.parametrize("part_bytes", [400, 3000])
def test_arrays_cut_into_many_parts_are_put_together_again(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(orbax_dir, "PART_BYTES", part_bytes)
    model = small_dream(num_hidden_layers=1)
    source = write_checkpoint(tmp_path / "src", model, random_tensors(model, dtype="BF16"))
    to_orbax(source, tmp_path / "orbax")
    parts = [path.name for path in (tmp_path / "orbax" / "weights").iterdir()]
    assert len(parts) > {400: 12, 3000: 3}[part_bytes]
    to_hf(tmp_path / "orbax", tmp_path / "back")
    assert raw_tensors(tmp_path / "back") == raw_tensors(source)
    np.testing.assert_array_equal(
        np.asarray(load_model(tmp_path / "orbax").layers[0].gate_up[...]),
        np.asarray(load_model(source).layers[0].gate_up[...]),
    )


def test_b24_mixed_types_are_kept_and_load_as_stored(tmp_path):
    model = small_llada()
    tensors = {
        name: array.astype(np.float32 if array.ndim == 1 else np.float16 if "ff_out" in name else ml_dtypes.bfloat16)
        for name, array in random_tensors(model).items()
    }
    source = write_checkpoint(tmp_path / "src", model, tensors)
    done = to_orbax(source, tmp_path / "orbax")
    assert done.dtypes == ("BF16", "F16", "F32")
    to_hf(tmp_path / "orbax", tmp_path / "back")
    assert raw_tensors(tmp_path / "back") == raw_tensors(source)
    for directory in (source, tmp_path / "orbax"):
        loaded = load_model(directory)
        assert loaded.norm.weight[...].dtype == np.float32 and loaded.head[...].dtype == np.float16
        assert loaded.layers[0].qkv[...].dtype == loaded.embedding[...].dtype == ml_dtypes.bfloat16
        assert {np.asarray(load_model(directory, dtype="float32").head[...]).dtype} == {np.dtype(np.float32)}


def test_tensors_that_share_an_array_must_share_a_type(tmp_path, refuses_to_load):
    model = small_llada()
    tensors = random_tensors(model)
    name = "model.transformer.blocks.1.k_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    source = write_checkpoint(tmp_path / "src", model, tensors)
    message = refuses_to_load(source)
    assert name in message and "F16" in message and "F32" in message
    to_orbax(source, tmp_path / "orbax", dtype="float32")
    assert verify(source, tmp_path / "orbax", logits=False).differences == (f"{name}: dtype F16 and F32",)


@pytest.mark.parametrize("name", ["llada_gqa", "dream"])
def test_casting_rounds_to_nearest_even_everywhere(tmp_path, name):
    source = checkpoint(name)
    to_orbax(source, tmp_path / "orbax", dtype="bfloat16")
    to_hf(source, tmp_path / "hf", dtype="bfloat16")
    expected = {n: array.astype(ml_dtypes.bfloat16).tobytes() for n, array in read_tensors(source).items()}
    assert {n: raw for n, (_, _, raw) in raw_tensors(tmp_path / "hf").items()} == expected
    assert verify(tmp_path / "hf", tmp_path / "orbax").same
    loaded = [load_model(source, dtype="bfloat16"), load_model(tmp_path / "orbax"), load_model(tmp_path / "hf")]
    for model in loaded[1:]:
        a, b = (np.asarray(m.layers[1].qkv[...]).view(np.uint16) for m in (loaded[0], model))
        np.testing.assert_array_equal(a, b)
    if name == "dream":
        assert json.loads((tmp_path / "orbax" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    to_hf(tmp_path / "orbax", tmp_path / "wide", dtype="float32")
    wide = read_tensors(tmp_path / "wide")
    assert all(
        array.tobytes() == np.frombuffer(expected[n], ml_dtypes.bfloat16).astype(np.float32).tobytes()
        for n, array in wide.items()
    )


@pytest.mark.parametrize("convert", [to_orbax, to_hf])
def test_values_beyond_the_narrower_range_are_refused_naming_the_tensor(tmp_path, convert):
    tensors = random_tensors(small_llada())
    tensors["model.transformer.ln_f.weight"][3] = 70000.0
    source = write_checkpoint(tmp_path / "src", small_llada(), tensors)
    with pytest.raises(InputError, match=r"ln_f\.weight.*float16"):
        convert(source, tmp_path / "out", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    with pytest.raises(InputError, match="float8"):
        convert(source, tmp_path / "out", dtype="float8")
    convert(source, tmp_path / "out", dtype="bfloat16")


def test_b26_exported_files_are_what_transformers_accepts(tmp_path):
    to_hf(checkpoint("dream"), tmp_path / "hf", max_shard_bytes=200_000)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert (
        files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)] and len(files) > 3
    )
    assert sorted(set(index["weight_map"].values())) == files
    total = 0
    for file in files:
        header, base = raw_header(tmp_path / "hf" / file)
        assert header.pop("__metadata__") == {"format": "pt"} and base % 8 == 0
        assert {name for name, shard in index["weight_map"].items() if shard == file} == set(header)
        size = sum(end - begin for begin, end in (entry["data_offsets"] for entry in header.values()))
        assert (tmp_path / "hf" / file).stat().st_size == base + size and size <= 200_000
        total += size
        with safe_open(tmp_path / "hf" / file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"} and set(opened.keys()) == set(header)
    assert (
        index["metadata"]["total_size"]
        == total
        == sum(len(raw) for _, _, raw in raw_tensors(checkpoint("dream")).values())
    )


def test_b26_one_file_where_all_fits_and_one_each_for_large_tensors(tmp_path):
    to_hf(checkpoint("llada_1layer"), tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").exists() and not (tmp_path / "one" / INDEX).exists()
    to_hf(checkpoint("llada_1layer"), tmp_path / "many", max_shard_bytes=1)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 12
    assert raw_tensors(tmp_path / "one") == raw_tensors(tmp_path / "many") == raw_tensors(checkpoint("llada_1layer"))
    with pytest.raises(InputError, match="0"):
        to_hf(checkpoint("llada_1layer"), tmp_path / "none", max_shard_bytes=0)


def test_b20_missing_unknown_and_misshapen_tensors_are_listed_together(tmp_path, refuses_to_load):
    model = small_llada()
    tensors = random_tensors(model)
    gone, wrong = "model.transformer.ln_f.weight", "model.transformer.blocks.0.k_proj.weight"
    del tensors[gone]
    tensors[wrong] = tensors[wrong][:8]
    tensors["model.transformer.blocks.2.q_proj.weight"] = np.ones((16, 16), np.float32)
    source = write_checkpoint(tmp_path / "src", model, tensors, {"model-00001-of-00001.safetensors": list(tensors)})
    message = refuses_to_load(source)
    for words in (
        f"missing tensors: {gone}",
        "unknown tensors: model.transformer.blocks.2.q_proj.weight",
        "[8, 16] instead of [16, 16]",
    ):
        assert words in message
    assert message.count("model-00001-of-00001.safetensors") == 2
    for convert in (to_orbax, to_hf):
        with pytest.raises(InputError) as caught:
            convert(source, tmp_path / "out")
        assert str(caught.value) == message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


@pytest.mark.parametrize("model", [small_llada(), small_dream()])
def test_b20_each_missing_key_is_named(tmp_path, refuses_to_load, model):
    tensors = random_tensors(model)
    for number, name in enumerate(tensors):
        rest = {other: array for other, array in tensors.items() if other != name}
        message = refuses_to_load(write_checkpoint(tmp_path / str(number), model, rest))
        assert f"missing tensors: {name}" in message


def test_b20_unknown_keys_are_left_out_only_by_flag(tmp_path, refuses_to_load):
    tensors = random_tensors(small_llada())
    extra = {"model.transformer.blocks.0.rotary.inv_freq": np.ones(4, np.int64)}
    source = write_checkpoint(tmp_path / "src", small_llada(), tensors | extra)
    assert "inv_freq" in refuses_to_load(source)
    done = to_orbax(source, tmp_path / "orbax", allow_unknown=True)
    assert done.unknown == tuple(extra) and done.tensors == len(tensors)
    to_hf(source, tmp_path / "hf", allow_unknown=True)
    assert set(raw_tensors(tmp_path / "hf")) == set(tensors)


def test_b29_tensors_of_another_model_than_the_configuration_says(tmp_path, refuses_to_load):
    llada, dream = random_tensors(small_llada()), random_tensors(small_dream())
    message = refuses_to_load(write_checkpoint(tmp_path / "a", small_llada(), dream))
    assert "llada" in message and "model.layers.0" in message
    message = refuses_to_load(write_checkpoint(tmp_path / "b", small_dream(), llada))
    assert "dream" in message and "model.transformer.wte" in message
    vision = llada | {"model.vision_tower.vision_tower.x": np.ones(2, np.float32)}
    message = refuses_to_load(write_checkpoint(tmp_path / "c", small_llada(), vision))
    assert "llada" in message and "LLaDA-V" in message and "model.vision_tower" in message


def test_b19_files_with_gguf_names_are_not_accepted(tmp_path, refuses_to_load):
    tensors = {"token_embd.weight": np.ones((40, 16), np.float32), "blk.0.attn_q.weight": np.ones((16, 16), np.float32)}
    assert "GGUF" in refuses_to_load(write_checkpoint(tmp_path / "m", small_llada(), tensors))


def test_verify_names_the_first_differences(tmp_path):
    source = copy_of("llada_gqa", tmp_path / "a")
    to_orbax(source, tmp_path / "b")
    tensors = read_tensors(source)
    name = "model.transformer.blocks.1.v_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][5, 7] += 1.0
    changed = write_checkpoint(tmp_path / "c", config("llada_gqa"), tensors)
    report = verify(changed, tmp_path / "b")
    assert not report.same and report.difference_count == 1 and report.max_logit_difference > 0
    assert report.differences[0].startswith(f"{name}: 1 of 2048 elements differ, first at [5, 7]: ")
    tensors[name][5, 7] = -0.0
    zero = dict(tensors) | {name: tensors[name].copy()}
    zero[name][5, 7] = 0.0
    pair = [write_checkpoint(tmp_path / x, config("llada_gqa"), t) for x, t in (("d", tensors), ("e", zero))]
    report = verify(*pair)
    assert not report.same and "0x80000000" in report.differences[0] and report.max_logit_difference == 0.0


def test_verify_tells_names_shapes_types_and_specs_apart(tmp_path):
    model, tensors = small_llada(), random_tensors(small_llada())
    first = write_checkpoint(tmp_path / "a", model, tensors)
    last = list(tensors)[-1]
    fewer = write_checkpoint(tmp_path / "b", model, {n: t for n, t in tensors.items() if n != last})
    report = verify(first, fewer)
    assert report.differences == (f"{last}: only in {first}",) and report.max_logit_difference is None
    other = write_checkpoint(tmp_path / "c", model | {"rope_theta": 1e4}, tensors)
    report = verify(first, other)
    assert report.differences == ("spec rope_theta: 500000.0 and 10000.0",)
    halved = write_checkpoint(tmp_path / "d", model, tensors | {last: tensors[last][:20]})
    assert verify(first, halved).differences == (f"{last}: shape [40, 16] and [20, 16]",)
    deeper = write_checkpoint(tmp_path / "e", small_llada(n_layers=3), random_tensors(small_llada(n_layers=3)))
    report = verify(first, deeper)
    assert report.differences[0] == "spec n_layers: 2 and 3" and report.difference_count >= 10


def test_verify_compares_tensors_that_are_no_weights_too(tmp_path):
    model, tensors = small_llada(), random_tensors(small_llada())
    extra = {"model.transformer.inv_freq": np.arange(6), "model.transformer.flag": np.array(7, np.uint8)}
    first = write_checkpoint(tmp_path / "a", model, tensors | extra)
    assert verify(first, write_checkpoint(tmp_path / "b", model, tensors | extra)).same
    extra["model.transformer.inv_freq"] = np.array([0, 1, 2, 9, 4, 5])
    report = verify(first, write_checkpoint(tmp_path / "c", model, tensors | extra))
    assert report.differences == ("model.transformer.inv_freq: bytes differ from byte 24 on",)


def test_llada_without_the_leading_model_is_the_same_model(tmp_path):
    tensors = read_tensors(checkpoint("llada"))
    bare = {name.removeprefix("model."): array for name, array in tensors.items()}
    source = write_checkpoint(tmp_path / "bare", config("llada"), bare)
    assert verify(source, checkpoint("llada")).same
    to_orbax(source, tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "back")
    assert raw_tensors(tmp_path / "back") == raw_tensors(checkpoint("llada"))
    both = write_checkpoint(
        tmp_path / "both",
        config("llada"),
        tensors | {"transformer.ln_f.weight": tensors["model.transformer.ln_f.weight"]},
    )
    with pytest.raises(InputError, match=r"transformer\.ln_f\.weight"):
        to_orbax(both, tmp_path / "out")
