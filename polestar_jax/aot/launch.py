"""Running a compile in a process of its own: the compiler may end it, and its flags are read once per process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from polestar_jax.errors import RunError

PLUGINS = ("xla_cuda12", "xla_cuda13")


def missing() -> str | None:
    """Why compiling for CUDA is not possible here, or None when it is."""
    if importlib.util.find_spec("jax_plugins") is not None:
        if any(importlib.util.find_spec(f"jax_plugins.{name}") is not None for name in PLUGINS):
            return None
    return "jax's CUDA plug-in is not installed; pip install 'polestar-jax[aot]'"


def run(target: str, *, module: str = "polestar_jax.aot.cases", case: str, options: dict, ptx: bool = False) -> dict:
    """Compile one case for one target in a fresh process; the fields of :class:`polestar_jax.aot.compile.Report`.

    Args:
      target: a key of polestar_jax.aot.targets.TARGETS.
      module, case: where the function that makes the Case is, and its name.
      options: keyword arguments for it, as JSON values.
      ptx: report registers and spills too. From jax 0.11 on this makes the compiler write every stage of every
        kernel, which is slow for large programs.

    Raises:
      RunError: the plug-in is missing, or the compile failed or ended the process.
    """
    if (reason := missing()) is not None:
        raise RunError(reason)
    with tempfile.TemporaryDirectory(prefix="polestar-aot-") as dump:
        request = dict(target=target, module=module, case=case, options=options, ptx=ptx, dump=dump)
        command = [sys.executable, "-m", "polestar_jax.aot.worker"]
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, env=_environment(dump, ptx)
        )
        report = pathlib.Path(dump, "report.json")
        if done.returncode or not report.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
            raise RunError(f"compiling {case} for {target} failed ({how}): {lines[-1][:500]}")
        return json.loads(report.read_text())


def _environment(dump: str, ptx: bool) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_dump_to={dump}", "--xla_dump_hlo_as_text"]
    release = tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:2])
    if ptx and release >= (0, 11):
        flags.append("--xla_dump_emitter_re=.*")  # before 0.11 PTX is dumped without it
    return os.environ | {
        "JAX_PLATFORMS": "cpu",  # or the plug-in looks for a driver
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": " ".join(flags).strip(),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
