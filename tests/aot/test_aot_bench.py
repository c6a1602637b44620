"""``polestar bench --aot``: what it compiles, prints and refuses, with compiles that are made up; and one that is real."""

from __future__ import annotations

import json

import pytest

from polestar_jax.aot import launch
from polestar_jax.aot.cases import Size
from polestar_jax.bench import compiled
from polestar_jax.cli import main
from polestar_jax.errors import RunError

PASSES = ["polestar-full-entry", "polestar-local-entry", "polestar-refresh-step", "polestar-step"]
REPORT = dict(
    jax="0.10.2", lower_seconds=2.4, compile_seconds=40.0, peak_bytes=16_789_000_000, bytes_moved=15_400_000_000,
    flops=478_000_000_000, host_temp_bytes=2_500_000, host_transfers={"to_host": 3, "from_host": 4},
    custom_calls={"__gpu$xla.gpu.triton": 33, "__cublas$gemm": 2}, pallas_kernels={"attention": 32, "head_scores": 1},
    big_copies=["bf16[1024,768]", "bf16[1024,768]"],
    kernels={"attention": ["sm_90a", 185, 0], "attention__1": ["sm_90a", 208, 16], "head_scores": ["sm_90a", 128, 0],
             "loop_fusion": ["sm_90a", 10, 8]},
)  # fmt: skip


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(["bench", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def compiles(monkeypatch) -> list[tuple]:
    """The compiles that were asked for; each gives REPORT, and a refresh step fails."""
    asked = []

    def fake(target: str, what: str, size: Size, *, ptx: bool):
        asked.append((target, what, size, ptx))
        if what == "polestar-refresh-step":
            raise RunError("compiling it failed: shared memory")
        return REPORT

    monkeypatch.setattr(launch, "missing", lambda: None)
    monkeypatch.setattr(launch, "run", fake)
    return asked


def test_every_pass_of_both_models_is_compiled_by_default(compiles, capsys):
    status, _, err = run(capsys, "--aot", "h200", "--json")
    assert [(target, what, size.model) for target, what, size, _ in compiles] == [
        ("h200", what, model) for model in ("llada-8b", "dream-7b") for what in PASSES
    ]
    size = compiles[0][2]
    assert (size.layers, size.prompt, size.gen, size.block, size.batch, size.dtype) == (
        None,
        1024,
        256,
        32,
        1,
        "bfloat16",
    )
    assert status == 1, "one pass did not compile"
    assert "compiling dream-7b polestar-step for h200 (8 of 8)" in err


def test_options_reach_the_compiles(compiles, capsys):
    argv = (
        "--aot a100 --model dream-7b --layers 2 --prompt 64 --gen-length 16 --batch 3 --methods vanilla,parallel --ptx"
    )
    assert run(capsys, *argv.split(), "--json")[0] == 0
    size = Size(model="dream-7b", layers=2, prompt=64, gen=16, block=16, batch=3)
    assert compiles == [("a100", "vanilla-step", size, True), ("a100", "parallel-step", size, True)]


def test_json_holds_the_report_and_its_ratios(compiles, capsys):
    _, out, _ = run(capsys, "--aot", "h100", "--model", "llada-8b", "--json")
    full, _, refresh, _ = map(json.loads, out.splitlines())
    assert full["pass"] == "polestar-full-entry" and full["weight_bytes"] == 16_031_162_368
    assert full["read_weight_bytes"] == 16_031_162_368 - 126_464 * 4096 * 2
    assert full["bytes_over_weights"] == pytest.approx(15.4e9 / 16_031_162_368)
    assert full["bytes_over_read_weights"] == pytest.approx(15.4e9 / full["read_weight_bytes"])
    assert full["host_transfers"] == {"to_host": 3, "from_host": 4} and full["kernels"]["loop_fusion"][2] == 8
    assert refresh["pass"] == "polestar-refresh-step" and refresh["error"] == "compiling it failed: shared memory"


def test_table_says_what_is_counted(compiles, capsys):
    status, out, _ = run(capsys, "--aot", "h100", "--model", "llada-8b")
    assert status == 1
    about, model, size, _, head, full, _, step, failed, _, *notes = out.splitlines()
    assert about == "target: NVIDIA H100 80GB HBM3, sm_90; jax 0.10.2"
    assert model.startswith("llada-8b: 32 layers, bfloat16, weights 16.03 GB, of which a pass reads 15.00 GB")
    assert size == "run: batch 1, prompt 1024, gen 256, block 32"
    assert head.split()[:5] == ["model", "pass", "compile", "s", "peak"]
    assert full.split("  ")[0] == "llada-8b" and step.split()[1] == "polestar-step"
    cells = [cell.strip() for cell in full.split("  ") if cell.strip()]
    assert cells[1:10] == ["polestar-full-entry", "42", "16.79", "15.40", "0.961", "1.027", "478", "3, 4", "2.5"]
    assert cells[10:] == ["__cublas$gemm x2", "bf16[1024,768] x2", "attention x32 185/208r 16B, head_scores x1 128r"]
    assert failed == "llada-8b polestar-refresh-step: compiling it failed: shared memory"
    assert "traffic.py" in " ".join(notes)


def test_report_goes_to_a_file(compiles, capsys, tmp_path):
    status, out, _ = run(capsys, "--aot", "h100", "--methods", "parallel", "--output", str(tmp_path / "report"))
    assert status == 0 and out == "" and "parallel-step" in (tmp_path / "report").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_without_registers_kernels_are_listed_all_the_same():
    assert compiled._kernels({"b": 1, "a": 2}, None) == "a x2, b x1"
    assert compiled._kernels({}, None) == "none"


@pytest.mark.parametrize(("version", "cheap"), [("0.10.2", True), ("0.11.0", False), ("0.12.0.1", False)])
def test_registers_are_asked_for_where_they_cost_little(monkeypatch, compiles, capsys, version, cheap):
    monkeypatch.setattr(compiled.importlib.metadata, "version", lambda name: version)
    for option, expected in (((), cheap), (("--ptx",), True), (("--no-ptx",), False)):
        compiles.clear()
        run(capsys, "--aot", "h100", "--model", "llada-8b", "--methods", "parallel", *option)
        assert compiles[0][3] == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--aot", "v100"], "invalid choice: 'v100'"),
        (["--aot", "h100", "--random", "mid"], "--random does not go with --aot"),
        (["--aot", "h100", "--set", "clusters=3"], "--set does not go with --aot"),
        (["--aot", "h100", "--repeats", "3"], "--repeats does not go with --aot"),
        (["--aot", "h100", "--seed", "0"], "--seed does not go with --aot"),
        (["--aot", "h100", "--cache-dir", "off"], "--cache-dir does not go with --aot"),
        (["--layers", "3"], "--layers goes with --aot alone"),
        (["--no-ptx"], "--ptx goes with --aot alone"),
        (["--aot", "h100", "--model", "tiny"], "model 'tiny' is not known; accepted: llada-8b, dream-7b"),
        (["--aot", "h100", "--layers", "30"], "layers 30 is not in 1..28, the depth of dream-7b"),
        (["--aot", "h100", "--dtype", "float16"], "dtype 'float16' is not known; accepted: bfloat16, float32"),
        (["--aot", "h100", "--methods", "none"], "unknown method 'none'"),
        (["--aot", "h100", "--gen-length", "40"], "gen_length 40 is not a multiple of block_length 32"),
        (["--aot", "h100", "--batch-size", "0"], "--batch-size 0"),
        (["--aot", "h100", "--output", "nowhere/report"], "nowhere does not exist"),
    ],
)
def test_refusals_are_one_line_and_status_two(compiles, capsys, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *argv)
    assert status == 2 and out == "" and compiles == []
    (line,) = err.strip().splitlines()
    assert line.startswith("polestar bench: error: ") and words in line


def test_missing_plugin_is_named_with_the_way_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr(launch, "PLUGINS", ("xla_cuda_of_no_kind",))
    status, out, err = run(capsys, "--aot", "h100")
    assert (status, out) == (1, "")
    assert err == "polestar bench: error: jax's CUDA plug-in is not installed; pip install 'polestar-jax[aot]'\n"


@pytest.mark.skipif(launch.missing() is not None, reason=str(launch.missing()))
def test_a_real_step_is_compiled(capsys):
    argv = "--aot h100 --model llada-8b --layers 1 --prompt 128 --gen-length 64 --methods parallel --no-ptx --json"
    status, out, _ = run(capsys, *argv.split())
    row = json.loads(out)
    assert status == 0 and row["pallas_kernels"] == {"attention": 1, "head_scores": 1}
    assert row["read_weight_bytes"] < row["bytes_moved"] < 1.2 * row["read_weight_bytes"]
    assert (
        row["host_transfers"] == {"to_host": 0, "from_host": 0} and row["big_copies"] == [] and row["kernels"] is None
    )
