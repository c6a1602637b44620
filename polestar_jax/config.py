"""Reading a checkpoint's ``config.json`` into a :class:`ModelSpec`.

Two dialects are read: LLaDA's own keys (``d_model``, ``n_layers``, ...) and the Llama-like keys that Dream uses
(``hidden_size``, ``num_hidden_layers``, ...). No essential key has a default, because the published configuration
classes fall back to sizes and switches of other models; whatever would change the forward pass is refused by name.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from polestar_jax.errors import InputError
from polestar_jax.jsonfile import finite_float, load_json
from polestar_jax.spec import LARGEST, MOST_LAYERS, Family, ModelSpec

Config = dict[str, Any]

_log = logging.getLogger(__name__)

_ARCHITECTURES: dict[str, Family] = {"LLaDAModelLM": "llada", "DreamModel": "dream"}
_MODEL_TYPES: dict[str, Family] = {"llada": "llada", "Dream": "dream", "dream": "dream"}
_REFUSED = {
    "LlavaLLaDAModelLM": "LLaDA-V (text and images) is not supported",
    "llava_llada": "LLaDA-V (text and images) is not supported",
    "DreamForCausalLM": "Dream reasoner checkpoints (block-wise, logits not shifted) are not supported",
}

# Keys under which one size stands, LLaDA's name first.
_D_MODEL = ("d_model", "hidden_size")
_N_LAYERS = ("n_layers", "num_hidden_layers")
_N_HEADS = ("n_heads", "num_attention_heads")
_N_KV_HEADS = ("n_kv_heads", "num_key_value_heads")
_D_FF = ("mlp_hidden_size", "intermediate_size")
_MAX_LENGTH = ("max_sequence_length", "max_position_embeddings")

# Switches of the forward pass: the values it is written for. A key whose class default is another value must be there.
_LLADA_REQUIRED = {
    "block_type": ("llama",),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "include_bias": (False,),
    "weight_tying": (False,),
}
_LLADA_OPTIONAL = {
    "alibi": (False,),
    "include_qkv_bias": (False,),
    "bias_for_layer_norm": (False,),
    "attention_layer_norm": (False,),
    "layer_norm_with_affine": (True,),
    "block_group_size": (1,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "hidden_act": ("silu",),
}
_LLAMA_REQUIRED = {"hidden_act": ("silu",), "tie_word_embeddings": (False,)}
_LLAMA_OPTIONAL = {"use_sliding_window": (False,), "mlp_bias": (False,), "use_qk_norm": (False,)}

# Ids of the published vocabularies. A smaller table (tests, the embedded model) defines its own in config.json.
_LLADA_BOS, _LLADA_MASK, _LLADA_END_OF_TURN = 126080, 126336, 126348
_DREAM_MASK, _DREAM_END_OF_TURN = 151666, 151645


def read_config(directory: Path) -> Config:
    """The object in ``directory/config.json``; InputError where it is absent or no JSON object."""
    path = directory / "config.json"
    if not os.path.lexists(path):
        raise InputError(f"{directory}: no config.json; a model directory holds config.json and its weights")
    return load_json(path)


def spec_from_config(config: Config, *, source: str) -> ModelSpec:
    """The spec a ``config.json`` describes.

    Args:
      config: the parsed file.
      source: what to call it in messages, usually its path.

    Raises:
      InputError: an essential key is missing, two keys contradict each other, an id lies outside the embedding table,
        or the model needs something this forward pass does not do. The message names the keys and their values.
    """
    family = _family(config, source)
    _check_switches(config, family, source)
    d_model, n_heads = _size(config, _D_MODEL, source), _size(config, _N_HEADS, source)
    vocab_size = _vocab_size(config, source)
    eos_id, mask_id = _id(config, "eos_token_id", vocab_size, source), _id(config, "mask_token_id", vocab_size, source)
    bos_id = _id(config, "bos_token_id", vocab_size, source, required=False)
    _id(config, "pad_token_id", vocab_size, source, required=False)
    _check_mask(family, mask_id, eos_id, vocab_size, source)
    if family == "llada":
        end_of_turn = _LLADA_END_OF_TURN
        bos_id = _LLADA_BOS if bos_id is None and vocab_size > _LLADA_END_OF_TURN else bos_id
    else:
        end_of_turn = _DREAM_END_OF_TURN
    stops = (eos_id, end_of_turn) if vocab_size > end_of_turn and eos_id != end_of_turn else (eos_id,)
    spec = ModelSpec(
        family=family,
        d_model=d_model,
        n_layers=_size(config, _N_LAYERS, source),
        n_heads=n_heads,
        n_kv_heads=_kv_heads(config, n_heads, source),
        head_dim=_head_dim(config, d_model, n_heads, source),
        d_ff=_size(config, _D_FF, source),
        vocab_size=vocab_size,
        max_length=_size(config, _MAX_LENGTH, source),
        rope_theta=_rope_theta(config, source),
        norm_eps=_positive(config, "rms_norm_eps", source),
        qkv_bias=family == "dream",
        logit_shift=1 if family == "dream" else 0,
        mask_id=mask_id,
        eos_id=eos_id,
        bos_id=bos_id,
        stop_ids=stops,
    )
    _log.info("%s: %s model (%s)", source, family, describe_decision(config))
    return spec


def describe_decision(config: Config) -> str:
    """The values the family was decided by, for logs and messages."""
    keys = ("architectures", "model_type", "mask_token_id")
    return ", ".join(f"{key} {json.dumps(config.get(key))}" for key in keys)


def _family(config: Config, source: str) -> Family:
    architectures = _present(config, ("architectures",), source)
    model_type = _present(config, ("model_type",), source)
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise InputError(f"{source}: architectures is {architectures!r}; expected a list of one class name")
    [architecture] = architectures
    for key, value in (("architectures", architecture), ("model_type", model_type)):
        if isinstance(value, str) and value in _REFUSED:
            raise InputError(f"{source}: {key} says {value}: {_REFUSED[value]}; accepted: LLaDA text and Dream models")
    for key, value, known in (
        ("architectures", architecture, _ARCHITECTURES),
        ("model_type", model_type, _MODEL_TYPES),
    ):
        if not isinstance(value, str) or value not in known:
            raise InputError(f"{source}: {key} says {value!r}; accepted: {', '.join(known)}")
    family = _ARCHITECTURES[architecture]
    if _MODEL_TYPES[model_type] != family:
        raise InputError(f"{source}: architectures says {architecture!r} but model_type says {model_type!r}")
    vision = [key for key in config if key.startswith("mm_") or key == "vision_config"]
    if vision:
        raise InputError(
            f"{source}: architectures says {architecture!r} but {vision[0]} = {config[vision[0]]!r} belongs to LLaDA-V,"
            " which is not supported"
        )
    for key in ("block_size", "bd_size"):
        if family == "dream" and config.get(key) is not None:
            raise InputError(
                f"{source}: architectures says {architecture!r} but {key} = {config[key]!r} belongs to Dream's"
                " block-wise descendants, which are not supported"
            )
    return family


def _llada_dialect(config: Config) -> bool:
    """Whether a configuration is written in LLaDA's own keys: any of its sizes is."""
    return any(keys[0] in config for keys in (_D_MODEL, _N_LAYERS, _N_HEADS, _D_FF, _MAX_LENGTH))


