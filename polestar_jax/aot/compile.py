"""Compile one case for a target and report what the compiled program needs and does."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import topologies

from polestar_jax.aot import inspect, traffic
from polestar_jax.aot.targets import TARGETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A function to compile and its abstract arguments (pytrees of ShapeDtypeStruct); ``donate`` by position."""

    name: str
    function: Callable[..., object]
    args: tuple
    donate: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What compiling a case for a target gave. Sizes are bytes on the device unless said otherwise.

    Attributes:
      target, case, jax: what was compiled, with which jax version.
      argument_bytes, output_bytes, alias_bytes, temp_bytes, host_temp_bytes: from the compiler's memory analysis;
        alias is the part of the output that reuses donated arguments, host_temp is pinned host memory.
      peak_bytes: the most device memory held at once, arguments included.
      bytes_moved: memory traffic of one run by :mod:`polestar_jax.aot.traffic`, with every loop body counted once.
      bytes_accessed: the compiler's own count, where library and Pallas calls count 0 and a gather its whole operand.
      custom_call_bytes: operands and results of those calls, each counted once.
      flops: floating-point operations, loop bodies once, library and Pallas calls 0.
      custom_calls: library and Pallas calls in the program, by target.
      pallas_kernels: those of Pallas kernels, by the kernel's name.
      host_transfers: copies between device and pinned host memory, "to_host" and "from_host", a loop body once.
      overlapped_transfers: those whose start and end have a matrix product between them.
      launches: what the host dispatches, by kind, as written in the compiler's plan (a loop body once). Kernels inside
        one "CommandBuffer" are one CUDA graph.
      big_copies: copies of more than 512 Ki elements, as "dtype[shape]".
      kernels: per PTX kernel its architecture, registers and spilled bytes; None where no ptxas was found or asked for.
      lower_seconds, compile_seconds: how long it took here.
    """

    target: str
    case: str
    jax: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_temp_bytes: int
    peak_bytes: int
    bytes_moved: int
    bytes_accessed: int
    custom_call_bytes: int
    flops: int
    custom_calls: dict[str, int]
    pallas_kernels: dict[str, int]
    host_transfers: dict[str, int]
    overlapped_transfers: int
    launches: dict[str, int]
    big_copies: list[str]
    kernels: dict[str, inspect.Resources] | None
    lower_seconds: float
    compile_seconds: float


def compile_case(case: Case, target: str, *, dump: pathlib.Path, ptx: bool = False) -> Report:
    """Lower and compile ``case`` for ``target`` (a key of TARGETS).

    The process must have been started with XLA_FLAGS dumping to ``dump``, as :mod:`polestar_jax.aot.launch` does;
    some unsupported programs end the process instead of raising, so it should be one of its own.

    Args:
      ptx: also report registers and spills per kernel.
    """
    start = time.perf_counter()
    lowered = lower(case, target)
    between = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    cost = _cost(compiled)
    return Report(
        target=target,
        case=case.name,
        jax=jax.__version__,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        bytes_moved=traffic.bytes_moved(text),
        bytes_accessed=int(cost["bytes accessed"]),
        custom_call_bytes=inspect.custom_call_bytes(text),
        flops=int(cost["flops"]),
        custom_calls=inspect.custom_calls(text),
        pallas_kernels=inspect.pallas_kernels(text),
        host_transfers=inspect.host_transfers(text),
        overlapped_transfers=inspect.overlapped_transfers(text),
        launches=inspect.launches(dump),
        big_copies=inspect.big_copies(text),
        kernels=inspect.kernel_resources(dump) if ptx else None,
        lower_seconds=round(between - start, 1),
        compile_seconds=round(end - between, 1),
    )


def lower(case: Case, target: str) -> jax.stages.Lowered:
    """The case lowered for one device of the target, replicated over a mesh of that single device."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=TARGETS[target].config(),
        topology="1x1x1",  # slices, hosts per slice, devices per host
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda arg: jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=sharding), case.args)
    # The abstract mesh tells kernel dispatch and Pallas which GPU this is for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(case.function, donate_argnums=case.donate).lower(*args)


def _cost(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Compiled.cost_analysis() gives nothing without a device, so the CPU client analyses the optimised module."""
    from jax._src.lib import _jax

    (module,) = compiled.runtime_executable().hlo_modules()
    return _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
