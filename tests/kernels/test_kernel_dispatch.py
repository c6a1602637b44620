"""Which route runs, and that a kernel that cannot be had never fails a caller who did not ask for it."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Unsupported, choose
from pallas_kernels.vocab_scores import triton, vocab_scores

LOGITS = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(dispatch.ENVIRONMENT, raising=False)
    monkeypatch.setattr(dispatch, "_reported", set())
    dispatch._build_failure.cache_clear()
    yield
    dispatch._build_failure.cache_clear()


def refuse(route):
    raise Unsupported(f"head_dim 72 on {route}")


def test_platform_decides_by_default():
    routes = {platform: choose("op", platform=platform) for platform in ("cpu", "cuda", "rocm", "tpu")}
    assert routes == {"cpu": "xla", "cuda": "pallas", "rocm": "xla", "tpu": "xla"}


def test_argument_beats_environment_beats_platform(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT, "interpret")
    assert choose("op", platform="cuda") == "interpret"
    assert choose("op", platform="cuda", backend="xla") == "xla"
    monkeypatch.setenv(dispatch.ENVIRONMENT, "xla")
    assert choose("op", platform="cuda") == "xla"
    monkeypatch.setenv(dispatch.ENVIRONMENT, "")
    assert choose("op", platform="cuda") == "pallas"


def test_context_asks_and_falls_back_unless_strict(monkeypatch, caplog):
    monkeypatch.setenv(dispatch.ENVIRONMENT, "xla")
    with dispatch.using("interpret"):
        assert choose("op", platform="cuda") == "interpret"
        assert choose("op", platform="cuda", backend="xla") == "xla"
        with dispatch.using("auto", strict=True):  # leaves it to what is around
            assert choose("op", platform="cuda") == "interpret"
            with dispatch.using("pallas"), pytest.raises(Unsupported, match="need CUDA"):  # strict still
                choose("op", platform="cpu")
        assert choose("op", platform="cuda") == "interpret"
    with dispatch.using("pallas"), caplog.at_level(logging.WARNING, "pallas_kernels"):
        assert choose("op", platform="cpu") == "xla"
        assert choose("op", platform="cuda", build=refuse) == "xla"
    assert [record.getMessage() for record in caplog.records] == [
        "op runs as plain XLA: Pallas kernels need CUDA, and this is compiled for cpu",
        "op runs as plain XLA: head_dim 72 on pallas",
    ]
    with dispatch.using("pallas", strict=True), pytest.raises(Unsupported, match="op: head_dim 72"):
        choose("op", platform="cuda", build=refuse)
    monkeypatch.setenv(dispatch.ENVIRONMENT, "pallas")
    with dispatch.using("auto", strict=True), pytest.raises(Unsupported, match="need CUDA"):
        choose("op", platform="cpu")
    monkeypatch.setenv(dispatch.ENVIRONMENT, "xla")
    with pytest.raises(ValueError, match="mosaic"), dispatch.using("mosaic"):
        pass
    assert choose("op", platform="cuda") == "xla"


def test_unknown_name_is_refused_with_the_accepted_ones(monkeypatch):
    with pytest.raises(ValueError, match=r"backend='mosaic'.*auto, xla, pallas, interpret"):
        choose("op", platform="cpu", backend="mosaic")
    monkeypatch.setenv(dispatch.ENVIRONMENT, "cuda")
    with pytest.raises(ValueError, match=r"POLESTAR_KERNELS='cuda'.*auto, xla, pallas, interpret"):
        choose("op", platform="cpu")


def test_b51_unsupported_shape_falls_back_with_one_log_line(caplog):
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        assert [choose("op", platform="cuda", build=refuse) for _ in range(3)] == ["xla"] * 3
    assert [record.getMessage() for record in caplog.records] == ["op runs as plain XLA: head_dim 72 on pallas"]


def test_b51_shape_the_kernel_does_not_serve_runs_as_xla(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "current_platform", lambda: "cuda")
    scattered = tuple(range(0, 50, 2))
    want = vocab_scores(LOGITS, barred=scattered, backend="xla")
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        got = vocab_scores(LOGITS, barred=scattered)
    assert len(caplog.records) == 1 and "25 separate ranges" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(Unsupported, match=r"vocab_scores.*25 separate ranges"):
        vocab_scores(LOGITS, barred=scattered, backend="pallas")


def test_explicit_route_that_cannot_run_raises():
    with pytest.raises(Unsupported, match=r"op: .*need CUDA.*cpu"):
        choose("op", platform="cpu", backend="pallas")
    with pytest.raises(Unsupported, match="op: head_dim 72"):
        choose("op", platform="cuda", backend="pallas", build=refuse)
    with pytest.raises(Unsupported, match="op: head_dim 72 on interpret"):
        choose("op", platform="cpu", backend="interpret", build=refuse)


def test_environment_asks_and_falls_back(monkeypatch, caplog):
    monkeypatch.setenv(dispatch.ENVIRONMENT, "pallas")
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        assert choose("op", platform="cpu") == "xla"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"])
def test_abstract_device_names_the_platform(kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=108, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    assert dispatch.current_platform() == "cpu"
    with jax.sharding.use_abstract_mesh(mesh):
        assert dispatch.current_platform() == ("rocm" if kind.startswith("AMD") else "cuda")


def test_default_device_names_the_platform():
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.current_platform() == "cpu"


def test_b52_xla_path_works_with_warnings_as_errors_and_without_pallas_triton():
    """Imports are clean, and a jax that has dropped the Triton route still serves everyone who does not name it."""
    program = """
