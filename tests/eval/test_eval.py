"""What an evaluation reports, and what it refuses: accounting by hand, records, runs, prompts, cases B48, B64 and B66."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shutil
import sys

import pytest

from polestar_jax import generation
from polestar_jax.cli import main
from polestar_jax.decode import engine
from polestar_jax.decoders import variants
from polestar_jax.errors import InputError, RunError
from polestar_jax.eval import about, prompts, records, run, summary, tables, tasks
from polestar_jax.eval.progress import Progress
from polestar_jax.eval.task import Item, Task, cut
from polestar_jax.loading import load
from polestar_jax.polestar.cache import PolestarCache

ITEMS = [
    Item(id=f"{subset}-{n}", prompt=f"Copy the list: {text}", target=text, subset=subset)
    for subset, texts in {"one": ("a b c d", "e f g h", "k l m n"), "two": ("p q r s", "t u v w")}.items()
    for n, text in enumerate(texts)
]
COPY = Task(
    name="copying", summary="", version="1", items=lambda file, options: ITEMS, gen_length=8, block_length=4,
    score=lambda item, text: {"exact": float(text.strip() == item.target), "length": len(text.split()) / 4},
    canonical=lambda item: item.target,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32")


@pytest.fixture
def copying(monkeypatch):
    """The small task under its name, and compiled programs kept from run to run."""
    monkeypatch.setattr(tasks, "names", lambda: ("copying", "tiny"))
    get = tasks.get
    monkeypatch.setattr(tasks, "get", lambda name: COPY if name == "copying" else get(name))
    monkeypatch.setattr(engine, "forget_programs", lambda: None)


def evaluation(tiny, **changes) -> run.Evaluation:
    model, tokenizer = tiny
    runs = variants.build("parallel", gen_length=8, block_default=4)
    found = run.Evaluation(
        model=model, tokenizer=tokenizer, task=COPY, items=ITEMS, batch_size=2, timed=[0, 3],
        prompts=prompts.prompt_ids(ITEMS, "chat_single_user", tokenizer, model.spec, 8),
        runs={key: decoder.for_model(model.spec, tokenizer) for key, decoder in runs.items()},
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def record(work: run.Evaluation) -> records.Record:
    return about.record(work, prompt_mode="chat_single_user", options={}, versions={"polestar-jax": "0"}, notes={})


def line(**changes) -> records.Line:
    """An answer's line, made up."""
    found = {
        "run": "parallel", "id": "a", "subset": "", "timed": False, "place": 0, "batch": [0, 1], "metrics": {"exact": 1.0},
        "text": "", "tokens": [5, 6], "prompt_tokens": 3, "tokens_all": 2, "tokens_non_eos": 2, "tokens_pre_eos": 2, "nfe": 1,
        "full_forwards": 1, "partial_forwards": 0, "refreshes": 0, "rows": 5.0, "commits": {"confidence": 2}, "seconds": 1.0,
        "compile_seconds": 0.0, "near_ties": 0.0, "repetition": 0.0,
    }  # fmt: skip
    return found | changes


def made_up(work: run.Evaluation, *lines: records.Line) -> summary.Summary:
    return summary.summarise(record(work), list(lines))


# Accounting


def test_three_forms_of_tpf_and_tps_by_hand(tiny):
    """Answer a: 8 positions, 5 non-EOS, 3 before the first EOS, 4 passes; b: 8, 2, 2 in 6 passes. Timed: a alone, 0.5 s."""
    work = evaluation(tiny, items=ITEMS[:2], timed=[0])
    shared = {"run": "parallel", "subset": "one", "batch": [0, 2], "tokens_all": 8, "seconds": 90.0}
    a = line(
        **shared, place=0, tokens_non_eos=5, tokens_pre_eos=3, nfe=4, full_forwards=1, partial_forwards=3, refreshes=2
    )
    b = line(**shared, place=1, tokens_non_eos=2, tokens_pre_eos=2, nfe=6, full_forwards=6, metrics={"exact": 0.0})
    timed = a | {"timed": True, "batch": [0, 1], "seconds": 0.5, "metrics": {}}
    (found,) = made_up(work, a, b, timed)["runs"]
    assert found["tpf"] == {"all": 16 / 10, "non_eos": 7 / 10, "pre_eos": 5 / 10}, (
        "sums divided, not the mean of ratios"
    )
    assert found["tps"] == {"all": 16.0, "non_eos": 10.0, "pre_eos": 6.0}, "of the timed answer alone"
    assert found["tokens"] == {"all": 16, "non_eos": 7, "pre_eos": 5}
    assert (found["nfe"], found["full_forwards"], found["partial_forwards"], found["refreshes"]) == (10, 7, 3, 2)
    assert found["items"] == 2 and found["metrics"] == {"exact": 0.5} and found["complete"]
    assert found["timed"]["items"] == 1 and found["timed"]["seconds"] == 0.5 and found["timed"]["same_tokens"] == 1


