"""Starting compiles: what is said when one cannot be had or goes wrong. Needs no plug-in."""

from __future__ import annotations

import json
import sys

import pytest

from polestar_jax.aot import launch
from polestar_jax.aot.__main__ import main
from polestar_jax.aot.cases import Size, make, names
from polestar_jax.errors import InputError, RunError


def worker(monkeypatch, program: str) -> None:
    monkeypatch.setattr(launch, "missing", lambda: None)
    monkeypatch.setattr(launch, "WORKER", (sys.executable, "-c", program))


def test_missing_plugin_is_named_with_the_way_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(launch, "PLUGINS", ("xla_cuda_of_no_kind",))
    assert main(["h100", "--layers", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: jax's CUDA plug-in is not installed; pip install 'polestar-jax[aot]'\n"


def test_compiler_that_ends_the_process_is_reported(monkeypatch):
    worker(monkeypatch, "import os, sys; print('LLVM ERROR: Cannot select', file=sys.stderr, flush=True); os.abort()")
    with pytest.raises(RunError, match=r"vanilla-step for a100 failed \(signal 6\): LLVM ERROR: Cannot select"):
        launch.run("a100", "vanilla-step", Size(layers=1))


def test_compiler_error_is_reported_by_its_first_line(monkeypatch, capsys):
    program = """
from polestar_jax.aot import worker
def compile_case(*args, **options):
    raise ValueError("Shared memory size limit exceeded\\nand pages more")
worker.compile_case = compile_case
worker.main()
"""
    worker(monkeypatch, program)
    assert main(["h100", "--layers", "1"]) == 1
    assert capsys.readouterr().err == (
        "error: compiling vanilla-step for h100 failed: ValueError: Shared memory size limit exceeded\n"
    )


def test_worker_that_cannot_start_is_reported(monkeypatch):
    worker(monkeypatch, "import no_such_module")
    with pytest.raises(RunError, match=r"\(status 1\): ModuleNotFoundError: No module named 'no_such_module'"):
        launch.run("a100", "vanilla-step", Size(layers=1))


def test_report_is_printed_as_json(monkeypatch, capsys):
    program = "import json, sys, pathlib; r = json.load(sys.stdin); pathlib.Path(r['dump'], 'report.json').write_text("
    worker(monkeypatch, program + "json.dumps({'peak_bytes': 7, 'asked': r['what'], 'layers': r['size']['layers']}))")
    assert main(["h200", "--what", "parallel-loop", "--layers", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == {"peak_bytes": 7, "asked": "parallel-loop", "layers": 3}


def test_worker_gets_the_cpu_and_a_dump_folder(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    environment = launch._environment("/dump", ptx=False)
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["XLA_FLAGS"].split() == [
        "--xla_gpu_enable_triton_gemm=false", "--xla_dump_to=/dump", "--xla_dump_hlo_as_text",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model="llada-9b"), "model 'llada-9b' is not known; accepted: llada-8b, dream-7b"),
        (dict(layers=33), "layers 33 is not in 1..32"),
        (dict(model="dream-7b", layers=0), "layers 0 is not in 1..28"),
        (dict(batch=0), "batch 0 is not positive"),
        (dict(dtype="float8"), "dtype 'float8' is not known; accepted: bfloat16, float32"),
    ],
)
def test_wrong_size_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        Size(**options)


def test_unknown_case_is_refused():
    with pytest.raises(InputError, match=r"'vanilla-leap' is not known; accepted: .*vanilla-step, vanilla-loop"):
        make("vanilla-leap", Size())


def test_sizes_that_do_not_go_together_are_wrong_input(monkeypatch, capsys):
    """Found by the decoder in the worker, reported like any wrong use."""
    monkeypatch.setattr(launch, "missing", lambda: None)
    assert main(["h100", "--layers", "1", "--gen", "250"]) == 2
    assert "block_length" in capsys.readouterr().err


def test_wrong_use_of_the_command_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["v100"])
    assert stopped.value.code == 2 and "a100" in capsys.readouterr().err
    assert {"vocab-scores", "forward", "vanilla-step", "vanilla-loop"} <= set(names())


@pytest.mark.parametrize("what", ["vocab-scores", "forward", "vanilla-step", "vanilla-loop"])
def test_cases_are_abstract_and_of_full_size(what):
    case = make(what, Size())
    import jax

    leaves = jax.tree.leaves(case.args)
    assert leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    if what != "vocab-scores":
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(case.args[0])) == 16_031_162_368
