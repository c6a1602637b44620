"""Counting memory traffic from HLO text."""

from __future__ import annotations

from polestar_jax.aot.traffic import bytes_moved, moved

HLO = """
%taking (p.0: bf16[1000,8], p.1: s32[4]) -> bf16[4,8] {
  %p.0 = bf16[1000,8]{1,0} parameter(0)
  %p.1 = s32[4]{0} parameter(1)
  ROOT %gather.1 = bf16[4,8]{1,0} gather(%p.0, %p.1), offset_dims={1}
}

%placing (q.0: f32[100,8], q.1: f32[2,8], q.2: s32[]) -> f32[100,8] {
  %q.0 = f32[100,8]{1,0} parameter(0)
  %q.1 = f32[2,8]{1,0} parameter(1)
  %q.2 = s32[] parameter(2)
  %view = f32[100,8]{1,0} bitcast(%q.0)
  %old = f32[2,8]{1,0} dynamic-slice(%q.0, %q.2, %q.2), dynamic_slice_sizes={2,8}
  %sum = f32[2,8]{1,0} add(%q.1, %old)
  ROOT %put = f32[100,8]{1,0} dynamic-update-slice(%view, %sum, %q.2, %q.2)
}

%body (s: (f32[100,8], s32[])) -> (f32[100,8], s32[]) {
  %s = (f32[100,8]{1,0}, s32[]) parameter(0)
  %x = f32[100,8]{1,0} get-tuple-element(%s), index=0
  %i = s32[] get-tuple-element(%s), index=1
  %negated = f32[100,8]{1,0} negate(%x), metadata={op_name="jit(f)/neg"}
  ROOT %t = (f32[100,8]{1,0}, s32[]) tuple(%negated, %i)
}

ENTRY %main (a: bf16[1000,8], ids: s32[4], c: f32[100,8], u: f32[2,8], at: s32[], codes: u8[96]) -> f32[100,8] {
  %a = bf16[1000,8]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  %c = f32[100,8]{1,0} parameter(2)
  %u = f32[2,8]{1,0} parameter(3)
  %at = s32[] parameter(4)
  %codes = u8[96]{0} parameter(5)
  %rows = bf16[4,8]{1,0} fusion(%a, %ids), kind=kLoop, calls=%taking
  %placed = f32[100,8]{1,0} fusion(%c, %u, %at), kind=kLoop, calls=%placing
  %away = (u8[96]{0:S(5)}, u8[96]{0}, u32[]) copy-start(%codes)
  %there = u8[96]{0:S(5)} copy-done(%away)
  %call = f32[16]{0} custom-call(%rows), custom_call_target="kernel"
  %start = (f32[100,8]{1,0}, s32[]) tuple(%placed, %at)
  %loop = (f32[100,8]{1,0}, s32[]) while(%start), condition=%cond, body=%body
  ROOT %out = f32[100,8]{1,0} get-tuple-element(%loop), index=0
}
"""


def test_each_kernel_counts_what_it_touches():
    gather = 4 * 8 * 2 + 4 * 4 + 4 * 8 * 2  # rows taken, indices, result
    update = 2 * 8 * 4 + 2 * 8 * 4 + 4 + 2 * 8 * 4  # old slice, update, index, written
    call = 4 * 8 * 2 + 16 * 4
    body = 2 * 100 * 8 * 4
    found = {kernel.name: kernel.bytes for kernel in moved(HLO)}
    assert found == {"rows": gather, "placed": update, "call": call, "negated": body, "away": 2 * 96}
    assert bytes_moved(HLO) == gather + update + call + body + 2 * 96
    assert moved(HLO)[0].source == "jit(f)/neg"
