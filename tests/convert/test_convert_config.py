"""Reading config.json: both dialects, what is refused, and that nothing essential has a default."""

import json

import pytest

from polestar_jax.config import read_config, spec_from_config
from polestar_jax.errors import InputError
from polestar_jax.models.published import DREAM_7B, LLADA_8B
from tests.convert.checkpoints import checkpoint, config, small_dream, small_llada

LLADA_KEYS = [
    "architectures",
    "model_type",
    "d_model",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "mlp_hidden_size",
    "vocab_size",
    "embedding_size",
    "max_sequence_length",
    "rope_theta",
    "rms_norm_eps",
    "mask_token_id",
    "eos_token_id",
    "block_type",
    "activation_type",
    "layer_norm_type",
    "rope",
    "include_bias",
    "weight_tying",
]
DREAM_KEYS = [
    "architectures",
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
    "mask_token_id",
    "eos_token_id",
    "hidden_act",
    "tie_word_embeddings",
]


def without(model: dict, *keys: str) -> dict:
    return {key: value for key, value in model.items() if key not in keys}


def refused(model: dict) -> str:
    """The one-line message a configuration is refused with."""
    with pytest.raises(InputError) as caught:
        spec_from_config(model, source="x/config.json")
    message = str(caught.value)
    assert message.startswith("x/config.json: ") and "\n" not in message
    return message


def test_published_configurations_give_the_published_specs():
    assert spec_from_config(config("llada_8b_instruct"), source="x") == LLADA_8B
    assert spec_from_config(config("dream_v0_instruct_7b"), source="x") == DREAM_7B


def test_small_vocabularies_stop_at_their_own_eos_only():
    llada, dream = (spec_from_config(config(name), source=name) for name in ("llada_gqa", "dream"))
    assert (llada.stop_ids, llada.bos_id, llada.n_kv_heads, llada.logit_shift, llada.qkv_bias) == (
        (257,),
        None,
        2,
        0,
        False,
    )
    assert (dream.stop_ids, dream.bos_id, dream.n_kv_heads, dream.logit_shift, dream.qkv_bias) == (
        (257,),
        257,
        2,
        1,
        True,
    )
    assert (llada.norm_eps, dream.norm_eps) == (1e-5, 1e-6)


