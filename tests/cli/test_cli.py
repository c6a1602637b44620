"""The command line as people and scripts use it: output, JSON, traces, refusals, exit statuses."""

from __future__ import annotations

import io
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from polestar_jax.cli import main

LLADA = str(pathlib.Path(__file__).parents[1] / "data/checkpoints/llada")
SMALL = ["--gen-length", "16", "--block-length", "8", "--cache-dir", "off", "--method", "parallel"]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, *argv: str) -> str:
    """The one line of a refusal; checks status 2, empty stdout and no traceback."""
    status, out, err = run(capsys, *argv)
    assert status == 2 and out == "", (status, out, err)
    (line,) = err.strip().splitlines()
    assert "error:" in line and "Traceback" not in line
    return line


def test_generate_json_has_every_documented_field(capsys):
    status, out, _ = run(capsys, "generate", "--model", LLADA, "--prompt-ids", "1,2,3", "--json", *SMALL)
    (line,) = out.splitlines()
    answer = json.loads(line)
    assert status == 0
    assert set(answer) >= set(
        "id text prompt_ids tokens nfe full_forwards partial_forwards refreshes tokens_non_eos tpf tps tpf_all tps_all seconds "
        "compile_seconds commits method settings model dtype device versions".split()
    )
    assert answer["prompt_ids"] == [1, 2, 3] and len(answer["tokens"]) == 16 and answer["text"] is None
    assert sum(answer["commits"].values()) == 16 and set(answer["commits"]) == {
        "confidence",
        "fallback",
        "drift",
        "suffix",
    }
    assert answer["settings"]["block_length"] == 8 and answer["settings"]["seed"] == 0 and answer["dtype"] == "float32"
    assert answer["compile_seconds"] > 0 and {"jax", "polestar-jax"} <= set(answer["versions"])