def test_tokens_before_the_first_end(tiny):
    spec = tiny[0].spec
    end, other = spec.stop_ids[0], 9
    assert run.pre_eos([other, other, end, other], spec) == 2
    assert run.pre_eos([end, other], spec) == 0 and run.pre_eos([other] * 3, spec) == 3


def test_lines_agree_with_generate(tiny, tmp_path):
    """The batched and the timed answers are those of ``generate``, prompt by prompt, and counted alike."""
    work = evaluation(tiny)
    with records.opened(tmp_path, record(work)) as answers:
        assert run.evaluate(work, answers) == {}
        lines = answers.lines
    alone = generation.generate(
        work.model, work.tokenizer, [item.prompt for item in ITEMS], work.runs["parallel"], batch_size=2
    )
    plain = [each for each in lines if not each["timed"]]
    for item, answer, each in zip(ITEMS, alone, plain, strict=True):
        assert each["id"] == item.id and list(each["tokens"]) == answer.tokens and each["text"] == answer.text
        assert each["nfe"] == answer.stats.nfe and each["tokens_non_eos"] == answer.stats.tokens_non_eos
        assert each["metrics"]["exact"] == float(answer.text.strip() == item.target)
        assert set(each) == set(records.FIELDS)
    timed = {each["place"]: each for each in lines if each["timed"]}
    assert set(timed) == {0, 3} and all(timed[i]["tokens"] == plain[i]["tokens"] for i in timed)
    assert [each["batch"] for each in plain] == [[0, 2], [0, 2], [2, 2], [2, 2], [4, 1]]
    assert sum(each["compile_seconds"] > 0 for each in lines) == 2, "a batch of two and a batch of one, once each"
    found = summary.summarise(answers.record, lines)
    (one,) = found["runs"]
    assert one["metrics"]["exact"] == 1.0, "the embedded model copies four letters"
    assert (
        one["timed"]["items"] == 2 and one["timed"]["same_tokens"] == 2 and one["subsets"]["two"]["timed"]["items"] == 1
    )


def test_warm_up_is_not_timed(tiny, tmp_path, monkeypatch):
    """A program's first run does not count; with a batch of one every answer is timed."""
    engine.forget_programs()
    work = evaluation(tiny, batch_size=1, timed=())
    real, calls = generation.run, []

    def counted(*args, **options):
        calls.append(real(*args, **options))
        return calls[-1]

    monkeypatch.setattr(generation, "run", counted)
    with records.opened(tmp_path, record(work)) as answers:
        run.evaluate(work, answers)
    assert len(calls) == len(ITEMS) + 1 and calls[0].compile_seconds > 0 and calls[1].compile_seconds == 0
    assert (
        answers.lines[0]["seconds"] == calls[1].seconds
        and answers.lines[0]["compile_seconds"] == calls[0].compile_seconds
    )
    (one,) = summary.summarise(answers.record, answers.lines)["runs"]
    assert one["timed"]["items"] == len(ITEMS) and one["timed"]["seconds"] == sum(x["seconds"] for x in answers.lines)


