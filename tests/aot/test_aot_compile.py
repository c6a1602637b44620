"""Real compiles for GPUs that are not here. Each runs in a process of its own; skipped without jax's CUDA plug-in."""

from __future__ import annotations

import pytest

from polestar_jax.aot import launch
from polestar_jax.aot.cases import Size
from polestar_jax.aot.inspect import find_ptxas
from polestar_jax.models.published import LLADA_8B

pytestmark = pytest.mark.skipif(launch.missing() is not None, reason=str(launch.missing()))

MIB = 2**20
POINTERS = 1024  # the outputs' table of addresses is not aliased


@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize(("model", "block"), [("llada-8b", 32), ("dream-7b", 33)])
def test_vocab_scores_kernel_assembles_without_spills(target, model, block):
    report = launch.run(target, "vocab-scores", Size(model=model, block=block), ptx=True)
    assert report["custom_calls"] == {"__gpu$xla.gpu.triton": 1}
    logits = block * {"llada-8b": 126_464, "dream-7b": 152_064}[model] * 4
    assert logits < report["custom_call_bytes"] < 1.01 * logits  # the logits are read once, little is written
    assert report["temp_bytes"] < 0.01 * logits
    if find_ptxas() is None:
        pytest.skip("no ptxas: registers and spills not checked")
    arch, registers, spills = report["kernels"]["vocab_scores"]
    assert arch == {"a100": "sm_80", "h100": "sm_90a"}[target]
    assert 0 < registers <= 128 and spills == 0
    assert {kernel[2] for kernel in report["kernels"].values()} == {0}


@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize(("model", "block"), [("llada-8b", 32), ("dream-7b", 33)])
def test_head_scores_kernel_assembles_without_spills(target, model, block):
    report = launch.run(target, "head-scores", Size(model=model, block=block), ptx=True)
    assert report["custom_calls"] == {"__gpu$xla.gpu.triton": 1}
    depth, vocab = {"llada-8b": (4096, 126_464), "dream-7b": (3584, 152_064)}[model]
    head = depth * vocab * 2
    assert head < report["custom_call_bytes"] < 1.01 * head  # the head is read once, little is written
    assert report["temp_bytes"] < 0.1 * block * vocab * 4  # nothing like the logits
    assert report["big_copies"] == []
    if find_ptxas() is None:
        pytest.skip("no ptxas: registers and spills not checked")
    arch, registers, spills = report["kernels"]["head_scores"]
    assert arch == {"a100": "sm_80", "h100": "sm_90a"}[target]
    assert 0 < registers <= 128 and spills == 0
    assert {kernel[2] for kernel in report["kernels"].values()} == {0}


@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize(("model", "block"), [("llada-8b", 32), ("dream-7b", 33)])
@pytest.mark.parametrize("what", ["residual-patched", "residual-quantised"])
def test_residual_kernels_assemble_without_spills(what, target, model, block):
    report = launch.run(target, what, Size(model=model, block=block), ptx=True)
    w, d = 3 * block, {"llada-8b": 4096, "dream-7b": 3584}[model]
    stored, clusters = w * d // 2 + w * d // 16 + 4, 8 * d * 4 + w * 4
    if what == "residual-patched":
        names = ["residual_patched"]
        # The stored rows, packet, choice and weight in; states, change and norm out.
        traffic, temp = stored + clusters + w * d * 2 + w + d * 2 + w * d * (4 + 4 + 2), 0
    else:
        names = ["residual_largest", "residual_quantised"]
        temp = w * d // min(1024, d & -d) * 4  # the largest magnitudes
        traffic = 2 * (w * d * 4 + clusters + temp) + stored
    assert report["custom_calls"] == {"__gpu$xla.gpu.triton": len(names)}
    assert report["custom_call_bytes"] == traffic
    assert report["temp_bytes"] <= temp
    if find_ptxas() is None:
        pytest.skip("no ptxas: registers and spills not checked")
    for name in names:
        arch, registers, spills = report["kernels"][name]
        assert arch == {"a100": "sm_80", "h100": "sm_90a"}[target]
        assert 0 < registers <= 128 and spills == 0
    assert set(report["kernels"]) == set(names)  # and nothing around them


