"""What lm-eval's requests come to: lengths, sampling and stop strings, prompt ids by mode, and the text of an answer."""

import json

import pytest

from polestar_jax import decoders, load
from polestar_jax.errors import InputError
from polestar_jax.eval.harness_requests import Encoding, Turns, plan


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32")


# --- a request's arguments


@pytest.mark.parametrize(
    ("most", "gen_length", "block_length", "length"),
    [
        (64, None, None, 64),
        (40, None, None, 64),  # rounded up to whole blocks of 32
        (40, None, 8, 40),
        (41, None, 8, 48),
        (7, None, None, 7),  # one block
        (7, None, 32, 32),
        (1024, 256, 32, 256),
        (40, 256, 32, 64),
        (None, None, None, 256),
        (None, None, 48, 288),
        (None, 512, 32, 512),
        ("40", None, 32, 64),  # as lm-eval's command line has it
    ],
)
def test_max_gen_toks_is_rounded_up_to_whole_blocks_and_lowers_gen_length(most, gen_length, block_length, length):
    kwargs = {} if most is None else {"max_gen_toks": most}
    found = plan(kwargs, gen_length=gen_length, block_length=block_length)
    assert dict(found.settings)["gen_length"] == length
    assert found.limit == (length if most is None else int(most))
    built = decoders.vanilla(block_length=block_length, **dict(found.settings))
    assert built.gen_length == length


@pytest.mark.parametrize(
    ("kwargs", "temperature"),
    [
        ({}, 0),
        ({"do_sample": False, "temperature": 0.7}, 0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1),
        ({"do_sample": True, "temperature": 0.0}, 0),
        ({"temperature": None, "do_sample": None}, 0),
    ],
)
def test_the_task_says_how_to_sample(kwargs, temperature):
    assert dict(plan(kwargs, gen_length=None, block_length=None).settings)["temperature"] == temperature


def test_filters_go_with_sampling_alone():
    settings = lambda **kwargs: dict(plan(kwargs, gen_length=None, block_length=None).settings)  # noqa: E731
    assert settings(top_p=0.9, temperature=0.5)["top_p"] == 0.9
    assert "top_p" not in settings(top_p=0.9)


def test_stop_strings_may_be_one_or_many():
    stop = lambda until: plan({"until": until}, gen_length=None, block_length=None).stop  # noqa: E731
    assert (stop("END"), stop(["a", "", "b"]), stop(None), stop([])) == (("END",), ("a", "b"), (), ())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_beams": 4}, "num_beams=4 is not accepted; accepted: until, max_gen_toks"),
        ({"max_gen_toks": 0}, "max_gen_toks 0 is not accepted"),
        ({"max_gen_toks": "many"}, "max_gen_toks 'many' is not accepted"),
        ({"until": 3}, "until=3 is not accepted"),
        ({"until": [1]}, "is not accepted: a text or a list of texts"),
    ],
)
def test_arguments_that_cannot_be_met_are_refused_by_name(kwargs, words):
    with pytest.raises(InputError, match=words):
        plan(kwargs, gen_length=None, block_length=None)


# --- prompts and texts


def encoding(tiny, mode: str, post: str = "eos_then_stop") -> Encoding:
    return Encoding(tiny[1], tiny[0].spec, mode, post)


def test_each_prompt_mode_makes_its_prompt(tiny):
    tokenizer, bos = tiny[1], tiny[0].spec.bos_id
    text = "Copy the list: a b"
    chat = tokenizer.encode_chat([{"role": "user", "content": text}])
    raw = tokenizer.hf.encode(text, add_special_tokens=False)
    turns = Turns(json.dumps([{"role": "user", "content": text}]))
    assert chat[0] == bos and bos not in raw
    assert encoding(tiny, "chat_single_user").prompts([text], 8) == [chat]
    assert encoding(tiny, "chat_multiturn").prompts([turns], 8) == [chat]
    assert encoding(tiny, "raw").prompts([text], 8) == [raw]
    assert encoding(tiny, "raw_bos").prompts([text], 8) == [[bos, *raw]]


def test_turns_stay_turns_and_the_beginning_of_an_answer_is_gone_on_with(tiny):
    messages = [
        {"role": "user", "content": "Copy the list: a b"},
        {"role": "assistant", "content": "a b"},
        {"role": "user", "content": "Copy the list: c d"},
    ]
    begun = [*messages, {"role": "assistant", "content": " c"}]
    chat = tiny[1].encode_chat(messages)
    found = encoding(tiny, "chat_multiturn").prompts([Turns(json.dumps(m)) for m in (messages, begun)], 8)
    assert found == [chat, [*chat, *tiny[1].hf.encode(" c", add_special_tokens=False)]]


def test_what_lm_eval_did_not_template_is_no_chat_of_turns(tiny):
    with pytest.raises(InputError, match="needs apply_chat_template"):
        encoding(tiny, "chat_multiturn").prompts(["Copy the list: a b"], 8)


def test_a_prompt_that_is_too_long_is_named_by_its_place(tiny):
    with pytest.raises(InputError, match=r"item 2 of 2: .*max_length"):
        encoding(tiny, "raw").prompts(["a b", "a " * 600], 8)


def test_b39_a_likelihood_s_prompt_starts_once(tiny):
    bos = tiny[0].spec.bos_id
    for mode in ("chat_single_user", "raw_bos"):
        prompt, answer = encoding(tiny, mode).pair("Copy the list: a b", " a b")
        assert prompt.count(bos) == 1 and bos not in answer


def test_raw_pairs_are_the_joined_text_parted(tiny):
    ids = lambda text: tiny[1].hf.encode(text, add_special_tokens=False)  # noqa: E731
    raw = encoding(tiny, "raw")
    joined = ids("Sort the list: b a a b")
    for context, continuation in (
        ("Sort the list: b a", " a b"),
        ("Sort the list: b a ", "a b"),
        ("Sort", " the list: b a a b"),
    ):
        prompt, answer = raw.pair(context, continuation)
        assert prompt == ids(context.rstrip()) and prompt + answer == joined
    assert raw.pair("", " a b") == ([tiny[0].spec.bos_id], ids(" a b"))


def test_a_chat_s_answer_is_what_its_template_writes(tiny):
    prompt = tiny[1].encode_prompt("Sort: b a", False)
    answer = tiny[1].hf.encode(" a b", add_special_tokens=False)  # the embedded model's template puts a blank before it
    for text in ("a b", " a b", "\n a b"):
        assert encoding(tiny, "chat_single_user").pair("Sort: b a", text) == (prompt, answer)
    turns = [{"role": "user", "content": "Sort: b a"}]
    assert encoding(tiny, "chat_multiturn").pair(Turns(json.dumps(turns)), "a b") == (prompt, answer)
    begun = Turns(json.dumps([*turns, {"role": "assistant", "content": " a"}]))
    assert encoding(tiny, "chat_multiturn").pair(begun, " b") == ([*prompt, answer[0]], answer[1:])


def test_both_ways_to_cut_an_answer(tiny):
    spec, ids = tiny[0].spec, tiny[1].hf.encode(" a b c", add_special_tokens=False)
    tokens = [*ids[:2], spec.eos_id, *ids[2:], spec.eos_id]
    clean, old = encoding(tiny, "raw"), encoding(tiny, "raw", "stop_then_special")
    assert (clean.text(tokens, ()), old.text(tokens, ())) == ("a b", "a b c")
    assert (clean.text(tokens, ("b",)), old.text(tokens, ("c",))) == ("a ", "a b ")
    assert clean.text([spec.eos_id] * 4, ("b",)) == ""
