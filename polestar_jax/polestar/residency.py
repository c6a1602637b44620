"""Where the stored window states stay between the passes that read them: on the device, or in host memory (section 4.3).

A layer fetches its states, patches them, quantises them again and parks them. Only whole arrays are copied, by ``device_put``:
a slice or a scatter in host memory would become work for the host. The second scale of NVFP4, a number a sequence, stays on
the device.

Compiled for NVIDIA GPUs, a refresh issues every layer's fetch before its first product, two copies at a time, and writes each
layer's states back beside that layer's products. All layers' states of LLaDA-8B are 7 MB in NVFP4, of 16 GB of weights:
the default keeps them on the device, where they cost nothing to reach.
"""

from __future__ import annotations

import functools
import logging

import jax

from polestar_jax.polestar.residuals import Stored

RESIDENCIES = ("device", "pinned_host")

logger = logging.getLogger("polestar_jax")


def park(stored: Stored, residency: str) -> Stored:
    """The states where ``residency`` wants them; on the device where the backend has no such memory, with a notice."""
    if residency == "device" or not _has_host_memory():
        return stored
    return _moved(stored, jax.memory.Space.Host)


def fetch(stored: Stored, residency: str) -> Stored:
    """The states on the device."""
    if residency == "device" or not _has_host_memory():
        return stored
    return _moved(stored, jax.memory.Space.Device)


def place(stored: Stored, residency: str) -> Stored:
    """The states where ``residency`` wants them, wherever they are."""
    sharding = getattr(stored.codes, "sharding", None)  # none while tracing, and of an array from a file
    if getattr(sharding, "memory_kind", None) == residency:
        return stored
    return park(stored, residency) if residency == "pinned_host" else _moved(stored, jax.memory.Space.Device)


def _moved(stored: Stored, space: jax.memory.Space) -> Stored:
    move = lambda array: None if array is None else jax.device_put(array, space)  # noqa: E731
    return stored._replace(codes=move(stored.codes), scales=move(stored.scales))


def _has_host_memory() -> bool:
    """Whether what is compiled for has pinned host memory: a GPU that is not here does."""
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None:
        return True
    return _device_has_host_memory(jax.devices()[0])


@functools.cache
def _device_has_host_memory(device: jax.Device) -> bool:
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if "pinned_host" in kinds:
        return True
    logger.warning("residency=pinned_host runs as device: %s has only %s memory", device, ", ".join(kinds))
    return False
