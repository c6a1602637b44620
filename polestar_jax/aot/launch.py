"""Running a compile in a process of its own: the compiler may end it, and its flags are read once per process."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from polestar_jax.aot.cases import Size
from polestar_jax.errors import InputError, RunError

PLUGINS = ("xla_cuda12", "xla_cuda13")
WORKER = (sys.executable, "-m", "polestar_jax.aot.worker")


def missing() -> str | None:
    """Why compiling for CUDA is not possible here, or None when it is."""
    found = importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.{name}") is not None for name in PLUGINS
    )
    return None if found else "jax's CUDA plug-in is not installed; pip install 'polestar-jax[aot]'"


def run(target: str, what: str, size: Size, *, ptx: bool = False) -> dict[str, Any]:
    """Compile one case for one target in a fresh process.

    Args:
      target: a key of polestar_jax.aot.targets.TARGETS.
      what: name of a case, see :func:`polestar_jax.aot.cases.names`.
      size: its size.
      ptx: report registers and spills of every kernel too. From jax 0.11 on this makes the compiler write every stage
        of every kernel, which is slow for large programs.

    Returns:
      The fields of :class:`polestar_jax.aot.compile.Report`.

    Raises:
      InputError: no such case, or sizes that do not go together.
      RunError: the plug-in is missing, or the compile failed or ended the process.
    """
    if (reason := missing()) is not None:
        raise RunError(reason)
    with tempfile.TemporaryDirectory(prefix="polestar-aot-") as dump:
        request = dict(target=target, what=what, size=dataclasses.asdict(size), ptx=ptx, dump=dump)
        done = subprocess.run(
            WORKER, input=json.dumps(request), capture_output=True, text=True, env=_environment(dump, ptx)
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
            raise RunError(f"compiling {what} for {target} failed ({how}): {lines[-1][:500]}")
        report = json.loads(pathlib.Path(dump, "report.json").read_text())
    if "input_error" in report:
        raise InputError(report["input_error"])
    if "error" in report:
        raise RunError(f"compiling {what} for {target} failed: {report['error']}")
    return report


def _environment(dump: str, ptx: bool) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_dump_to={dump}", "--xla_dump_hlo_as_text"]
    release = tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:2])
    if ptx and release >= (0, 11):
        flags.append("--xla_dump_emitter_re=.*")  # before 0.11 PTX is dumped without it
    root = str(pathlib.Path(__file__).parents[2])  # where this package was imported from, installed or not
    return os.environ | {
        "JAX_PLATFORMS": "cpu",  # or the plug-in looks for a driver
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": " ".join(flags).strip(),
        "PYTHONPATH": os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH")) if path),
    }
