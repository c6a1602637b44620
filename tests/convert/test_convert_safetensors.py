"""Reading safetensors: damaged, incomplete and contradictory checkpoints are refused, naming file and tensor."""

import json
import shutil

import numpy as np
import pytest

from convert.index import list_tensors
from convert.safetensors_file import read_header, read_rows
from polestar_jax.errors import InputError
from polestar_jax.loading import load_model
from tests.convert.checkpoints import (
    by_kind,
    random_tensors,
    raw_header,
    small_dream,
    small_llada,
    write_checkpoint,
    write_safetensors,
)

INDEX = "model.safetensors.index.json"
Q1 = "model.transformer.blocks.1.q_proj.weight"


@pytest.fixture
def three_shards(tmp_path):
    """A small LLaDA in three shards; Q1 lies in the second."""
    tensors = random_tensors(small_llada())
    names = list(tensors)
    shards = {f"model-{i + 1:05d}-of-00003.safetensors": names[(i + 1) % 3 :: 3] for i in range(3)}
    directory = write_checkpoint(tmp_path / "m", small_llada(), tensors, shards)
    assert Q1 in shards["model-00002-of-00003.safetensors"]
    return directory


def rewrite_header(path, change):
    """Apply ``change`` to a file's header, keeping its data."""
    header, base = raw_header(path)
    data = path.read_bytes()[base:]
    text = json.dumps(change(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_b23_the_intact_checkpoint_loads(three_shards):
    assert load_model(three_shards).spec.n_layers == 2


def test_b23_a_missing_shard_is_named(three_shards, refuses_to_load):
    (three_shards / "model-00002-of-00003.safetensors").unlink()
    message = refuses_to_load(three_shards)
    assert "model-00002-of-00003.safetensors" in message and "model.transformer." in message


def test_b23_a_tensor_absent_from_its_shard_is_named(three_shards, refuses_to_load):
    shard = three_shards / "model-00002-of-00003.safetensors"
    tensors = {name: read_rows(entry, 0, entry.shape[0]) for name, entry in read_header(shard).items()}
    del tensors[Q1]
    write_safetensors(shard, tensors)
    message = refuses_to_load(three_shards)
    assert Q1 in message and "model-00002-of-00003.safetensors" in message


def test_b23_a_stale_shard_beside_the_index_is_ignored(three_shards):
    expected = load_model(three_shards)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors", "old.safetensors"):
        write_safetensors(three_shards / name, random_tensors(small_llada(), seed=9))
    loaded = load_model(three_shards)
    np.testing.assert_array_equal(np.asarray(loaded.embedding[...]), np.asarray(expected.embedding[...]))
    np.testing.assert_array_equal(np.asarray(loaded.layers[1].qkv[...]), np.asarray(expected.layers[1].qkv[...]))


@pytest.mark.parametrize("cut", [1, 700, "header", 5])
def test_b23_a_truncated_shard_is_named(three_shards, refuses_to_load, cut):
    shard = three_shards / "model-00003-of-00003.safetensors"
    data = shard.read_bytes()
    _, base = raw_header(shard)
    shard.write_bytes(data[: base - 3] if cut == "header" else data[:5] if cut == 5 else data[:-cut])
    message = refuses_to_load(three_shards)
    assert "model-00003-of-00003.safetensors" in message
    if isinstance(cut, int) and cut != 5:
        assert "truncated inside tensor model.transformer." in message


def test_b23_a_tensor_the_index_does_not_name_is_named(three_shards, refuses_to_load):
    index = json.loads((three_shards / INDEX).read_text())
    del index["weight_map"][Q1]
    (three_shards / INDEX).write_text(json.dumps(index))
    message = refuses_to_load(three_shards)
    assert Q1 in message and "model-00002-of-00003.safetensors" in message


def test_b23_a_tensor_in_two_indexed_shards_is_named(three_shards, refuses_to_load):
    shard = three_shards / "model-00001-of-00003.safetensors"
    tensors = {name: read_rows(entry, 0, entry.shape[0]) for name, entry in read_header(shard).items()}
    write_safetensors(shard, tensors | {Q1: np.zeros((16, 16), np.float32)})
    message = refuses_to_load(three_shards)
    assert Q1 in message and "model-00001-of-00003" in message and "model-00002-of-00003" in message


def test_b23_shards_without_their_index_are_an_incomplete_download(three_shards, refuses_to_load):
    (three_shards / INDEX).unlink()
    assert INDEX in refuses_to_load(three_shards)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "b", "a": "c"}}']
)
def test_b23_a_broken_index_is_named(three_shards, refuses_to_load, text):
    (three_shards / INDEX).write_text(text)
    assert INDEX in refuses_to_load(three_shards)


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_index_may_only_name_safetensors_files_beside_it(three_shards, refuses_to_load, shard):
    index = json.loads((three_shards / INDEX).read_text())
    index["weight_map"][Q1] = shard
    (three_shards / INDEX).write_text(json.dumps(index))
    assert shard in refuses_to_load(three_shards)


