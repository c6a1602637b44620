"""The lm-eval adapter: whole runs of lm-eval, offline, on tasks made here, with the embedded model."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import types

import pytest

from polestar_jax import decoders, load
from polestar_jax.errors import InputError
from polestar_jax.eval.likelihood import is_greedy, log_likelihood
from polestar_jax.generation import generate
from polestar_jax.tiny.tasks import load_evaluation_set

SHORT = {"gen_length": 16, "block_length": 16, "method": "parallel"}
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval")
    from polestar_jax.eval import harness

    return harness


def request(*args) -> types.SimpleNamespace:
    return types.SimpleNamespace(args=args)


def copies(count: int) -> list:
    return [example for example in load_evaluation_set() if example.task in ("copy", "reverse")][: 20 * count : 20]


# --- the model class


def model_class(harness, tiny, **options):
    return harness.PolestarLM(tiny, **{"prompt_mode": "chat_single_user"} | SHORT | options)


def test_answers_are_those_of_generate_in_order_whatever_the_batch(harness, tiny):
    examples = [*copies(4), *load_evaluation_set()[-2:]]
    requests = [request(example.prompt, {"until": []}) for example in examples]
    decoder = decoders.parallel(gen_length=16, block_length=16)
    expected = [answer.text for answer in generate(*tiny, [example.prompt for example in examples], decoder)]
    assert len({len(tiny[1].encode_prompt(example.prompt, False)) for example in examples}) > 2
    for batch_size in (1, 4):
        lm = model_class(harness, tiny, batch_size=batch_size)
        assert lm.generate_until(requests, disable_tqdm=True) == expected


def test_stop_strings_cut_the_text_after_all_of_it_was_decoded(harness, tiny):
    example = copies(1)[0]
    lm, other = model_class(harness, tiny), model_class(harness, tiny, escape_until=True)
    whole, short = lm.generate_until(
        [request(example.prompt, {"until": until}) for until in ([], [example.answer[2]])], True
    )
    assert whole == example.answer and short == example.answer[:2]
    assert lm.record()["cost"]["nfe"] % 2 == 0 and lm.record()["tokens"]["all"] == 32
    assert other.generate_until([request(example.prompt, {"until": [example.answer[2]]})], True) == [whole]


def test_b49_an_answer_has_no_more_tokens_than_asked_for(harness, tiny):
    example = max(copies(8), key=lambda example: len(example.answer))
    lm = model_class(harness, tiny, gen_length=None, block_length=4)
    requests = [request(example.prompt, {"max_gen_toks": count}) for count in (5, 8, 5)]
    five, eight, again = lm.generate_until(requests, disable_tqdm=True)
    assert [settings["gen_length"] for settings in lm.record()["decoders"]] == [8]
    assert five == again
    letters = eight.split()  # each a token
    assert len(letters) > 5 and five.split() == letters[:5]


def test_the_record_sums_then_divides(harness, tiny):
    examples = copies(3)
    lm = model_class(harness, tiny, batch_size=2)
    lm.generate_until([request(example.prompt, {}) for example in examples], disable_tqdm=True)
    found = generate(*tiny, [example.prompt for example in examples], decoders.parallel(gen_length=16, block_length=16))
    record = lm.record()
    nfe, real = (sum(getattr(answer.stats, name) for answer in found) for name in ("nfe", "tokens_non_eos"))
    assert record["cost"]["nfe"] == nfe and record["cost"]["answers"] == 3
    assert record["tokens"] == {"all": 48, "non_eos": real, "pre_eos": real}
    assert record["tpf"] == {"all": 48 / nfe, "non_eos": real / nfe, "pre_eos": real / nfe}
    assert record["tps"]["all"] == pytest.approx(48 / record["cost"]["seconds"])
    assert record["prompt_mode"] == "chat_single_user" and record["decoders"][0]["threshold"] == 0.9
    json.dumps(record, allow_nan=False)


def test_a_batch_s_time_counts_once(harness, tiny, monkeypatch):
    from polestar_jax.eval import harness_model

    answer = generate(*tiny, [copies(1)[0].prompt], decoders.parallel(gen_length=16, block_length=16))[0]
    answer = dataclasses.replace(answer, stats=dataclasses.replace(answer.stats, seconds=2.0, compile_seconds=5.0))
    monkeypatch.setattr(
        harness_model, "iterate", lambda model, tokenizer, prompts, decoder, **_: [answer] * len(prompts)
    )
    lm = model_class(harness, tiny, batch_size=2)
    lm.generate_until([request(example.prompt, {}) for example in copies(3)], disable_tqdm=True)
    assert (lm.record()["cost"]["seconds"], lm.record()["cost"]["compile_seconds"]) == (4.0, 10.0)  # two batches
    assert lm.record()["tps"]["all"] == 48 / 4


def test_likelihoods_are_the_estimate_s(harness, tiny):
    example = copies(1)[0]
    lm = model_class(harness, tiny, mc_samples=16, seed=3)
    wrong = example.answer[::-1]
    right, other = lm.loglikelihood(
        [request(example.prompt, f" {text}") for text in (example.answer, wrong)], disable_tqdm=True
    )
    prompt = tiny[1].encode_prompt(example.prompt, False)
    for (value, greedy), text in ((right, example.answer), (other, wrong)):
        answer = tiny[1].hf.encode(f" {text}", add_special_tokens=False)
        assert value == log_likelihood(tiny[0], prompt, answer, n_samples=16, seed=3)
        assert greedy == is_greedy(tiny[0], prompt, answer)
    assert right[0] > other[0] and right[1] and not other[1]


def test_b38_two_calls_in_one_process_have_nothing_to_do_with_each_other(harness, tiny):
    example, other = copies(2)
    lm = model_class(harness, tiny)
    first = lm.generate_until([request(example.prompt, {})], disable_tqdm=True)
    lm.generate_until([request(f"{other.prompt} {other.answer}", {}), request(other.prompt, {})], disable_tqdm=True)
    assert lm.generate_until([request(example.prompt, {})], disable_tqdm=True) == first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_mode": None}, r"prompt_mode is missing: chat_single_user \| chat_multiturn \| raw \| raw_bos"),
        ({"prompt_mode": "auto"}, "prompt_mode 'auto' is not accepted"),
        ({"method": "best"}, "method 'best' is not accepted: vanilla"),
        ({"post": "x"}, "post 'x' is not accepted"),
        ({"temperature": 0.5}, "temperature is not accepted: the task says how to sample"),
        ({"batch_size": "auto"}, "batch_size 'auto' is not accepted"),
        ({"device": "cuda"}, "JAX_PLATFORMS chooses the device"),
        ({"thresold": 0.5}, "has no setting 'thresold'"),
        ({"threshold": "high"}, "threshold='high' is not accepted"),
        ({"gen_length": 20}, "gen_length 20 is not a multiple of block_length 16"),
        ({"mc_samples": 0}, "mc_samples 0 is not accepted"),
    ],
)
def test_arguments_of_the_class_are_refused_by_name(harness, tiny, options, words):
    with pytest.raises(InputError, match=words):
        model_class(harness, tiny, **options)


def test_rolling_likelihoods_are_refused(harness, tiny):
    with pytest.raises(InputError, match="loglikelihood_rolling is not supported"):
        model_class(harness, tiny).loglikelihood_rolling([request("a b c")])


def test_chat_templates_are_refused_where_the_mode_does_not_take_them(harness, tiny):
    with pytest.raises(InputError, match="apply_chat_template is not accepted with prompt_mode chat_single_user"):
        model_class(harness, tiny).apply_chat_template([{"role": "user", "content": "a"}])


# --- whole runs of lm-eval


def write_task(directory: pathlib.Path, name: str, rows: list[dict], **config) -> str:
    """A task file with its data beside it; JSON is YAML."""
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": str(data), "test": str(data)}
    config = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files, "cache_dir": str(directory / "cache")},
        "test_split": "test", "fewshot_split": "train", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
    } | config  # fmt: skip
    path = directory / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return str(path)


def exact_match(directory: pathlib.Path, rows: list[dict], **config) -> str:
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    settings = {"output_type": "generate_until", "metric_list": [metric], "generation_kwargs": {"until": ["\n"]}}
    return write_task(directory, "own_copies", rows, **settings | config)


@pytest.fixture
def offline(monkeypatch):
    """Whatever reaches for the network fails at once."""
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_b45_lm_eval_runs_offline_and_scores_half_of_one_right_and_one_wrong(harness, tiny, tmp_path, offline):
    first, second = copies(2)
    rows = [{"question": first.prompt, "answer": first.answer}, {"question": second.prompt, "answer": "z z z"}]
    lm = model_class(harness, tiny)
    results = harness.evaluate(lm, [exact_match(tmp_path, rows)], samples=True)
    assert results["results"]["own_copies"]["exact_match,none"] == 0.5
    assert [sample["resps"][0][0] for sample in results["samples"]["own_copies"]] == [first.answer, second.answer]
    assert results["config"]["polestar"]["cost"]["answers"] == 2
    assert results["n-shot"]["own_copies"] == 0


@pytest.mark.parametrize("mode", ["chat_single_user", "chat_multiturn"])
def test_few_shot_prompts_in_both_chat_modes(harness, tiny, tmp_path, offline, mode):
    rows = [{"question": example.prompt, "answer": example.answer} for example in copies(3)]
    lm = model_class(harness, tiny, prompt_mode=mode)
    task = exact_match(tmp_path, rows, num_fewshot=1, fewshot_config={"sampler": "first_n"}, target_delimiter=" ")
    results = harness.evaluate(lm, [task], shots=1, limit=2, samples=True)
    context = results["samples"]["own_copies"][1]["arguments"][0][0]
    if mode == "chat_multiturn":
        assert [message["role"] for message in json.loads(context)] == ["user", "assistant", "user"]
        assert json.loads(context)[1]["content"].strip() == rows[0]["answer"]
    else:
        assert context == f"{rows[0]['question']} {rows[0]['answer']}\n\n{rows[1]['question']}"
    assert results["n-shot"]["own_copies"] == 1
    assert results["config"]["polestar"]["prompt_mode"] == mode


def test_multiple_choice_by_likelihood(harness, tiny, tmp_path, offline):
    rows = [{"question": e.prompt, "options": [e.answer[::-1], e.answer, "a"], "answer": 1} for e in copies(3)]
    metric = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    settings = {"output_type": "multiple_choice", "doc_to_choice": "{{options}}", "metric_list": [metric]}
    lm = model_class(harness, tiny, mc_samples=4)
    results = harness.evaluate(lm, [write_task(tmp_path, "own_choices", rows, **settings)])
    assert results["results"]["own_choices"]["acc,none"] == 1
    assert results["config"]["polestar"]["cost"]["likelihoods"] == 9


def test_lm_eval_finds_the_class_by_its_name(harness, tmp_path, offline):
    import lm_eval
    from lm_eval.tasks import TaskManager

    example = copies(1)[0]
    task = exact_match(tmp_path, [{"question": example.prompt, "answer": example.answer}])
    results = lm_eval.simple_evaluate(
        model="polestar", tasks=[task], batch_size=1, task_manager=TaskManager(include_defaults=False),
        model_args="model=tiny,prompt_mode=chat_single_user,method=parallel,gen_length=16,block_length=16,threshold=0.8",
    )  # fmt: skip
    assert results["results"]["own_copies"]["exact_match,none"] == 1
    assert results["config"]["polestar"]["decoders"][0]["threshold"] == 0.8


def run(harness, *args: str) -> int:
    return harness.main([*args, "--cache-dir", "off"])


COMMON = ("--method", "parallel", "--gen-length", "16", "--block-length", "16", "--prompt-mode", "chat_single_user")


def test_the_command_runs_a_directory_of_tasks(harness, tmp_path, offline, capsys):
    rows = [{"question": example.prompt, "answer": example.answer} for example in copies(3)]
    exact_match(tmp_path, rows)
    output = tmp_path / "out.json"
    assert run(harness, "--tasks", str(tmp_path), *COMMON, "--limit", "2", "--output", str(output)) == 0
    table, record = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "own_copies" in table and "exact_match" in table
    assert json.loads(record)["cost"]["answers"] == 2
    written = json.loads(output.read_text())
    assert written["results"]["own_copies"]["exact_match,none"] == 1
    assert written["config"]["polestar"] == json.loads(record)
    assert written["config"]["gen_kwargs"] == {"max_gen_toks": 16}
    assert len(written["samples"]["own_copies"]) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tasks", "DIR"), "the directory has no task files"),
        (("--tasks", "x", "--set", "threshold"), "--set threshold is not accepted: KEY=VALUE"),
        (("--tasks", "x", "--set", "gen_length=4"), "give --gen-length"),
        (("--tasks", "x", "--set", "alpha=1"), "has no setting 'alpha'"),
        (("--tasks", "x", "--limit", "0"), "--limit 0 is not accepted"),
        (("--benchmark", "humaneval"), "give --allow-code-execution"),
        (("--tasks", "x", "--model", "nowhere"), "no model 'nowhere'"),
    ],
)
def test_the_command_refuses_in_one_line(harness, tmp_path, capsys, args, words):
    args = [str(tmp_path) if arg == "DIR" else arg for arg in args]
    assert run(harness, *args, *COMMON) == 2
    message = capsys.readouterr().err
    assert words in message and message.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in message


@pytest.mark.slow  # lm-eval reads all of its task files
def test_a_task_that_is_not_known_is_refused_by_name(harness, capsys):
    assert run(harness, "--tasks", "no_such_task_at_all", *COMMON) == 2
    assert "error: task 'no_such_task_at_all' is not accepted" in capsys.readouterr().err.splitlines()[-1]


def test_the_command_wants_the_prompt_mode(harness, capsys):
    assert run(harness, "--tasks", "x") == 2
    assert "--prompt-mode is missing: chat_single_user" in capsys.readouterr().err


def test_a_task_of_rolling_likelihood_is_refused_in_one_line(harness, tmp_path, offline, capsys):
    metric = {"metric": "word_perplexity"}
    path = write_task(
        tmp_path,
        "own_rolling",
        [{"answer": "a b c"}],
        output_type="loglikelihood_rolling",
        metric_list=[metric],
        doc_to_text="",
    )
    assert run(harness, "--tasks", path, *COMMON) == 2
    assert "loglikelihood_rolling is not supported" in capsys.readouterr().err


def test_broken_data_is_one_line_and_another_status(harness, tmp_path, offline, capsys):
    path = exact_match(tmp_path, [])
    assert run(harness, "--tasks", path, *COMMON) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: lm-eval on ")


def test_without_lm_eval_it_is_one_line():
    code = "import sys, runpy; sys.modules['lm_eval'] = None; runpy.run_module('polestar_jax.eval.harness', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: lm-eval is not installed; install polestar-jax[eval]"


# --- the paper's benchmarks


@pytest.mark.slow  # lm-eval reads all of its task files
def test_benchmarks_are_the_papers_and_lm_evals(harness):
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    index = TaskManager().task_index
    files = {name: name if name != "math" else "minerva_math_algebra" for name in harness.BENCHMARKS}
    configs = {name: load_yaml(index[file].yaml_path, resolve_func=False) for name, file in files.items()}
    shots = {name: benchmark.shots for name, benchmark in harness.BENCHMARKS.items()}
    assert (
        shots == {"gsm8k": 5, "math": 4, "humaneval": 0, "mbpp": 3} == {n: c["num_fewshot"] for n, c in configs.items()}
    )
    assert index["minerva_math"].yaml_path
    for name, benchmark in harness.BENCHMARKS.items():
        assert (benchmark.gen_lengths, benchmark.block_length) == ((256, 512), 32)
        assert benchmark.runs_code == bool(configs[name].get("unsafe_code"))
    until = {name: config["generation_kwargs"]["until"] for name, config in configs.items()}
    assert (
        until["gsm8k"] == ["Question:", "</s>", "<|im_end|>"]
        and until["mbpp"] == ["[DONE]"]
        and until["math"] == ["Problem:"]
    )
    assert until["humaneval"] == ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]


def test_a_benchmark_s_settings_reach_the_model(harness, monkeypatch):
    seen = {}

    class Stop(Exception):
        pass

    def instead(lm, tasks, **options):
        seen.update(options, tasks=tasks, lm=lm)
        raise Stop

    monkeypatch.setattr(harness, "evaluate", instead)
    for name, more in (("gsm8k", ()), ("humaneval", ("--allow-code-execution", "--gen-length", "512"))):
        with pytest.raises(Stop):
            run(harness, "--benchmark", name, "--method", "parallel", *more)
        lm, benchmark = seen["lm"], harness.BENCHMARKS[name]
        assert seen["tasks"] == [benchmark.task] and seen["shots"] == benchmark.shots and seen["fewshot_seed"] == 1234
        assert lm.encoding.prompt_mode == "chat_single_user" and lm.escape_until == (name == "humaneval")
        assert lm.gen_length == seen["gen_kwargs"]["max_gen_toks"] == (512 if more else 256)