def test_record_has_what_a_number_needs(tiny):
    """evaluation.md, section 10."""
    work = evaluation(tiny)
    found = made_up(work)
    known, (one,) = found["about"], found["runs"]
    assert known["task"] | {"digest": ""} == {
        "name": "copying", "version": "1", "shots": 0, "options": {}, "items": 5, "subsets": {"one": 3, "two": 2}, "digest": "",
        "stop": [], "runs_code": False,
    }  # fmt: skip
    assert known["model"]["weights"] == about.weights_digest(work.model) and len(known["model"]["weights"]) == 8
    assert known["dtype"] == "float32" and known["batch_size"] == 2 and known["prompt_mode"] == "chat_single_user"
    assert known["post_processing"] == "eos_then_stop" and known["machine"]["device"]
    assert one["gen_length"] == 8 and one["block_length"] == 4 and one["steps"] is None
    assert one["settings"] == work.runs["parallel"].settings() and one["settings"]["threshold"] == 0.9
    assert one["eos_rule"]["eos"] == "allow" and one["eos_rule"]["stop_at_eos"] is False
    assert (one["cache_policy"], one["commit_policy"], one["deviations"]) == ("none", "threshold", [])
    fixed = variants.build("polestar[alpha=5]", gen_length=8, block_default=4)
    assert known["versions"]["python"] in sys.version and known["kernels"] is None and found["notes"]["timed"] == 2
    of_polestar = about.run_record("polestar[alpha=5]", fixed["polestar[alpha=5]"])
    assert of_polestar["asked"] == {"alpha": "5"} and of_polestar["settings"]["alpha"] == 5.0


def test_record_fills_options_up_and_leaves_files_to_the_notes(tiny, monkeypatch):
    """evaluation.md, section 10: the few-shot seed too. A file's place may change, its contents are in the items."""
    task = dataclasses.replace(
        COPY, shots=5, defaults={"shots": 5, "seed": 1234}, packages=("numpy", "no-such-package")
    )
    work, given = evaluation(tiny, task=task), dict(prompt_mode="raw", versions={}, notes={})
    of = lambda **options: about.record(work, options=options, **given)  # noqa: E731
    found = of(shots_file="a/train.jsonl", shots="5")
    assert found.about["task"]["options"] == {"shots": 5, "seed": 1234} and found.notes["shots_file"] == "a/train.jsonl"
    assert found.about == of(shots_file="b/train.jsonl").about == of(shots=5, seed="1234").about != of(seed=1).about
    assert of(shots="3").about["task"]["shots"] == 3
    assert set(found.about["versions"]) == {"python", "tokenizers", "numpy"}
    monkeypatch.setenv("POLESTAR_KERNELS", "interpret")
    assert of().about["kernels"] == "interpret"


def test_complete_is_with_all_the_times_that_were_asked_for(tiny):
    work = evaluation(tiny, items=ITEMS[:2], timed=[0, 1])
    answers = [line(id=ITEMS[i].id, subset="one", place=i, batch=[0, 2]) for i in range(2)]
    timed = [line(id=ITEMS[i].id, subset="one", place=i, batch=[i, 1], timed=True) for i in range(2)]
    assert [made_up(work, *answers, *timed[:n])["complete"] for n in range(3)] == [False, False, True]
    assert made_up(dataclasses.replace(work, timed=[]), *answers)["complete"]


def test_weights_digest_sees_one_bit(tiny):
    model, _ = load("tiny", dtype="float32")
    assert about.weights_digest(model) == about.weights_digest(tiny[0])
    model.norm.weight[...] = model.norm.weight[...].at[3].multiply(1.0000001)
    assert about.weights_digest(model) != about.weights_digest(tiny[0])


def test_b48_a_scorer_that_cannot_work_is_found_before_the_run(copying, monkeypatch, capsys, tmp_path):
    broken = dataclasses.replace(COPY, score=lambda item, text: {"exact": 0.0})
    with pytest.raises(RunError, match="'one-0' gives 0 for its right answer"):
        tasks.check_score(broken, ITEMS)
    generous = dataclasses.replace(COPY, score=lambda item, text: {"exact": 1.0})
    with pytest.raises(RunError, match="1 for none"):
        tasks.check_score(generous, ITEMS)
    monkeypatch.setattr(tasks, "get", lambda name: dataclasses.replace(COPY, needs_data=True))
    assert "--data" in refused(capsys, tmp_path, "--task", "copying")
    monkeypatch.setattr(tasks, "get", lambda name: dataclasses.replace(COPY, runs_code=True))
    assert "--allow-code-execution" in refused(capsys, tmp_path, "--task", "copying")


