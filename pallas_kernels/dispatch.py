"""The one point that decides, while tracing, which implementation of an operation runs.

Order: the caller's ``backend`` argument, then the surrounding :func:`using`, then the environment variable
``POLESTAR_KERNELS``, then what the platform being compiled for can run. The argument is binding, and in a strict
:func:`using` everything is: what was chosen runs or :class:`Unsupported` is raised. Otherwise a kernel that cannot be
built gives way to the jax.numpy definition, with one log line per operation and reason.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

import jax

BACKENDS = ("xla", "pallas", "interpret")
AUTO = "auto"  # as if nothing had been named
ENVIRONMENT = "POLESTAR_KERNELS"

logger = logging.getLogger("pallas_kernels")
_reported: set[tuple[str, str]] = set()
_around: contextvars.ContextVar[tuple[str | None, bool]] = contextvars.ContextVar("kernels", default=(None, False))


class Unsupported(NotImplementedError):
    """This kernel does not serve these shapes, dtypes or this platform; the message says which and why."""


class UnknownBackend(ValueError):
    """A name that is no backend's; the message lists those that are."""


class Kernel(Protocol, Hashable):
    """A kernel with everything static bound: hashable, so that one build check serves every later trace."""

    def __call__(self, *args: jax.Array) -> object: ...


@contextlib.contextmanager
def using(backend: str, *, strict: bool = False) -> Iterator[None]:
    """Within the context, what is traced asks for this backend: "auto", which leaves it to what is around, or one of BACKENDS;
    ``strict``: or fails. A strict context stays strict inside another.

    Raises:
      UnknownBackend: no such name.
    """
    outer, was_strict = _around.get()
    token = _around.set((_checked(backend, "backend") or outer, strict or was_strict))
    try:
        yield
    finally:
        _around.reset(token)


def asked() -> str | None:
    """The backend that the context, else the environment names, or None.

    Raises:
      UnknownBackend: no such name in the environment.
    """
    around, _ = _around.get()
    return around or _checked(os.environ.get(ENVIRONMENT), ENVIRONMENT)


def choose(op: str, *, platform: str, backend: str | None = None, build: Callable[[str], object] | None = None) -> str:
    """The route to trace for one call of ``op``: "xla", "pallas" or "interpret".

    Args:
      op: name of the operation, for messages.
      platform: what is being compiled for, as :func:`current_platform` names it.
      backend: binding choice, or None to follow the context, the environment and then the platform.
      build: called with a kernel route ("pallas" or "interpret") before it is chosen; whatever it raises means that
        the kernel cannot be had.

    Raises:
      UnknownBackend: no such name, in the argument or the environment.
      Unsupported: the route cannot be had, and the argument names it or the context is strict.
    """
    _, strict = _around.get()
    named = _checked(backend, "backend")
    route = named or asked() or ("pallas" if platform == "cuda" else "xla")
    if route == "xla":
        return route
    try:
        if route == "pallas" and platform != "cuda":
            raise Unsupported(f"Pallas kernels need CUDA, and this is compiled for {platform}")
        if build is not None:
            build(route)
    except Exception as error:  # a kernel that fails to build, in whatever way, must not fail the caller
        reason = str(error) if isinstance(error, Unsupported) else _one_line(error)
        if strict or named is not None:
            raise Unsupported(f"{op}: {reason}") from error
        _report(op, reason)
        return "xla"
    return route


def current_platform() -> str:
    """What the code being traced is compiled for: "cpu", "cuda", "rocm" or "tpu".

    An abstract device in the context's mesh (compiling with no GPU present) wins over the default device.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return _vendor(abstract.platform, abstract.device_kind)
    default = jax.config.jax_default_device
    if isinstance(default, str):
        default = jax.devices(default)[0]
    device = default if default is not None else jax.devices()[0]
    return _vendor(device.platform, device.device_kind)


def check_builds(kernel: Kernel, *args: jax.ShapeDtypeStruct, platform: str) -> None:
    """Lower ``kernel`` for ``platform`` by itself, and compile it where such a device is present.

    Compilers refuse kernels late (shared memory, registers), long after tracing has committed to a route; building
    the kernel alone first turns that into a fallback. The outcome is kept per kernel, shapes and target.

    Raises:
      Unsupported: with the first line of what went wrong.
    """
    avals = tuple((arg.shape, str(arg.dtype)) for arg in args)
    reason = _build_failure(kernel, avals, platform, jax.sharding.get_abstract_mesh())
    if reason is not None:
        raise Unsupported(reason)


@functools.lru_cache(maxsize=1024)
def _build_failure(kernel: Kernel, avals: tuple, platform: str, mesh: object) -> str | None:
    """Why the kernel cannot be built, or None. ``mesh`` only keys the cache: lowering reads it from the context."""
    del mesh
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
    try:
        if platform == "cuda" and jax.default_backend() == "gpu":
            jax.jit(kernel).lower(*args).compile()
        else:
            jax.jit(kernel).trace(*args).lower(lowering_platforms=(platform,))
    except Exception as error:
        return str(error) if isinstance(error, Unsupported) else _one_line(error)
    return None


def _checked(name: str | None, source: str) -> str | None:
    """A backend's name; None for none, "" and "auto"."""
    if not name or name == AUTO:
        return None
    if name not in BACKENDS:
        raise UnknownBackend(f"{source}={name!r} is no kernel backend; accepted: {', '.join((AUTO, *BACKENDS))}")
    return name


def _vendor(platform: str, device_kind: str) -> str:
    """jax calls both vendors' GPUs "gpu"; kernels need to know which."""
    if platform != "gpu":
        return platform
    return "rocm" if device_kind.lower().startswith(("amd", "radeon", "gfx")) else "cuda"


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


def _report(op: str, reason: str) -> None:
    if (op, reason) not in _reported:
        _reported.add((op, reason))
        logger.warning("%s runs as plain XLA: %s", op, reason)