def _check_mask(family: Family, mask_id: int, eos_id: int, vocab_size: int, source: str) -> None:
    """With a published vocabulary the mask id is known; another one means another model under the same name."""
    if mask_id == eos_id:
        raise InputError(f"{source}: mask_token_id and eos_token_id are both {mask_id}")
    expected, published = (
        (_LLADA_MASK, vocab_size > _LLADA_END_OF_TURN) if family == "llada" else (_DREAM_MASK, vocab_size > _DREAM_MASK)
    )
    if published and mask_id != expected:
        raise InputError(
            f"{source}: mask_token_id is {mask_id} with vocab_size {vocab_size}; a {family} model of this vocabulary"
            f" has {expected}"
        )


def _check_switches(config: Config, family: Family, source: str) -> None:
    if config.get("quantization_config") is not None:
        raise InputError(f"{source}: quantization_config is set; quantized weights are not read, use BF16, F16 or F32")
    if _llada_dialect(config):
        required, optional = _LLADA_REQUIRED, _LLADA_OPTIONAL
    else:
        required, optional = _LLAMA_REQUIRED, dict(_LLAMA_OPTIONAL, attention_bias=(family == "dream",))
    for key, accepted in required.items():
        _check_switch(key, _present(config, (key,), source), accepted, source)
    for key, accepted in optional.items():
        if config.get(key) is not None:
            _check_switch(key, config[key], accepted, source)


def _check_switch(key: str, value: object, accepted: tuple[object, ...], source: str) -> None:
    if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted):
        raise InputError(
            f"{source}: {key} is {json.dumps(value)}; only {' or '.join(json.dumps(v) for v in accepted)} is supported"
        )