def test_b64_no_speed_up_without_both_baselines(tiny):
    lengths = dict(gen_length=8, block_default=4)
    rates = {"vanilla": 10.0, "parallel": 20.0, "fast_dllm_dual": 5.0}
    for methods, expected in (
        ("vanilla,parallel,fast_dllm_dual", {"vanilla": 1.0, "parallel": 2.0, "fast_dllm_dual": 0.5}),
        ("vanilla,fast_dllm_dual", {}),
        ("parallel,fast_dllm_dual", {}),
    ):
        work = evaluation(tiny, items=ITEMS[:1], runs=variants.build(methods, **lengths), batch_size=1)
        lines = [line(run=key, subset="one", tokens_non_eos=int(10 * rates[key]), seconds=10.0) for key in work.runs]
        found = made_up(work, *lines)
        assert tables.speedups(found) == expected
        text = tables.markdown([found])
        assert ("(0.5×)" in text) == bool(expected) and ("No speed-up is given" in text) != bool(expected)  # noqa: RUF001


def test_b64_variants_are_no_baselines_and_other_items_no_comparison(tiny):
    lengths = dict(gen_length=8, block_default=4)

    def speedups(methods, timed=lambda key: range(2), settings=()):
        work = evaluation(tiny, items=ITEMS[:2], runs=variants.build(methods, settings, **lengths), batch_size=2)
        places = {key: timed(key) for key in work.runs}
        lines = [
            line(run=key, id=ITEMS[i].id, subset="one", place=i, timed=True, batch=[i, 1])
            for key in work.runs for i in places[key]
        ]  # fmt: skip
        return tables.speedups(made_up(work, *lines))

    assert set(speedups("vanilla,parallel,klass")) == {"vanilla", "parallel", "klass"}
    assert speedups("vanilla[steps=4],parallel,klass") == speedups("vanilla,parallel[threshold=0.1],klass") == {}
    assert set(speedups("vanilla[block_length=8],parallel")) == {"vanilla[block_length=8]", "parallel"}
    assert set(speedups("vanilla,parallel,klass", lambda key: range(1 + (key != "klass")))) == {"vanilla", "parallel"}
    assert speedups("vanilla,parallel,klass", lambda key: range(1 + (key != "vanilla"))) == {}
    for changed in ("vanilla.steps=2", "vanilla.cache=dual", "parallel.threshold=0.1"):
        assert speedups("vanilla,parallel,klass", settings=[changed]) == {}, "a plain name is not enough"
    assert speedups("vanilla,parallel,klass", settings=["temperature=0.5"]), "what all of them have makes no difference"


def test_b66_repetition_is_reported(tiny):
    work = evaluation(tiny, items=ITEMS[:2], batch_size=1)
    found = made_up(
        work, line(subset="one", repetition=0.75), line(subset="one", place=1, batch=[1, 1], repetition=0.25)
    )
    assert found["runs"][0]["repetition"] == 0.5 and found["runs"][0]["subsets"]["one"]["repetition"] == 0.5
    assert "repetition" in tables.markdown([found]) and "0.500" in tables.markdown([found])
    rows = list(csv.DictReader(io.StringIO(tables.comma_separated([found]))))
    assert float(rows[0]["repetition"]) == 0.5