@pytest.mark.parametrize("target", ["a100", "h100"])
def test_vanilla_loop_updates_in_place_and_is_one_graph(target):
    report = launch.run(target, "vanilla-loop", Size(layers=2))
    assert report["pallas_kernels"] == {"attention": 2, "head_scores": 1}
    assert report["launches"]["While"] == 1
    assert report["launches"]["CommandBuffer"] == 1  # the whole body is one CUDA graph
    assert report["big_copies"] == []
    assert report["output_bytes"] - report["alias_bytes"] <= POINTERS  # the donated state is reused
    assert report["host_temp_bytes"] == 0
    weights = (2 * layer_parameters() + LLADA_8B.vocab_size * LLADA_8B.d_model) * 2
    assert report["bytes_moved"] > weights  # every layer and the head are read in a pass
    assert report["argument_bytes"] <= report["peak_bytes"] < report["argument_bytes"] + 256 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("target", "memory"), [("h100", 84_929_347_584)])
def test_full_size_vanilla_step(target, memory):
    """LLaDA-8B, 32 layers, 512 prompt columns and 256 generated positions, from abstract weights."""
    report = launch.run(target, "vanilla-step", Size())
    print(report)
    assert 16_031_162_368 < report["argument_bytes"] < 16_031_162_368 + MIB
    assert report["peak_bytes"] < report["argument_bytes"] + 256 * MIB < memory
    assert report["big_copies"] == []
    assert report["bytes_moved"] > 2 * (32 * layer_parameters() + LLADA_8B.vocab_size * LLADA_8B.d_model)


@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize("model", ["llada-8b", "dream-7b"])
@pytest.mark.parametrize(
    ("what", "kernel"),
    [("attention", "attention"), ("drift", "measured_attention"), ("cluster-drift", "measured_attention")],
)
def test_attention_kernels_assemble_without_spills(what, kernel, model, target):
    report = launch.run(target, what, Size(model=model, prompt=1024), ptx=True)
    assert report["pallas_kernels"] == {kernel: 1} and report["big_copies"] == []
    if what != "attention":  # scores are overwritten where the last step's were
        assert report["alias_bytes"] > {"drift": 32, "cluster-drift": 8}[what] * 28 * 1280 * 4
    if find_ptxas() is None:
        pytest.skip("no ptxas: registers and spills not checked")
    _, registers, spills = report["kernels"][kernel]
    assert 0 < registers <= 255 and spills == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kernels"),
    [
        ("polestar-step", {"attention": 31, "measured_attention": 1}),
        (
            "polestar-refresh-step",
            {
                "attention": 32,
                "measured_attention": 33,
                "residual_patched": 32,
                "residual_largest": 32,
                "residual_quantised": 32,
            },
        ),
    ],
)
def test_full_size_steps_read_the_weights_once(what, kernels, monkeypatch):
    """LLaDA-8B over 1,280 columns on an H100. By default the compiler, which cannot time anything here, splits the sum of each
    product among several programs and adds their float32 parts up in memory; here it may not."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_experimental_force_split_k=1")
    report = launch.run("h100", what, Size(prompt=1024))
    print(report)
    assert report["pallas_kernels"] == kernels | {"head_scores": 1}
    weights = 16_031_162_368
    assert report["bytes_moved"] <= {"polestar-step": 1.1, "polestar-refresh-step": 1.15}[what] * weights
    assert report["peak_bytes"] <= 17.5e9
    assert report["big_copies"] == []
    assert report["output_bytes"] - report["alias_bytes"] <= 4 * POINTERS


@pytest.mark.slow
def test_b57_states_in_host_memory_are_written_back_beside_products():
    report = launch.run("h100", "polestar-loop", Size(layers=2, prompt=1024, settings=(("residency", "pinned_host"),)))
    print(report)
    assert report["host_temp_bytes"] >= 2 * 96 * (2048 + 256)  # codes and scales of two layers
    assert report["host_transfers"]["from_host"] >= 4 and report["host_transfers"]["to_host"] >= 12
    assert report["overlapped_transfers"] >= 12  # two layers' codes and scales after each of three kinds of pass
    assert report["big_copies"] == []


def layer_parameters() -> int:
    d, f = LLADA_8B.d_model, LLADA_8B.d_ff
    return 4 * d * d + 3 * d * f + 2 * d
