"""The GPUs that can be compiled for, as XLA wants them described."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One GPU model. Sizes in bytes, bandwidth in bytes per second, clock in GHz."""

    device: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    bandwidth: int
    l2_cache: int
    clock: float
    memory: int

    def config(self) -> str:
        """The target as text-format xla.gpu.GpuTargetConfigProto.

        The driver version matters: without it conditionals are kept out of CUDA graphs. Without the runtime version
        matrix products are rewritten wrongly.
        """
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{self.device}"
"""


_HOPPER = dict(
    capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    shared_memory_per_core=233_472,
    shared_memory_per_block=232_448,
    clock=1.98,
)
TARGETS = {
    "a100": Target(
        device="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        fpus_per_core=64,
        shared_memory_per_core=167_936,
        shared_memory_per_block=166_912,
        bandwidth=2_039_000_000_000,
        l2_cache=41_943_040,
        clock=1.41,
        memory=84_987_740_160,
    ),
    "h100": Target(
        device="NVIDIA H100 80GB HBM3",
        bandwidth=3_352_320_000_000,
        l2_cache=52_428_800,
        memory=84_929_347_584,
        **_HOPPER,
    ),
    "h200": Target(
        device="NVIDIA H200",
        bandwidth=4_814_000_000_000,
        l2_cache=62_914_560,
        memory=150_754_820_096,
        **_HOPPER,
    ),
}
