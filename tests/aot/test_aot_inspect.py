"""Reading HLO text, launch plans and assembler output."""

from __future__ import annotations

import pytest

from polestar_jax.aot import inspect

HLO = """
%fused_copy (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %copy.1 = f32[8,4]{0,1} copy(%p)
}

ENTRY %main (a: bf16[1024,768]) -> (f32[4,16]) {
  %a = bf16[1024,768]{1,0} parameter(0)
  %copy.2 = bf16[1024,768]{0,1} copy(%a)
  %copy-start.3 = (bf16[1024,768]{0,1:S(5)}, bf16[1024,768]{0,1}, u32[]) copy-start(%copy.2)
  %copy_fusion = f32[8,4]{0,1} fusion(%a), kind=kLoop, calls=%fused_copy
  %call.4 = (f32[4,16]{1,0}, s32[4,16]{1,0}) custom-call(%a, %copy_fusion), custom_call_target="__gpu$xla.gpu.triton", operand_layout_constraints={bf16[1024,768]{1,0}}
  %call.5 = (bf16[4]{0}, s8[100]{0}) custom-call(%copy_fusion), custom_call_target="__cublas$gemm"
  %token.6 = token[] after-all()
  ROOT %out = f32[4,16]{1,0} get-tuple-element(%call.4), index=0
}
"""  # noqa: E501


def test_big_copies_are_found_in_any_form():
    assert inspect.big_copies(HLO) == ["bf16[1024,768]"] * 2


def test_small_copies_are_not_reported():
    assert inspect.big_copies("  %c = f32[524288]{0} copy(%a)") == []
    assert inspect.big_copies("  %c = f32[524289]{0} copy(%a)") == ["f32[524289]"]


def test_custom_calls_are_counted_with_their_traffic():
    assert inspect.custom_calls(HLO) == {"__gpu$xla.gpu.triton": 1, "__cublas$gemm": 1}
    triton = 1024 * 768 * 2 + 8 * 4 * 4 + 2 * (4 * 16 * 4)
    cublas = 8 * 4 * 4 + 4 * 2 + 100
    assert inspect.custom_call_bytes(HLO) == triton + cublas


CALLS = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %one = f32[8]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/drift/pallas_call"}, backend_config={grid_x = 1 : i32, ir = "ML\\EF\\22, name\\22", name = "drift", num_warps = 4 : i32}
  %two = f32[8]{0} custom-call(%one), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/while/body/drift/pallas_call"}
  %three = f32[8]{0} custom-call(%two), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %four = f32[8]{0} custom-call(%three), custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/other/pallas_call"}
}
"""  # noqa: E501


def test_pallas_kernels_are_counted_by_name():
    assert inspect.pallas_kernels(CALLS) == {"drift": 2, "unnamed": 1}
    assert inspect.pallas_kernels("") == {}


HOST = """
%slicing (p.0: f32[16,64], p.1: s32[]) -> f32[1,64] {
  %p.0 = f32[16,64]{1,0:S(5)} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %slice.1 = f32[1,64]{1,0} dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={1,64}
}

%body (s: (s32[], f32[16,64])) -> (s32[], f32[16,64]) {
  %s = (s32[], f32[16,64]{1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %host = f32[16,64]{1,0:S(5)} get-tuple-element(%s), index=1
  %start = ((f32[16,64]{1,0:S(5)}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%host, %i), kind=kLoop, calls=%slicing
  %done = f32[1,64]{1,0} fusion-done(%start)
  %row = f32[1,64]{1,0} negate(%done)
  %put = f32[16,64]{1,0:S(5)} dynamic-update-slice(%host, %row, %i, %i)
  %moved = f32[16,64]{1,0:S(5)} copy(%put)
  ROOT %t = (s32[], f32[16,64]{1,0:S(5)}) tuple(%i, %moved)
}

ENTRY %main (a: f32[16,64]) -> f32[16,64] {
  %a = f32[16,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %up = (f32[16,64]{1,0:S(5)}, f32[16,64]{1,0}, u32[]) copy-start(%a)
  %stored = f32[16,64]{1,0:S(5)} copy-done(%up)
  %t = (s32[], f32[16,64]{1,0:S(5)}) tuple(%zero, %stored)
  %loop = (s32[], f32[16,64]{1,0:S(5)}) while(%t), condition=%cond, body=%body
  %kept = f32[16,64]{1,0:S(5)} get-tuple-element(%loop), index=1
  ROOT %back = f32[16,64]{1,0} copy(%kept)
}
"""


def test_moves_between_device_and_host_memory_are_counted():
    """To the host: the first copy and the update; from it: the slice, started and done, and the last copy. The copy within host
    memory and what is on the device are none."""
    assert inspect.host_transfers(HOST) == {"to_host": 2, "from_host": 2}
    assert inspect.host_transfers(HOST.replace(":S(5)", "")) == {"to_host": 0, "from_host": 0}


def test_item_sizes():
    sizes = {"pred[8]": 8, "u4[8]": 4, "f8e4m3fn[8]": 8, "bf16[]": 2, "token[]": 0, "(s64[2]{0}, f32[3]{0})": 28}
    assert {text: inspect._bytes(text) for text in sizes} == sizes


def test_launches_are_read_from_the_last_plan(tmp_path):
    assert inspect.launches(tmp_path) == {}
    (tmp_path / "m.thunk_sequence.txt").write_text("000: kCopy\n")
    assert inspect.launches(tmp_path) == {"Copy": 1}
    body = "        003: kCustomKernel a\n        004: kCustomKernel b\n"
    plan = "001: kWhile [source]\n  body:\n    000: kCommandBuffer [x]\n" + body
    (tmp_path / "m.thunk_sequence_after_thunk_passes.txt").write_text(plan)
    assert inspect.launches(tmp_path) == {"While": 1, "CommandBuffer": 1, "CustomKernel": 2}


def fake_ptxas(tmp_path, monkeypatch, script: str) -> None:
    path = tmp_path / "ptxas"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setattr(inspect, "find_ptxas", lambda: str(path))
    (tmp_path / "m.ptx").write_text(".version 8.7\n.target sm_80\n.address_size 64\n")
    (tmp_path / "empty.ptx").write_text("")


def test_registers_and_spills(tmp_path, monkeypatch):
    report = """cat >&2 <<'EOF'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'scores' for 'sm_80'
ptxas info    : Function properties for scores
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 71 registers, used 1 barriers
ptxas info    : Compiling entry function 'drift' for 'sm_80'
ptxas info    : Function properties for drift
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers
EOF
"""
    fake_ptxas(tmp_path, monkeypatch, report)
    assert inspect.kernel_resources(tmp_path) == {"scores": ("sm_80", 71, 0), "drift": ("sm_80", 255, 28)}


def test_assembler_that_refuses_is_an_error(tmp_path, monkeypatch):
    fake_ptxas(tmp_path, monkeypatch, "echo 'Value of threads exceeds' >&2; exit 1\n")
    with pytest.raises(RuntimeError, match=r"m\.ptx: Value of threads exceeds"):
        inspect.kernel_resources(tmp_path)


def test_no_assembler(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "find_ptxas", lambda: None)
    assert inspect.kernel_resources(tmp_path) is None