def _present(config: Config, keys: tuple[str, ...], source: str) -> Any:
    """The value under any of ``keys``, which must agree where several are there; null counts as missing."""
    found = [key for key in keys if config.get(key) is not None]
    if not found:
        state = "is null" if any(key in config for key in keys) else "is missing"
        raise InputError(f"{source}: key {' or '.join(keys)} {state}; it has no default")
    for key in found[1:]:
        if config[key] != config[found[0]]:
            raise InputError(
                f"{source}: {found[0]} is {config[found[0]]!r} but {key} is {config[key]!r}; they must be equal"
            )
    return config[found[0]]


def _size(config: Config, keys: tuple[str, ...], source: str) -> int:
    value = _present(config, keys, source)
    largest = MOST_LAYERS if keys is _N_LAYERS else LARGEST
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        name = next(key for key in keys if config.get(key) is not None)
        raise InputError(f"{source}: {name} is {value!r}; expected a positive integer, at most {largest}")
    return value


def _positive(config: Config, key: str, source: str) -> float:
    return _positive_number(_present(config, (key,), source), key, source)


def _positive_number(value: object, key: str, source: str) -> float:
    number = finite_float(value)
    if number is None or number <= 0:
        raise InputError(f"{source}: {key} is {value!r}; expected a positive number")
    return number


def _id(config: Config, key: str, vocab_size: int, source: str, *, required: bool = True) -> int | None:
    if not required and config.get(key) is None:
        return None
    value = _present(config, (key,), source)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{source}: {key} is {value!r}; expected one token id")
    if not 0 <= value < vocab_size:
        raise InputError(f"{source}: {key} is {value}, outside the embedding table of {vocab_size} rows")
    return value


def _vocab_size(config: Config, source: str) -> int:
    """Rows of the table: LLaDA's ``embedding_size`` (at least ``vocab_size``), elsewhere ``vocab_size``."""
    vocab_size = _size(config, ("vocab_size",), source)
    if not _llada_dialect(config):
        return vocab_size
    rows = _size(config, ("embedding_size",), source)
    if rows < vocab_size:
        raise InputError(f"{source}: embedding_size is {rows} but vocab_size is {vocab_size}")
    return rows


def _kv_heads(config: Config, n_heads: int, source: str) -> int:
    heads = _size(config, _N_KV_HEADS, source)
    if config.get("multi_query_attention") and heads != 1:
        raise InputError(f"{source}: multi_query_attention is true but n_kv_heads is {heads}")
    if n_heads % heads:
        raise InputError(f"{source}: {n_heads} attention heads cannot share {heads} key/value heads evenly")
    return heads


def _head_dim(config: Config, d_model: int, n_heads: int, source: str) -> int:
    if d_model % n_heads:
        raise InputError(f"{source}: width {d_model} is not divisible by {n_heads} attention heads")
    head_dim = d_model // n_heads
    if config.get("head_dim", head_dim) not in (None, head_dim):
        raise InputError(f"{source}: head_dim is {config['head_dim']!r} but width / heads is {head_dim}")
    if head_dim % 2:
        raise InputError(f"{source}: head dimension {head_dim} (width / heads) is odd; rotary embedding needs it even")
    return head_dim


def _rope_theta(config: Config, source: str) -> float:
    """The rotary base: on top level, or (files saved by transformers 5) in ``rope_parameters``; all must agree."""
    found: dict[str, float] = {}
    if config.get("rope_theta") is not None:
        found["rope_theta"] = _positive(config, "rope_theta", source)
    for key in ("rope_parameters", "rope_scaling"):
        block = config.get(key)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise InputError(f"{source}: {key} is {block!r}; expected an object or null")
        for name, value in block.items():
            if name == "rope_theta" and value is not None:
                found[f"{key}.rope_theta"] = _positive_number(value, f"{key}.rope_theta", source)
            elif name in ("rope_type", "type") and value != "default":
                raise InputError(f"{source}: {key}.{name} is {value!r}; only 'default' (no scaling) is supported")
            elif name not in ("rope_theta", "rope_type", "type") and value not in (None, 1):
                raise InputError(f"{source}: {key}.{name} is {value!r}; rotary scaling is not supported")
    if not found:
        raise InputError(f"{source}: key rope_theta (or rope_parameters.rope_theta) is missing; it has no default")
    (first, theta), *others = found.items()
    for name, value in others:
        if value != theta:
            raise InputError(f"{source}: {first} is {theta!r} but {name} is {value!r}; they must be equal")
    return theta