def test_tables_in_the_papers_layout(tiny):
    work = evaluation(tiny, items=ITEMS, batch_size=1)
    lines = [line(subset=item.subset, place=i, batch=[i, 1], metrics={"exact": i % 2}) for i, item in enumerate(ITEMS)]
    found = made_up(work, *lines)
    other = json.loads(json.dumps(found)) | {"notes": {"model": "path/to/LLaDA-8B"}}
    first, *_ = tables.markdown([found | {"notes": {"model": "tiny"}}, other]).split("\n\n")
    head, _, row = first.splitlines()
    assert head == (
        "| benchmark | gen len | method | tiny: accuracy, % | tiny: TPF | tiny: TPS | LLaDA-8B: accuracy, % | LLaDA-8B: TPF | "
        "LLaDA-8B: TPS |"
    )
    assert row == "| copying | 8 | parallel | 40.00 | 2.00 | 2.00 | 40.00 | 2.00 | 2.00 |"
    rows = list(csv.DictReader(io.StringIO(tables.comma_separated([found]))))
    assert [(r["subset"], r["items"], f"{float(r['accuracy_percent']):.1f}") for r in rows] == [
        ("all", "5", "40.0"), ("one", "3", "33.3"), ("two", "2", "50.0"),
    ]  # fmt: skip
    partly = tables.markdown([made_up(work, *lines[:2])])
    assert "(2 of 5 items)" in partly


# Prompts and texts


def test_prompt_modes(tiny):
    model, tokenizer = tiny
    bos = tokenizer.bos_id
    turns = [
        {"role": "user", "content": "Copy the list: a b"}, {"role": "assistant", "content": "a b"},
        {"role": "user", "content": "Copy the list: c d"},
    ]  # fmt: skip
    item = Item(id="x", prompt=turns, target="")
    ids = lambda mode: prompts.prompt_ids([item], mode, tokenizer, model.spec, 8)[0]  # noqa: E731
    text = "Copy the list: a b a b\n\nCopy the list: c d"
    assert prompts.flat(turns) == text
    assert ids("chat_multiturn") == tokenizer.encode_chat(turns)
    assert ids("chat_single_user") == tokenizer.encode_prompt(text, raw=False)
    assert ids("raw_bos") == [bos, *ids("raw")] and bos not in ids("raw")
    assert prompts.mode_for([item], None) == "chat_multiturn" and prompts.mode_for(ITEMS, None) == "chat_single_user"
    with pytest.raises(InputError, match="chat_multiturn"):
        prompts.mode_for(ITEMS, "chat_multiturn")
    with pytest.raises(InputError, match=r"item x: .*max_length"):
        prompts.prompt_ids([item], "raw", tokenizer, model.spec, model.spec.max_length)


def test_texts_are_cut_at_the_end_then_at_the_stop_string(tiny):
    model, tokenizer = tiny
    end = model.spec.eos_id
    first, second = tokenizer.encode_raw(" a b = c"), tokenizer.encode_raw(" d = e")
    ids = [token for token in first if token != tokenizer.bos_id] + [end] + [t for t in second if t != tokenizer.bos_id]
    text = lambda stop, post: run.answer_text(  # noqa: E731
        ids, evaluation(tiny, task=dataclasses.replace(COPY, stop=stop), post=post)
    )
    assert text((), "eos_then_stop") == "a b = c" and text(("=",), "eos_then_stop").strip() == "a b"
    assert text(("= e",), "stop_then_special").split() == ["a", "b", "=", "c", "d"]
    assert text((), "stop_then_special").split() == ["a", "b", "=", "c", "d", "=", "e"], "text behind an end survives"
    assert cut("x STOP y", ["STOP"]) == "x " and cut("x", ["STOP", ""]) == "x"


def test_tiny_items_are_the_shipped_set():
    task = tasks.get("tiny")
    items = tasks.chosen(task, None, {}, None)
    assert len(items) == 1100 and items[0].id == "copy-000" and (task.gen_length, task.block_length) == (64, 16)
    assert task.version == tasks.digest(items) != tasks.digest(items[1:])
    few = tasks.chosen(task, None, {}, 2)
    assert len(few) == 22 and [item.id for item in few[:3]] == ["copy-000", "copy-001", "reverse-000"]
    tasks.check_score(task, items)
    assert tasks.first_of_each(ITEMS, 1) == [0, 3]


# The command