def test_input_keeps_ids_and_order_whatever_the_batch(capsys, tmp_path):
    lines = [
        {"id": "a", "prompt_ids": [1, 2, 3]},
        {"prompt_ids": [4] * 9},
        {"id": 7, "prompt_ids": [5, 6, 250]},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = {}
    for batch in ("1", "2", "3"):
        target = tmp_path / f"out{batch}.jsonl"
        status, out, _ = run(
            capsys, "generate", "--model", LLADA, "--input", str(source), "--json", "--batch-size", batch,
            "--output", str(target), "--temperature", "0.5", *SMALL,
        )  # fmt: skip
        assert status == 0 and out == ""
        rows = [json.loads(line) for line in target.read_text().splitlines()]
        assert [row["id"] for row in rows] == ["a", 1, 7]
        found[batch] = [row["tokens"] for row in rows]
    assert found["1"] == found["2"] == found["3"]


def test_trace_has_the_documented_arrays(capsys, tmp_path):
    target = tmp_path / "trace.npz"
    status, out, _ = run(
        capsys, "generate", "--model", LLADA, "--prompt-ids", "1,2,3", "--json", "--trace", str(target), *SMALL
    )
    answer, trace = json.loads(out), np.load(target)
    t = answer["nfe"]
    assert status == 0 and list(tmp_path.iterdir()) == [target], "no partial file is left"
    assert trace["tokens"].shape == trace["confidence"].shape == trace["committed"].shape == (t, 16)
    assert trace["drift"].shape == trace["delta"].shape == (t, 16) and np.isnan(trace["drift"]).all()
    assert trace["block"].shape == trace["kind"].shape == (t,)
    assert trace["tokens"][-1].tolist() == answer["tokens"] and (trace["tokens"][0] == 259).any()
    assert trace["committed"].sum() == 16 and not np.isnan(trace["confidence"][trace["committed"]]).any()
    assert sorted(set(trace["block"].tolist())) == [0, 1] and set(trace["kind"].tolist()) <= {0, 2}
    assert (trace["kind"] == 0).sum() == 2, "one entry a block"
    step = trace["step"]
    assert all(trace["committed"][step[i], i] for i in range(16)) and set(trace["reason"].tolist()) <= {0, 1}
    assert json.loads(str(trace["settings"]))["method"] == "parallel"
    assert trace["token_selected"].shape == (t, 3, 19) and trace["labels"].shape == (t, 3, 19)


def test_polestar_is_the_default_and_its_trace_shows_clusters(capsys, tmp_path):
    target = tmp_path / "trace.npz"
    status, out, _ = run(
        capsys, "generate", "--model", LLADA, "--prompt-ids", "1,2,3", "--json", "--trace", str(target), "--preset", "release",
        "--set", "clusters=4", "--set", "top_clusters=2", "--set", "refresh_step=-1", "--set", "tau_static=1.5", *SMALL[:-2],
    )  # fmt: skip
    answer, trace = json.loads(out), np.load(target)
    t, refreshes = answer["nfe"], answer["refreshes"]
    assert status == 0 and answer["method"] == "polestar" and sum(answer["commits"].values()) == 16
    assert answer["settings"]["preset"] == "release" and answer["settings"]["refresh_cumulative"] == 2
    assert answer["full_forwards"] == 2 and (trace["kind"] <= 1).sum() == 2, "blocks 0 and 1 of 4 are entered fully"
    assert refreshes == (trace["kind"] == 3).sum() == t - 2 > 0, "every step refreshes"
    assert trace["cluster_drift"].shape == trace["cluster_selected"].shape == (t, 3, 4)
    assert trace["token_selected"].shape == trace["labels"].shape == (t, 3, 19)
    assert (trace["cluster_selected"].sum((1, 2)) == np.where(trace["kind"] == 3, 5, 0)).all(), (
        "2, 2 and 1 of the last layer"
    )
    assert not np.isnan(trace["drift"][trace["kind"] >= 2]).all(axis=1).any()


def test_stream_ends_with_the_same_answer(capsys):
    common = ["generate", "--model", LLADA, "--prompt-ids", "1,2,3", "--json", *SMALL]
    whole = json.loads(run(capsys, *common)[1])
    _, out, _ = run(capsys, *common, "--stream")
    *passes, last = map(json.loads, out.splitlines())
    assert len(passes) == last["nfe"] == whole["nfe"] and last["tokens"] == whole["tokens"]
    assert [p["nfe"] for p in passes] == list(range(1, last["nfe"] + 1))


def test_prompt_from_standard_input_needs_text(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    line = refused(capsys, "generate", "--model", LLADA, *SMALL)
    assert "has no tokenizer files" in line
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert "is not UTF-8" in refused(capsys, "generate", "--model", LLADA, *SMALL)


def test_logits_match_the_golden_through_the_command(capsys, tmp_path):
    golden = np.load(pathlib.Path(__file__).parents[1] / "data/goldens/llada_logits.npz")
    target = tmp_path / "logits.npz"
    ids = ",".join(map(str, golden["input0"].tolist()))
    status, out, _ = run(
        capsys, "logits", "--model", LLADA, "--prompt-ids", ids, "--out", str(target), "--json", "--cache-dir", "off"
    )
    values = np.load(target)["logits"]
    assert status == 0 and json.loads(out)["shape"] == list(values.shape) == list(golden["logits0"].shape)
    assert values.dtype == np.float32
    assert np.abs(values - golden["logits0"]).max() <= 2e-4 * np.abs(golden["logits0"]).max()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["generate", "--method", "magic"],
            "unknown method 'magic'; methods: vanilla, parallel, fast_dllm_prefix, fast_dllm_dual, fast_dllm_factor, "
            "entropy_cache, adablock, dkv_cache, dpad, "
            "dynamic_dllm, dllm_cache, sparse_dllm, elastic_cache, d2_cache, klass, dawn, hierarchy, prophet, slowfast, polestar",
        ),
        (["generate", "--set", "tau=1"], "method polestar has no setting 'tau'; it has: gen_length"),
        (["generate", "--method", "parallel", "--preset", "paper"], "--preset paper is not accepted: method parallel"),
        (["generate", "--preset", "best"], "setting preset='best' is not accepted: paper | release"),
        (["generate", "--set", "threshold"], "--set threshold is not accepted: KEY=VALUE"),
        (["generate", "--set", "alpha=high"], "setting alpha=high is not accepted: a number"),
        (["generate", "--method", "vanilla", "--set", "order=best"], "low_confidence | maskgit_plus"),
        (["generate", "--gen-length", "40"], "gen_length 40 is not a multiple of block_length 32"),
        (["generate", "--prompt-ids", "1,x"], "prompt ids '1,x' are not accepted"),
        (["generate", "--prompt-ids", "1,999"], "prompt id 999 is outside the vocabulary 0..259"),
        (["generate", "--prompt-ids", "-5"], "prompt"),
        (["generate", "--prompt-ids", "1,259"], "contains the mask token 259"),
        (["generate", "--prompt-ids", "1", "--batch-size", "0"], "--batch-size 0 is not accepted"),
        (["generate", "--prompt-ids", "1", "--seed", "-1"], "--seed -1 is not accepted"),
        (["generate", "--prompt-ids", "1", "--trace", "no/such/dir/t.npz"], "does not exist"),
        (["generate", "--prompt-ids", "1", "--gen-length", "512"], "more than the model's max_length 512"),
        (["generate", "--input", "missing.jsonl"], "--input missing.jsonl: No such file"),
        (["generate", "--nonsense"], "unrecognized arguments"),
        (["logits", "--prompt-ids", "1", "--out", "no/such/dir/l.npz"], "does not exist"),
        (["chat", "--raw"], "a chat needs the chat template"),
        (["chat"], "a chat needs them"),
        (["nonsense"], "invalid choice"),
        ([], "VERB"),
    ],
)
def test_refusals_are_one_line(capsys, argv, words):
    if argv and argv[0] in ("generate", "logits", "chat"):
        argv = [*argv, "--model", LLADA, "--cache-dir", "off"]
    if argv and argv[0] == "generate" and not {"--prompt-ids", "--input"} & set(argv):
        argv = [*argv, "--prompt-ids", "1"]
    assert words in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompts"),
        ("{", "line 1 is not JSON"),
        ('{"prompt_ids": [1]}\n[1]', "line 2 must be an object"),
        ('{"prompt_ids": [1], "prompt": "x"}', "line 1 must be an object with one of"),
        ('{"prompt_ids": "1"}', 'line 1: "prompt_ids" must be a list of whole numbers'),
        ('{"prompt_ids": [true]}', 'line 1: "prompt_ids" must be a list of whole numbers'),
        ('{"prompt": 3}', 'line 1: "prompt" must be text'),
        ('{"prompt_ids": [1]}\n{"prompt_ids": []}', "prompt 2 of 2: prompt is empty"),
    ],
)
def test_bad_input_files_name_the_line_and_decode_nothing(capsys, tmp_path, text, words):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    target.write_text("old")
    line = refused(
        capsys,
        "generate",
        "--model",
        LLADA,
        "--input",
        str(source),
        "--output",
        str(target),
        "--cache-dir",
        "off",
        *SMALL,
    )
    assert words in line
    assert target.read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_methods_and_models_list_what_there_is(capsys):
    from polestar_jax.decoders import METHODS

    _, out, _ = run(capsys, "methods", "--json")
    rows = {row["method"]: row for row in map(json.loads, out.splitlines())}
    assert set(rows) == set(METHODS)
    assert rows["parallel"]["settings"]["threshold"]["default"] == 0.9 and "2505.22618" in rows["parallel"]["source"]
    _, out, _ = run(capsys, "models", "--json")
    models = {row["model"]: row for row in map(json.loads, out.splitlines())}
    assert models["LLaDA-8B-Instruct"]["parameters"] == 16_031_162_368 // 2 and models["tiny"]["weights"] == "embedded"
    for verb in ("methods", "models"):
        assert run(capsys, verb)[0] == 0
    _, out, _ = run(capsys, "methods", "klass")
    assert out.startswith("klass: ") and "\n  parts: schedule blocks, cache none, commit klass\n" in out
    assert (
        "  a pass computes: " in out and "  differs from its authors' code: " in out and "LLaDA 0.6, Dream 0.9" in out
    )
    status, out, err = run(capsys, "methods", "magic")
    assert (status, out) == (2, "") and "unknown method 'magic'" in err