@pytest.mark.parametrize("model", [small_llada(), small_dream()])
def test_b07_rope_theta_wherever_transformers_put_it(model):
    bare = without(model, "rope_theta", "rope_scaling")
    layouts = [
        bare | {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
        bare | {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "default"}},
        bare | {"rope_scaling": {"rope_type": "default", "rope_theta": 500000.0}},
        bare | {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
        bare | {"rope_theta": 500000.0, "rope_scaling": None},
        bare | {"rope_theta": 500000.0},
    ]
    assert {spec_from_config(layout, source="x").rope_theta for layout in layouts} == {500000.0}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3", "longrope"])
def test_b07_unknown_rope_type_is_refused_naming_the_key(key, kind):
    message = refused(small_dream() | {key: {"rope_type": kind, "factor": 4.0}})
    assert f"{key}.rope_type" in message and kind in message
    assert f"{key}.type" in refused(small_dream() | {key: {"type": kind}})


def test_b07_other_rope_faults():
    assert "rope_parameters.full_attention" in refused(
        small_dream(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}})
    )
    assert "rope_scaling.factor" in refused(small_dream(rope_scaling={"rope_type": "default", "factor": 2.0}))
    message = refused(small_llada(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    assert "500000.0" in message and "10000.0" in message
    assert "rope_theta" in refused(small_llada(rope_theta="big"))
    assert "rope_theta" in refused(small_llada(rope_theta=float("nan")))


@pytest.mark.parametrize("key", LLADA_KEYS)
def test_b30_llada_key_missing_or_null_is_an_error_naming_it(key):
    assert key in refused(without(small_llada(), key))
    assert key in refused(small_llada() | {key: None})


@pytest.mark.parametrize("key", DREAM_KEYS)
def test_b30_dream_key_missing_or_null_is_an_error_naming_it(key):
    assert key in refused(without(small_dream(), key))
    assert key in refused(small_dream() | {key: None})


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_b30_only_essential_keys_are_needed(name):
    full = {"llada": small_llada(), "dream": small_dream()}[name]
    keys = {"llada": LLADA_KEYS, "dream": [*DREAM_KEYS, "bos_token_id"]}[name]
    assert spec_from_config({key: full[key] for key in keys}, source="x") == spec_from_config(full, source="x")


def test_b29_both_dialects_are_read():
    renamed = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "mlp_hidden_size": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
    }
    llada = small_llada()
    other = {renamed.get(key, key): value for key, value in llada.items() if key != "embedding_size"}
    other |= {"hidden_act": "silu", "tie_word_embeddings": False}
    assert spec_from_config(other, source="x") == spec_from_config(llada, source="x")
    assert spec_from_config(llada | other, source="x") == spec_from_config(llada, source="x")


@pytest.mark.parametrize(
    ("key", "other"),
    [("d_model", "hidden_size"), ("n_kv_heads", "num_key_value_heads"), ("n_layers", "num_hidden_layers")],
)
def test_b29_dialects_that_contradict_each_other_show_both_values(key, other):
    message = refused(small_llada() | {other: 77})
    assert key in message and str(small_llada()[key]) in message and other in message and "77" in message


def test_b29_families_that_contradict_each_other_show_both_values():
    message = refused(small_llada(model_type="Dream"))
    assert "LLaDAModelLM" in message and "Dream" in message
    message = refused(small_dream(model_type="llada"))
    assert "DreamModel" in message and "llada" in message


def test_b29_llada_v_is_refused_by_name():
    assert "LlavaLLaDAModelLM" in refused(config("llada_v_descendant"))
    assert "llava_llada" in refused(small_llada(model_type="llava_llada"))
    message = refused(small_llada(mm_vision_tower="tower"))
    assert "LLaDAModelLM" in message and "mm_vision_tower" in message


def test_b74_dream_is_told_apart_from_its_block_wise_descendants():
    full = config("dream_v0_instruct_7b")
    assert spec_from_config(full, source="x").logit_shift == 1
    assert "DreamForCausalLM" in refused(full | {"architectures": ["DreamForCausalLM"]})
    assert "151669" in refused(full | {"mask_token_id": 151669})
    assert "block_size" in refused(full | {"block_size": 4})
    assert "151669" in refused(small_dream(mask_token_id=151669))
    assert "126083" in refused(config("llada_8b_instruct") | {"mask_token_id": 126083})
    assert spec_from_config(full | {"model_type": "dream"}, source="x") == spec_from_config(full, source="x")


def test_unknown_architectures_and_model_types_are_refused_with_what_is_accepted():
    message = refused(small_llada(architectures=["GPT2LMHeadModel"]))
    assert "GPT2LMHeadModel" in message and "LLaDAModelLM" in message and "DreamModel" in message
    assert "llada2_moe" in refused(small_llada(model_type="llada2_moe"))
    assert "architectures" in refused(small_llada(architectures=[]))
    assert "architectures" in refused(small_llada(architectures="LLaDAModelLM"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_type", "sequential"),
        ("alibi", True),
        ("rope", False),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("bias_for_layer_norm", True),
        ("weight_tying", True),
        ("layer_norm_type", "default"),
        ("activation_type", "swiglu"),
        ("block_group_size", 2),
        ("attention_layer_norm", True),
        ("scale_logits", True),
        ("input_emb_norm", True),
        ("multi_query_attention", True),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_llada_switches_the_forward_pass_does_not_know_are_refused(key, value):
    assert key in refused(small_llada() | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("tie_word_embeddings", True), ("use_sliding_window", True), ("attention_bias", False)],
)
def test_dream_switches_the_forward_pass_does_not_know_are_refused(key, value):
    assert key in refused(small_dream() | {key: value})


@pytest.mark.parametrize("key", ["mask_token_id", "eos_token_id", "bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [-200, -1, 40, 128000])
def test_ids_outside_the_table_are_refused(key, value):
    message = refused(small_dream() | {key: value})
    assert key in message and str(value) in message and "40" in message


@pytest.mark.parametrize("value", [[37, 38], "37", 37.0, True])
def test_ids_must_be_single_integers(value):
    assert "eos_token_id" in refused(small_llada(eos_token_id=value))


def test_mask_must_not_be_the_end_of_text():
    assert "both 37" in refused(small_llada(mask_token_id=37))


def test_sizes_must_fit_together():
    assert "3" in refused(small_llada(n_heads=3, n_kv_heads=3))
    assert "evenly" in refused(small_dream(num_attention_heads=4, num_key_value_heads=3))
    assert "odd" in refused(small_llada(d_model=18, n_heads=6, n_kv_heads=6))
    assert "embedding_size" in refused(small_llada(embedding_size=39))
    assert spec_from_config(small_llada(embedding_size=48), source="x").vocab_size == 48
    assert "head_dim" in refused(small_dream(head_dim=128))
    for value in (0, -4, 2.5, True, "16"):
        assert "d_model" in refused(small_llada(d_model=value))
    assert "rms_norm_eps" in refused(small_llada(rms_norm_eps=0))


def test_config_json_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        read_config(tmp_path)
    for text in ("", "{", "[1]", "\xff"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(InputError, match=r"config\.json"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config("llada")))
    assert read_config(tmp_path) == read_config(checkpoint("llada"))