def refused(capsys, tmp_path, *argv: str) -> str:
    """The one line of a refusal: status 2, nothing on standard output, nothing written."""
    before = sorted(tmp_path.rglob("*"))
    status = main(["eval", "--out", str(tmp_path / "out"), "--cache-dir", "off", *argv])
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "", captured
    (line,) = captured.err.strip().splitlines()
    assert "error:" in line and "Traceback" not in line
    assert sorted(tmp_path.rglob("*")) == before
    return line


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ((), "--task is missing; tasks: tiny"),
        (("--task", "nosuch"), "unknown task 'nosuch'; tasks: tiny"),
        (("--task", "tiny", "--methods", "nosuch"), "unknown method 'nosuch'"),
        (("--task", "tiny", "--methods", "parallel", "--sweep", "alpha=1"), "no setting 'alpha'"),
        (("--task", "tiny", "--data", "nosuch.jsonl"), "--data"),
        (("--task", "tiny", "--option", "a=1"), "no option a"),
        (("--task", "tiny", "--option", "a"), "KEY=VALUE"),
        (("--task", "tiny", "--limit", "0"), "--limit 0"),
        (("--task", "tiny", "--batch-size", "0"), "--batch-size 0"),
        (("--task", "tiny", "--gen-length", "20", "--block-length", "16"), "gen_length 20 is not a multiple"),
        (("--task", "tiny", "--prompt-mode", "chat_multiturn"), "chat_multiturn"),
        (("--task", "tiny", "--model", "no/such/place"), "no model"),
        (
            ("--task", "tiny", "--methods", "parallel", "--gen-length", "99999", "--block-length", "3"),
            "item copy-000: prompt of",
        ),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(capsys, tmp_path, argv, word):
    assert word in refused(capsys, tmp_path, *argv)


def test_unusable_directories_are_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(capsys, tmp_path, "--task", "tiny", "--out", str(tmp_path / "file"))
    assert "is a file" in refused(capsys, tmp_path, "--task", "tiny", "--out", str(tmp_path / "file/below"))
    assert "no evaluation" in refused(capsys, tmp_path, "--from", str(tmp_path))
    assert "--task" in refused(capsys, tmp_path, "--from", str(tmp_path), "--task", "tiny")
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray/answers.jsonl").write_text("")
    assert "without runs.json" in refused(capsys, tmp_path, "--task", "tiny", "--out", str(tmp_path / "stray"))


def test_command_writes_and_prints_and_tabulates_again(copying, capsys, tmp_path, monkeypatch):
    out = tmp_path / "deep" / "out"
    argv = [
        "eval",
        "--task",
        "copying",
        "--methods",
        "parallel",
        "--out",
        str(out),
        "--batch-size",
        "2",
        "--timed",
        "1",
    ]
    assert main([*argv, "--json", "--cache-dir", "off"]) == 0
    captured = capsys.readouterr()
    (one,) = map(json.loads, captured.out.splitlines())
    assert one["run"] == "parallel" and one["complete"] and one["notes"]["model"] == "tiny"
    assert "answers, about" in captured.err
    assert sorted(p.name for p in out.iterdir()) == [
        "answers.jsonl", "runs.json", "summary.csv", "summary.json", "summary.md",
    ]  # fmt: skip
    whole = json.loads((out / "summary.json").read_text())
    assert whole["complete"] and whole["runs"][0]["metrics"]["exact"] == 1.0
    assert whole["runs"][0]["settings"]["kernels"] == "auto" and set(whole["about"]["versions"]) >= {
        "polestar-jax",
        "jax",
    }
    text = (out / "summary.md").read_text()
    (out / "summary.md").unlink()
    assert main(["eval", "--from", str(out)]) == 0
    assert capsys.readouterr().out == text == (out / "summary.md").read_text()
    shutil.copytree(out, tmp_path / "twin")
    assert main(["eval", "--from", str(out), str(tmp_path / "twin"), "--out", str(tmp_path / "both")]) == 0
    assert capsys.readouterr().out.count("### copying") == 6, "costs, counts and subsets of each"
    assert len(json.loads((tmp_path / "both/summary.json").read_text())["evaluations"]) == 2
    assert "of its own" in refused(capsys, tmp_path, "--from", str(out), "--out", str(tmp_path / "twin"))
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--from", "deep/out/", "--out", "deep/../deep/out"]) == 0, "the same directory"
    assert capsys.readouterr().out == text
    assert "prompt mode" in refused(capsys, tmp_path, *argv[1:], "--prompt-mode", "raw").replace("_", " ")