import sys, jax, jax.numpy as jnp, numpy as np
from pallas_kernels import dispatch, shapes
from pallas_kernels.attention import attend
from pallas_kernels.head_scores import head_scores
from pallas_kernels.residual import quantised
from pallas_kernels.vocab_scores import vocab_scores
x = np.eye(3, 48, dtype=np.float32)
rows, at = jnp.ones((1, 3, 2, 16)), jnp.arange(3)[None]
keys, values = jnp.ones((1, 2, 3, 16)), jnp.ones((1, 2, 16, 3))
calls = {
    "vocab_scores": lambda **how: vocab_scores(x, **how).token.tolist() == [0, 1, 2],
    "head_scores": lambda **how: head_scores(x, jnp.eye(48), **how).token.tolist() == [0, 1, 2],
    "residual": lambda **how: not quantised(x[None], None, None, direct=True, **how).codes[0, 0, 1:].any(),
    "attention": lambda **how: (
        attend(rows, keys, values, q_positions=at, k_positions=at, theta=1e4, **how).round(5) == 1
    ).all(),
}
for call in calls.values():
    assert call() and call(backend="interpret")
for op in calls:
    for name in [name for name in sys.modules if name.startswith(f"pallas_kernels.{op}.triton")]:
        del sys.modules[name]
    del sys.modules[f"pallas_kernels.{op}"].triton
del sys.modules["jax.experimental.pallas"].triton
sys.modules["jax.experimental.pallas.triton"] = None
dispatch.current_platform = lambda: "cuda"
for call in calls.values():
    assert call()
    try:
        call(backend="pallas")
    except dispatch.Unsupported as error:
        assert "no Pallas Triton route" in str(error) and jax.__version__ in str(error), error
    else:
        raise AssertionError("triton was not refused")
"""
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


def _raise_while_tracing(logits):
    raise RuntimeError("RESOURCE_EXHAUSTED: shared memory 229376 > 166912\nmore")


def _refused_while_compiling(logits):
    return jax.ffi.ffi_call("polestar_test_no_such_call", jax.ShapeDtypeStruct((), jnp.float32))()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_raise_while_tracing, "RESOURCE_EXHAUSTED: shared memory 229376 > 166912"),
        (_refused_while_compiling, "polestar_test_no_such_call"),
    ],
)
def test_b53_kernel_that_fails_to_build_falls_back(build, reason, monkeypatch, caplog):
    @dataclasses.dataclass(frozen=True)
    class Stub:
        rows: tuple[int, int]

        def __call__(self, logits):
            return build(logits)

    want = vocab_scores(LOGITS, backend="xla")
    monkeypatch.setattr(triton, "plan", lambda shape, *rest, **options: Stub(tuple(shape)))
    monkeypatch.setattr(dispatch, "current_platform", lambda: "cuda")
    if build is _refused_while_compiling:  # stands in for a GPU: the stub compiles for the CPU, and fails to
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        got = jax.jit(lambda x: vocab_scores(x))(LOGITS)
        vocab_scores(LOGITS)
    assert len(caplog.records) == 1 and reason in caplog.text
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)
    with pytest.raises(Unsupported, match="vocab_scores"):
        vocab_scores(LOGITS, backend="pallas")


def test_route_is_decided_while_tracing(monkeypatch):
    """A compiled function keeps its route: nothing is looked up when it runs."""
    calls = []
    original = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *args, **options: calls.append(args) or original(*args, **options))
    compiled = jax.jit(lambda x: vocab_scores(x))
    for _ in range(3):
        compiled(LOGITS)
    assert len(calls) == 1