def test_parts_of_other_methods_are_settings(capsys):
    """--set cache=, commit=, schedule= bring their part's own settings along; what does not fit is one line."""
    ids = ["--model", LLADA, "--prompt-ids", "1,2,3", "--gen-length", "8", "--block-length", "4", "--json"]
    own = ["--method", "polestar", "--set", "commit=klass", "--set", "kl_threshold=1.5"]
    status, out, _ = run(capsys, "generate", *own, *ids)
    settings = json.loads(out)["settings"]
    assert status == 0 and settings["commit"] == "klass" and settings["kl_threshold"] == 1.5
    assert settings["threshold"] == 0.6 and "tau_static" not in settings, (
        "the family's default, and none of the part's before"
    )
    for texts, words in (
        (["commit=dawn"], "commit Dawn goes by the attention of every row, and cache PolestarCache gives none"),
        (["cache=best"], "setting cache='best' is not accepted: none | prefix | dual"),
        (["commit=klass", "tau_static=0.5"], "method polestar has no setting 'tau_static'"),
    ):
        status, out, err = run(capsys, "generate", *[x for text in texts for x in ("--set", text)], *ids)
        assert (status, out) == (2, "") and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "verb", ["generate", "chat", "logits", "convert", "verify", "eval", "bench", "methods", "models", "train-tiny"]
)
def test_every_verb_has_help_with_an_example(capsys, verb):
    status, out, _ = run(capsys, verb, "--help")
    assert status == 0 and "example" in out and f"polestar {verb}" in out