def test_one_failing_run_does_not_stop_the_others(tiny, tmp_path, monkeypatch):
    work = evaluation(tiny, runs=variants.build("vanilla,parallel", gen_length=8, block_default=4), timed=())
    monkeypatch.setattr(engine, "forget_programs", lambda: None)
    real = generation.run

    def failing(model, decoder, *args, **options):
        if decoder.name == "vanilla":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")
        return real(model, decoder, *args, **options)

    monkeypatch.setattr(generation, "run", failing)
    with records.opened(tmp_path, record(work)) as answers:
        assert run.evaluate(work, answers) == {"vanilla": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    first, second = summary.summarise(answers.record, answers.lines)["runs"]
    assert not first["complete"] and first["metrics"] == {} and second["complete"]
    assert "(0 of 5 items)" in tables.markdown([summary.summarise(answers.record, answers.lines)])


def test_what_does_not_suit_the_model_is_refused_before_anything_is_decoded(copying, capsys, tmp_path, monkeypatch):
    def unsuited(self, spec, *_):
        raise InputError("no such width")

    monkeypatch.setattr(PolestarCache, "init", unsuited)
    argv = ["--task", "copying", "--methods", "vanilla,polestar", "--out", str(tmp_path / "o")]
    assert "run polestar: no such width" in refused(capsys, tmp_path, *argv) and not (tmp_path / "o").exists()


def test_a_run_without_answers_is_forgotten(tiny, tmp_path):
    """A mistyped run that was stopped at once does not stay in every table."""
    mistyped = evaluation(tiny, runs=variants.build("parallel[threshold=99]", gen_length=8, block_default=4))
    with records.opened(tmp_path, record(mistyped)):
        pass
    work = evaluation(tiny, timed=())
    with records.opened(tmp_path, record(work)) as answers:
        assert list(answers.record.runs) == ["parallel"] and run.evaluate(work, answers) == {}
    with records.opened(tmp_path, record(mistyped)) as answers:
        assert list(answers.record.runs) == ["parallel", "parallel[threshold=99]"], "one with answers stays"


def test_evaluations_of_one_model_are_told_apart(tiny):
    work = evaluation(tiny, items=ITEMS[:1], batch_size=1)
    of = lambda mode, **notes: summary.summarise(  # noqa: E731
        about.record(work, prompt_mode=mode, options={}, versions={}, notes=notes), [line(subset="one")]
    )
    chat, raw, again = of("chat_single_user", model="a/LLaDA"), of("raw", model="b/LLaDA"), of("raw", model="a/LLaDA")
    assert tables.names([chat]) == ["LLaDA"]
    assert tables.names([chat, raw]) == ["LLaDA (prompts chat_single_user)", "LLaDA (prompts raw)"]
    assert tables.names([raw, again]) == ["LLaDA (no. 1)", "LLaDA (no. 2)"]
    assert tables.names([chat, raw, again])[1:] == ["LLaDA (prompts raw, no. 1)", "LLaDA (prompts raw, no. 2)"]
    head, _, row, *_ = tables.markdown([chat, raw, again]).splitlines()
    assert head.count("accuracy, %") == 3 and row.count("100.00") == 3
    assert tables.comma_separated([chat, raw]).count(",raw,float32,1,") == 1
    hub = of("raw", model="hub/models--GSAI-ML--LLaDA-8B-Instruct/snapshots/" + "0" * 40)
    assert tables.names([hub]) == ["LLaDA-8B-Instruct"]


def test_remaining_time_counts_no_run_that_ended(capsys):
    progress = Progress({("a", False): 10, ("a", True): 0, ("b", False): 4, ("b", True): 0})
    progress("b", False, 2)
    assert progress.remaining() > 0
    progress.ended("a")
    progress("b", False, 2)
    assert progress.remaining() == 0 and "4/4 answers, about 0 s left" in capsys.readouterr().err