def test_pickled_weights_are_refused_by_name(tmp_path, refuses_to_load):
    directory = write_checkpoint(tmp_path / "m", small_llada(), random_tensors(small_llada()))
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "pytorch_model.bin" in refuses_to_load(directory)
    (directory / "pytorch_model.bin").unlink()
    assert "model.safetensors" in refuses_to_load(directory)


def test_a_directory_of_symbolic_links_loads(tmp_path):
    """As the Hugging Face cache lays out its snapshots."""
    directory = write_checkpoint(tmp_path / "blobs", small_dream(), random_tensors(small_dream()))
    (tmp_path / "snapshot").mkdir()
    for path in directory.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert load_model(tmp_path / "snapshot").spec.family == "dream"


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "F64"])
def test_weights_of_unsupported_types_are_refused_by_name(tmp_path, refuses_to_load, dtype):
    directory = write_checkpoint(tmp_path / "m", small_llada(), random_tensors(small_llada()))

    def change(header):
        itemsize = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "F64": 8}[dtype]
        entry = header[Q1]
        begin, end = entry["data_offsets"]
        entry["dtype"], entry["shape"] = dtype, [16, (end - begin) // itemsize // 16]
        return header

    rewrite_header(directory / "model.safetensors", change)
    for options in ({}, {"dtype": "bfloat16"}):
        message = refuses_to_load(directory, **options)
        assert dtype in message and Q1 in message and "model.safetensors" in message and "BF16" in message


def one_tensor_file(tmp_path, change):
    path = tmp_path / "t.safetensors"
    write_safetensors(path, {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)})
    rewrite_header(path, change)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h | {"b": h["b"] | {"data_offsets": [20, 36]}}, ["b", "overlaps"]),
        (lambda h: h | {"b": h["b"] | {"data_offsets": [28, 44]}}, ["b", "gap"]),
        (lambda h: h | {"b": h["b"] | {"shape": [5]}}, ["b", "16 bytes", "20"]),
        (lambda h: h | {"b": h["b"] | {"shape": [-4]}}, ["b", "shape"]),
        (lambda h: h | {"b": h["b"] | {"shape": [4.0]}}, ["b", "shape"]),
        (lambda h: h | {"b": {"dtype": "F32", "shape": [4]}}, ["b", "data_offsets"]),
        (lambda h: h | {"b": h["b"] | {"dtype": "Q4_K"}}, ["b", "Q4_K"]),
        (lambda h: {k: v for k, v in h.items() if k != "b"}, ["16 bytes after"]),
        (lambda h: [h], ["not an object"]),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, change, words):
    path = one_tensor_file(tmp_path, change)
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert all(word in str(caught.value) for word in [str(path), *words])


def test_duplicate_names_in_a_header_are_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    text = ("{" + entry % (0, 4) + "," + entry % (4, 8) + "}").encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(InputError, match="duplicate key a"):
        read_header(path)


def test_files_that_are_no_safetensors_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    cases = {
        b"": "no safetensors file",
        b"\x80\x02}q\x00." * 20: "no safetensors file",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n": "Git LFS pointer",
        (4).to_bytes(8, "little") + b"\xff\xff\xff\xff": "no valid JSON",
    }
    for data, words in cases.items():
        path.write_bytes(data)
        with pytest.raises(InputError, match=words):
            list_tensors(tmp_path)


def test_rows_are_read_where_they_are(tmp_path):
    tensors = random_tensors(small_dream(), dtype="BF16")
    directory = write_checkpoint(tmp_path / "m", small_dream(), tensors, by_kind(list(tensors)))
    entries = list_tensors(directory)
    assert set(entries) == set(tensors)
    for name, array in tensors.items():
        middle = array.shape[0] // 2
        assert read_rows(entries[name], 0, array.shape[0]).tobytes() == array.tobytes()
        assert read_rows(entries[name], middle, middle + 2).tobytes() == array[middle : middle + 2].tobytes()


def test_nothing_beside_the_checkpoint_is_needed(tmp_path):
    directory = write_checkpoint(tmp_path / "m", small_llada(), random_tensors(small_llada()))
    shutil.copytree(directory, tmp_path / "elsewhere")
    shutil.rmtree(directory)
    assert load_model(tmp_path / "elsewhere").spec.d_model == 16
