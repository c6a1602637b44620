"""Kernels lower for NVIDIA GPUs on a machine that has none."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import dispatch, shapes
from pallas_kernels.head_scores import head_scores
from pallas_kernels.residual import Nvfp4, patched, quantised
from pallas_kernels.vocab_scores import triton, vocab_scores

GPUS = {"a100": ("NVIDIA A100-SXM4-80GB", 108), "h100": ("NVIDIA H100 80GB HBM3", 132)}
# Named shapes are the same program for either, but for its target.
one_fast = pytest.mark.parametrize("gpu", ["a100", pytest.param("h100", marks=pytest.mark.slow)])


@contextlib.contextmanager
def compiling_for(gpu: str):
    kind, cores = GPUS[gpu]
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.11 and later say that the Triton route will go
        yield


def lowered(gpu: str, function, *args) -> str:
    with compiling_for(gpu):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(text: str) -> int:
    return text.count("@__gpu$xla.gpu.triton") + text.count("@triton_kernel_call")


@one_fast
@pytest.mark.parametrize("shape", [s for s in shapes.VOCAB_SCORES if s.rows in (1, 33)], ids=lambda shape: shape.name)
def test_real_shapes_take_the_kernel(shape, gpu):
    logits = jax.ShapeDtypeStruct((shape.rows, shape.vocab), jnp.float32)
    assert kernels_in(lowered(gpu, lambda x: vocab_scores(x, barred=shape.barred), logits)) == 1


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("shape", "dtype"), [((1, 1), "float32"), ((2, 3, 260), "bfloat16"), ((7, 33), "float16")])
def test_b51_odd_shapes_take_the_kernel(shape, dtype, gpu):
    text = lowered(gpu, lambda x: vocab_scores(x, backend="pallas"), jax.ShapeDtypeStruct(shape, dtype))
    assert kernels_in(text) == 1


@pytest.mark.parametrize("gpu", GPUS)
def test_b51_unserved_call_lowers_without_a_kernel(gpu):
    scattered = tuple(range(0, 60, 2))
    text = lowered(gpu, lambda x: vocab_scores(x, barred=scattered), jax.ShapeDtypeStruct((4, 100), jnp.float32))
    assert kernels_in(text) == 0


@one_fast
@pytest.mark.parametrize("shape", [s for s in shapes.HEAD_SCORES if s.rows in (1, 33)], ids=lambda shape: shape.name)
def test_real_heads_take_the_kernel(shape, gpu):
    rows = jax.ShapeDtypeStruct((shape.rows, shape.depth), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((shape.depth, shape.vocab), jnp.bfloat16)
    text = lowered(gpu, lambda x, w: head_scores(x, w, barred=shape.barred), rows, head)
    assert kernels_in(text) == 1
    assert f"{shape.rows}x{shape.vocab}xf32" not in text  # no logits


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"), [((1, 1), 1, "float32"), ((2, 3, 72), 260, "float16"), ((96, 72), 131, "float32")]
)
def test_b51_odd_heads_take_the_kernel(rows, vocab, dtype, gpu):
    args = jax.ShapeDtypeStruct(rows, dtype), jax.ShapeDtypeStruct((rows[-1], vocab), dtype)
    assert kernels_in(lowered(gpu, lambda x, w: head_scores(x, w, backend="pallas"), *args)) == 1


@pytest.mark.parametrize("gpu", GPUS)
def test_b51_unserved_head_lowers_without_a_kernel(gpu):
    args = jax.ShapeDtypeStruct((4, 64), jnp.float32), jax.ShapeDtypeStruct((64, 100), jnp.bfloat16)
    assert kernels_in(lowered(gpu, head_scores, *args)) == 0


def residual_args(b: int, w: int, d: int, clusters: int, dtype: str) -> tuple[tuple, tuple]:
    """Arguments to read rows with, and to write them with."""
    of = jax.ShapeDtypeStruct
    stored = Nvfp4(of((b, w, d // 2), jnp.uint8), of((b, w, d // 16), jnp.uint8), of((b,), jnp.float32))
    kept = of((b, clusters, d), jnp.float32), of((b, w), jnp.int32)
    return (stored, *kept, of((b, w, d), dtype), of((b, w), bool), of((d,), dtype)), (of((b, w, d), jnp.float32), *kept)


@one_fast
@pytest.mark.parametrize("shape", shapes.WINDOWS, ids=lambda shape: shape.name)
def test_real_windows_take_the_kernels(shape, gpu):
    reading, writing = residual_args(1, shape.rows, shape.width, shape.clusters, "bfloat16")
    assert kernels_in(lowered(gpu, lambda *args: patched(*args, eps=1e-5), *reading)) == 1
    assert kernels_in(lowered(gpu, quantised, *writing)) == 2  # the largest magnitudes, then the codes


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), [((1, 1, 16, 1), "float32"), ((2, 7, 112, 3), "float16")])
def test_b51_odd_windows_take_the_kernels(shape, dtype, direct, gpu):
    reading, writing = residual_args(*shape, dtype)
    options = dict(direct=direct, backend="pallas")
    assert kernels_in(lowered(gpu, lambda *args: patched(*args, eps=1e-5, **options), *reading)) == 1
    assert kernels_in(lowered(gpu, lambda *args: quantised(*args, **options), *writing)) == 2


@pytest.mark.parametrize("gpu", GPUS)
def test_b51_unserved_window_lowers_without_a_kernel(gpu):
    reading, _ = residual_args(1, 2, 16_384, 1, "float32")
    assert kernels_in(lowered(gpu, lambda *args: patched(*args, eps=1e-5), *reading)) == 0
    _, writing = residual_args(1, 9000, 1024, 1, "float32")
    assert kernels_in(lowered(gpu, quantised, *writing)) == 0


@dataclasses.dataclass(frozen=True)
class Sorts:
    """A kernel that runs interpreted and that the Triton route cannot lower."""

    interpret: bool = False

    def __call__(self, x):
        def body(x_ref, o_ref):
            o_ref[...] = jnp.sort(x_ref[...])

        params = plgpu.CompilerParams(num_warps=1)
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=out, compiler_params=params, interpret=self.interpret)(x)


@pytest.mark.parametrize("gpu", GPUS)
def test_b53_kernel_that_only_runs_interpreted_is_found_out_and_left(gpu, monkeypatch, caplog):
    x = np.float32([3, 1, 2, 0])
    assert Sorts(interpret=True)(x).tolist() == [0, 1, 2, 3]
    with compiling_for(gpu), pytest.raises(dispatch.Unsupported, match="sort"):
        dispatch.check_builds(Sorts(), jax.ShapeDtypeStruct((4,), jnp.float32), platform="cuda")
    monkeypatch.setattr(dispatch, "_reported", set())
    monkeypatch.setattr(triton, "plan", lambda *args, **options: Sorts())
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        assert kernels_in(lowered(gpu, lambda x: vocab_scores(x), jax.ShapeDtypeStruct((4, 32), jnp.float32))) == 0
    assert len(caplog.records) == 1 and "sort" in caplog.text


def test_cpu_takes_no_kernel():
    args = (jax.ShapeDtypeStruct((32, 416), jnp.float32),)
    assert kernels_in(jax.jit(vocab_scores).lower(*args).as_text()) == 0
