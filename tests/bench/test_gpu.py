"""The script for a real GPU: rehearsed on the CPU with kernels interpreted, and what it does when something is wrong."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.dispatch import Unsupported
from polestar_jax.bench import gpu, kernels, loops, measure
from polestar_jax.bench.kernels import Error, check, checks
from polestar_jax.bench.models import random_denoiser, random_prompts
from polestar_jax.bench.sizes import parse_sizes, random_spec
from polestar_jax.models.denoiser import Denoiser

NAMES = ["attention", "attention", "attention", "drift", "drift", "residual patched", "residual quantised"]
NAMES += ["head scores", "head scores", "head scores", "vocab scores"]


def case(name: str) -> kernels.Check:
    return next(each for each in checks(gpu.rehearsal().shapes[0]) if each.name.startswith(name))


def rehearse(capsys, *argv: str) -> tuple[int, str, str]:
    status = gpu.main(["--rehearse", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.slow
def test_rehearsal_runs_all_of_it(capsys):
    status, out, _ = rehearse(capsys, "--budget-seconds", "3000")
    assert status == 0, out
    lines = out.splitlines()
    assert lines[-1] == "11 kernel checks, 0 beyond tolerance; 0 failures, 0 skipped"
    assert [line.split(", tiny")[0] for line in lines if ", tiny, " in line] == NAMES
    assert "small float32 decode, tokens by kernels and by XLA: equal" in lines
    compared = [line for line in lines if line.endswith(" of 16 tokens differ")]
    assert len(compared) == 4 and all(": 0 of 16 " in line for line in compared), (
        "float32: every route decodes the same"
    )
    assert "polestar, kernels=interpret,residency=device and kernels=interpret,residency=pinned_host" in out
    rows = [line.split("  ") for line in lines if line.startswith(("polestar  ", "vanilla  ", "parallel  "))]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    places = ["kernels=interpret,residency=device", "kernels=interpret,residency=pinned_host"]
    passes = {"full entry": "1", "local entry": "1", "refresh step": "2", "step": "12"}
    for how in ("kernels=interpret", "kernels=xla", *places):
        assert {row[2]: row[3] for row in rows if row[:2] == ["polestar", how] and row[2] != "whole loop"} == passes
    for how in ("kernels=interpret", "kernels=xla"):
        assert ["polestar", how, "whole loop", "16"] in [row[:4] for row in rows]
        for method in ("vanilla", "parallel"):
            assert [method, how, "pass", "16"] in [row[:4] for row in rows]


@pytest.mark.parametrize("name", ["residual quantised", "vocab scores"])
def test_a_kernel_is_checked_and_timed(name):
    outcome = check(case(name), "interpret", calls=2, repeats=2)
    assert outcome.worst.passed and outcome.seconds > 0 and outcome.plain_seconds > 0
    states, codes = 24 * 64 * 4, 24 * (64 // 2 + 64 // 16) + 4
    expected = {"residual quantised": states + 4 * 64 * 4 + 24 * 4 + codes, "vocab scores": 8 * 416 * 4 + 8 * 5 * 4}
    assert outcome.bytes == expected[name]


def broken(name: str, spoil) -> kernels.Check:
    """A check whose kernel, and only that, gives something else."""
    whole = case(name)
    run = lambda *args, backend: (  # noqa: E731
        spoil(whole.run(*args, backend="xla")) if backend == "interpret" else whole.run(*args, backend=backend)
    )
    return dataclasses.replace(whole, run=run)


@pytest.mark.parametrize(
    ("name", "spoil", "field"),
    [
        ("attention", lambda out: out.at[0, 3, 1, 2].add(0.1), "output"),
        ("attention", lambda out: out.at[0, 3, 1, 2].set(jnp.nan), "output"),
        ("drift", lambda seen: seen._replace(drift=seen.drift * 1.01), "drift"),
        (
            "drift",
            lambda seen: seen._replace(distribution=seen.distribution._replace(lse=seen.distribution.lse + 0.01)),
            "probabilities",
        ),
        ("residual patched", lambda rows: rows._replace(change=rows.change.at[0, 0, 0].add(1e-6)), "unequal changes"),
        ("residual quantised", lambda kept: kept._replace(codes=kept.codes.at[0, 5, 7].add(1)), "unequal codes"),
        ("residual quantised", lambda kept: kept._replace(scale=kept.scale * (1 + 2e-7)), "unequal scale"),
        ("vocab scores", lambda scores: scores._replace(token=scores.token.at[0, 2].add(1)), "unequal tokens"),
        ("vocab scores", lambda scores: scores._replace(margin=scores.margin + 1e-3), "margin"),
    ],
)
def test_a_kernel_that_is_off_fails(name, spoil, field):
    outcome = check(broken(name, spoil), "interpret", calls=1, repeats=1)
    assert outcome.worst.field == field and not outcome.worst.passed


def test_calls_in_a_row_are_all_made():
    """Each call gets what the first one got: the result is that of one call, and the calls are not folded into one."""
    program = kernels._again(lambda x: jnp.sin(x) @ x, 7)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    np.testing.assert_allclose(jax.jit(program)(x), jnp.sin(x) @ x, rtol=1e-5, atol=1e-5)
    (loop,) = [eqn for eqn in jax.make_jaxpr(program)(x).eqns if eqn.primitive.name in ("while", "scan")]
    assert "optimization_barrier" in str(loop) and "dot_general" in str(loop)


@pytest.mark.parametrize("shape", gpu.real().shapes, ids=lambda shape: shape.name)
def test_real_shapes_are_those_of_passes(shape):
    found = list(checks(shape))
    assert [each.name.split(",")[0] for each in found] == NAMES
    block = 33 if shape.name == "dream-7b" else 32
    assert f"attention, {shape.name}, {block + 96} rows over 1280 keys" in [each.name for each in found]
    assert [each.name.split(", ")[2] for each in found if each.name.startswith("head")] == [
        "32 rows",
        "33 rows",
        "64 rows",
    ]
    for each in found:
        arguments = jax.eval_shape(each.arguments, jax.random.key(0))
        results = jax.eval_shape(lambda *args, run=each.run: run(*args, backend="xla"), *arguments)
        assert jax.eval_shape(each.errors, results, results).keys() <= each.tolerances.keys()
    head = jax.eval_shape(case("head").arguments, jax.random.key(0))[1]
    assert head.dtype == jnp.bfloat16


def test_errors_without_a_number_or_a_tolerance_are_the_worst():
    assert Error("a", 0.5, 1.0).passed and Error("a", 1.0, 1.0).passed and not Error("a", 1.1, 1.0).passed
    assert not Error("a", float("nan"), 1.0).passed and Error("a", float("nan"), 1.0).share == float("inf")
    assert Error("a", 0.0, 0.0).passed and Error("a", 0.0, 0.0).share == 0
    assert not Error("a", 1.0, 0.0).passed and Error("a", 1.0, 0.0).share == float("inf")


def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: no NVIDIA GPU here (jax runs on cpu); --rehearse runs it tiny on a CPU\n"


@pytest.mark.parametrize("argv", [["--budget-seconds", "-1"], ["--budget-seconds", "nan"]])
def test_a_budget_that_is_none_is_refused(capsys, argv):
    assert gpu.main(argv) == 2
    assert capsys.readouterr().err.startswith("error: --budget-seconds ")


@pytest.mark.parametrize("argv", [["--budget-seconds", "long"], ["--only", "nothing"], ["--now"]])
def test_wrong_use(capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(argv)
    assert stopped.value.code == 2


def test_what_there_is_no_time_for_is_named(capsys):
    status, out, _ = rehearse(capsys, "--budget-seconds", "0")
    assert status == 1, "nothing was shown"
    skipped = [line for line in out.splitlines() if line.startswith("skipped, no time left: ")]
    assert len(skipped) == 13 and skipped[-1].endswith("random weights")
    assert out.splitlines()[-1] == "0 kernel checks, 0 beyond tolerance; 0 failures, 13 skipped"


def test_a_stage_is_not_begun_that_others_of_its_sort_say_would_not_end(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(clock))
    session = gpu.Session(gpu.rehearsal(), 60.0, 0.0)
    monkeypatch.setattr(session, "say", lambda what: None)
    ran = []
    for name in "abc":
        session.attempt(name, "kernel", lambda name=name: ran.append(name))
    # Each look at the clock takes 10 s: a runs from 20 to 30 with 50 left, b from 50 to 60 with 20 left; c has none.
    assert ran == ["a", "b"] and session.skipped == ["c"]


def test_a_stage_that_fails_ends_no_other(monkeypatch, capsys):
    def failing(case, *args, **options):
        if not case.name.startswith("vocab"):
            raise Unsupported(f"{case.name}: no such kernel\nand pages more")
        return check(case, *args, **options)

    monkeypatch.setattr(gpu, "check", failing)
    status, out, _ = rehearse(capsys, "--only", "kernels")
    assert status == 1 and out.splitlines()[-1] == "1 kernel checks, 0 beyond tolerance; 10 failures, 0 skipped"
    first = next(line for line in out.splitlines() if line.startswith("failed: "))
    assert (
        first
        == "failed: attention, tiny, 9 rows over 80 keys: Unsupported: attention, tiny, 9 rows over 80 keys: no such kernel"
    )


def test_a_check_that_fails_is_marked_and_status_one(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "checks", lambda shape: [broken("vocab", lambda s: s._replace(margin=s.margin + 1))])
    status, out, _ = rehearse(capsys, "--only", "kernels")
    assert status == 1 and "1 kernel checks, 1 beyond tolerance" in out.splitlines()[-1]
    (row,) = [line for line in out.splitlines() if line.startswith("vocab scores, tiny")]
    assert "  FAIL  " in row and "  margin  " in row


@pytest.mark.parametrize("differ", [0, 3])
def test_small_decodes_must_give_the_same_tokens(monkeypatch, capsys, differ):
    def decoded(model, decoder, prompts, how, **options):
        tokens = np.arange(16)[None] + (np.arange(16) < differ) * (how == "xla")
        return loops.Decoded(rows=(), tokens=tokens)

    monkeypatch.setattr(loops, "by_kind", decoded)
    status, out, _ = rehearse(capsys, "--only", "exact")
    assert status == int(bool(differ))
    expected = "equal" if differ == 0 else f"{differ} of 16 differ"
    assert f"small float32 decode, tokens by kernels and by XLA: {expected}" in out


@pytest.fixture(scope="module")
def model() -> Denoiser:
    spec = random_spec(parse_sizes("layers=2,d_model=32,heads=4,kv_heads=2,vocab=64,family=dream"))
    return random_denoiser(spec, seed=0, dtype="bfloat16")


def test_kinds_are_those_of_a_decode(model):
    """Pass by pass: the loop's own tokens, and every pass counted under its kind."""
    prompts = random_prompts(model.spec, 1, 20, seed=0)
    decoder = loops.decoder_of("parallel", {"kernels": "xla"}, gen=16, block=8)
    kinds, state = measure.by_kind(model, decoder, prompts, repeats=3, calls=2)
    (kind,) = kinds
    assert kind.passes == int(state.passes) and len(kind.seconds) == 3 and kind.bare_seconds == () and kind.ms > 0
    whole = loops.whole(model, decoder, prompts, "kernels=xla", repeats=1)
    np.testing.assert_array_equal(whole.tokens, state.generated)
    assert whole.rows[0].passes == kind.passes and state.cache is None


def test_weights_made_layer_by_layer_are_a_model(model):
    graph, weights = nnx.split(model)
    expected = nnx.split(Denoiser.abstract(model.spec, "bfloat16"))
    assert graph == expected[0] and model.spec.n_layers == len(model.layers) == 2
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), weights, expected[1])
    assert all(jax.tree.leaves(same))
    first, second = (np.asarray(layer.qkv[...], np.float32) for layer in model.layers[:2])
    assert not np.array_equal(first, second) and np.std(first) == pytest.approx(32**-0.5, rel=0.1)
    assert loops.read_bandwidth(model, repeats=2) > 0
    read = jax.make_jaxpr(loops._summed)(weights)
    assert len(read.out_avals) == len(jax.tree.leaves(weights)) == len(read.jaxpr.invars)