def test_module_and_errors_without_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "polestar_jax", "generate", "--model", "no/such/model", "--prompt", "x"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert "no model 'no/such/model'" in done.stderr and "Traceback" not in done.stderr


def test_importing_the_package_is_cheap():
    code = "import sys, polestar_jax; assert 'jax' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_names_resolve_after_submodule_imports():
    code = (
        "import polestar_jax.loading, polestar_jax.generation, polestar_jax as pj\n"
        "assert all(getattr(pj, n) is not None for n in pj.__all__) and callable(pj.load) and callable(pj.generate)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_cache_directory_can_be_moved_or_turned_off(tmp_path):
    code = (
        "import json, os, sys, jax; from polestar_jax import compilation_cache as c\n"
        "for directory, variables in json.loads(sys.argv[1]):\n"
        "    jax.config.update('jax_compilation_cache_dir', None)\n"
        "    os.environ.update(variables)\n"
        "    print(c.enable(directory), jax.config.jax_enable_compilation_cache)\n"
        "    [os.environ.pop(name) for name in variables]"
    )
    cases = [
        (None, {}),
        (None, {"XDG_CACHE_HOME": f"{tmp_path}/x"}),
        (None, {"POLESTAR_CACHE_DIR": f"{tmp_path}/y"}),
        (f"{tmp_path}/z", {"POLESTAR_CACHE_DIR": "off"}),
        ("off", {}),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)], env={"PATH": "", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=True, timeout=120, cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"{tmp_path}/.cache/polestar-jax True",
        f"{tmp_path}/x/polestar-jax True",
        f"{tmp_path}/y True",
        f"{tmp_path}/z True",
        "None False",
    ]


def test_outputs_follow_links_and_pipes_and_refuse_clashes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ["generate", "--model", LLADA, "--prompt-ids", "1,2,3", *SMALL]
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    assert main([*common, "--output", "link"]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text().count(",") == 15
    assert main([*common, "--output", "/dev/null", "--trace", "/dev/null"]) == 0
    assert pathlib.Path("/dev/null").is_char_device()
    capsys.readouterr()
    assert "name the same file" in refused(capsys, *common, "--output", "same", "--trace", "./same")
    assert "is a directory" in refused(capsys, *common, "--output", "new/")
    assert "cannot be written" in refused(capsys, *common, "--trace", "t" * 256)
    assert main([*common, "--trace", "t" * 251 + ".npz"]) == 0
    capsys.readouterr()
    (tmp_path / "in.jsonl").write_text('\ufeff{"prompt_ids": [1]}')
    both = ["generate", "--model", LLADA, "--input", "in.jsonl", *SMALL]
    assert "name the same file" in refused(capsys, *both, "--output", "in.jsonl")
    assert main(both) == 0, "a byte order mark is no part of the text"
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".partial")]


def test_settings_given_twice_must_agree(capsys):
    common = ["generate", "--model", LLADA, "--prompt-ids", "1", "--cache-dir", "off", "--method", "parallel"]
    assert "given twice" in refused(capsys, *common, "--gen-length", "16", "--set", "gen_length=8")
    assert "given twice" in refused(capsys, *common, "--set", "threshold=0.5", "--set", "threshold=0.6")
    assert main([*common, "--gen-length", "16", "--set", "gen_length=16"]) == 0


@pytest.mark.parametrize(
    "text", ['{"prompt_ids": [1], "id": NaN}', '{"prompt_ids": [1], "id": "\\ud800"}', "[" * 100_000]
)
def test_input_that_could_not_be_reported_is_refused(capsys, tmp_path, text):
    (tmp_path / "in.jsonl").write_text(text)
    line = refused(capsys, "generate", "--model", LLADA, "--input", str(tmp_path / "in.jsonl"), *SMALL)
    assert "line 1 is not JSON" in line


def test_streamed_seconds_leave_out_compiling(capsys):
    argv = [
        "generate",
        "--model",
        LLADA,
        "--prompt-ids",
        "1,2",
        "--gen-length",
        "24",
        "--block-length",
        "4",
        "--json",
        "--stream",
        "--method",
        "fast_dllm_dual",
    ]
    last = json.loads(run(capsys, *argv, "--cache-dir", "off")[1].splitlines()[-1])
    assert last["compile_seconds"] > 0 and last["seconds"] < last["compile_seconds"] + 5


def test_closed_streams_are_named():
    for argv, closed in ((["generate", "--input", "-"], "<&-"), (["chat"], "<&-")):
        done = subprocess.run(
            ["bash", "-c", f'"{sys.executable}" -m polestar_jax {" ".join(argv)} --model {LLADA} {closed}'],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2 and "standard input" in done.stderr and "Traceback" not in done.stderr
