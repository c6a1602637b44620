"""Small checkpoints for the conversion tests, and reading safetensors files by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

from convert.keymap import expected_tensors
from polestar_jax.config import spec_from_config

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = ("llada", "llada_gqa", "llada_1layer", "dream")
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "I64": np.int64, "U8": np.uint8}


def checkpoint(name: str) -> Path:
    return DATA / "checkpoints" / name


def config(name: str) -> dict:
    """``config.json`` of a checkpoint or of a published model."""
    path = checkpoint(name) / "config.json" if name in CHECKPOINTS else DATA / "configs" / f"{name}.json"
    return json.loads(path.read_text())


def small_llada(**changes: object) -> dict:
    """Configuration of a LLaDA of 2 layers, width 16, 2 heads, MLP 24, vocabulary 40."""
    sizes = dict(d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, mlp_hidden_size=24, vocab_size=40, embedding_size=40)
    return config("llada") | sizes | dict(eos_token_id=37, pad_token_id=37, mask_token_id=39) | changes


def small_dream(**changes: object) -> dict:
    """Configuration of a Dream of 2 layers, width 16, 4 heads sharing 2 key/value heads, MLP 24, vocabulary 40."""
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    ids = dict(eos_token_id=37, bos_token_id=37, pad_token_id=37, mask_token_id=39)
    return config("dream") | sizes | dict(intermediate_size=24, vocab_size=40) | ids | changes


def random_tensors(model: dict, seed: int = 0, dtype: str = "F32") -> dict[str, np.ndarray]:
    """Random values under every name the configuration calls for, in the order of the forward pass."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_tensors(spec_from_config(model, source="test")).items():
        scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
        offset = 1.0 if "norm" in name or "ln_f" in name else 0.0
        tensors[name] = (offset + scale * rng.standard_normal(shape)).astype(DTYPES[dtype])
    return tensors


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict | None = None) -> None:
    """A safetensors file, put together by hand."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict = {"__metadata__": {"format": "pt"} if metadata is None else metadata}
    data = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_checkpoint(
    directory: Path, model: dict, tensors: dict[str, np.ndarray], shards: dict[str, list[str]] | None = None
) -> Path:
    """A Hugging Face directory: one file, or the named shards with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model, indent=2))
    if shards is None:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    for file, names in shards.items():
        write_safetensors(directory / file, {name: tensors[name] for name in names})
    weight_map = {name: file for file, names in shards.items() for name in names}
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def by_kind(names: list[str]) -> dict[str, list[str]]:
    """Five shards grouped by kind of tensor, not by layer, as the published checkpoints are."""
    kinds = (
        ("attn_out", "o_proj", "wte", "embed_tokens"),
        ("transformer.ff_out", "lm_head", "norm", "ln_f"),
        ("q_proj", "k_proj"),
        ("v_proj", "ff_proj", "gate_proj"),
        ("up_proj", "ff_out", "down_proj"),
    )
    shards: dict[str, list[str]] = {f"model-{i:05d}-of-00005.safetensors": [] for i in range(1, 6)}
    for name in names:
        kind = next(i for i, words in enumerate(kinds) if any(word in name for word in words))
        list(shards.values())[kind].append(name)
    return shards


def raw_header(path: Path) -> tuple[dict, int]:
    """A file's header, parsed by hand, and where its data starts."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def raw_tensors(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> (dtype, shape, bytes) of a directory's tensors, through its index where there is one."""
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else None
    files = sorted(set(weight_map.values())) if weight_map else ["model.safetensors"]
    result = {}
    for file in files:
        header, base = raw_header(directory / file)
        data = (directory / file).read_bytes()
        for name, entry in header.items():
            if name != "__metadata__":
                assert weight_map is None or weight_map[name] == file
                begin, end = (base + offset for offset in entry["data_offsets"])
                result[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return result


def copy_of(name: str, directory: Path) -> Path:
    """A writable copy of a checkpoint."""
    shutil.copytree(checkpoint(name), directory)
    return directory
