"""Whether two answers to a mathematical question are the same, by the package math-verify, in a process that may be lost.

Comparing expressions can take for ever or all memory (``9^{9^{9^9}}``), and no signal ends it while one product of long
integers is computed. So the comparisons are made by one helper process with limits: past them it is killed, the answer
counts as wrong, and the next question gets a new process.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import pathlib
import select
import subprocess
import sys
import threading
import time

from polestar_jax.errors import InputError, RunError

PACKAGE = "math_verify"
WALL_SECONDS = 40.0  # of one comparison; math-verify itself gives up after a few seconds where it can
START_SECONDS = 300.0  # to import sympy, on a machine that does other things
_WORKER = pathlib.Path(__file__).with_name("math_worker.py")
_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None


def self_check() -> None:
    """Judge a right answer and a wrong one, so that a judge that does not work here is not taken for wrong answers.

    Raises:
      InputError: math-verify is not installed.
      RunError: either was misjudged.
    """
    if not same("\\frac{1}{2}", "0.5") or same("\\frac{1}{2}", "2"):
        raise RunError("math-verify does not work here: it misjudges 0.5 or 2 as an answer to one half")


def require() -> None:
    """Refuse to begin without the package.

    Raises:
      InputError: it is not installed.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError("math needs the package math-verify to judge answers: pip install 'polestar-jax[eval]'")


def same(target: str, answer: str) -> bool:
    """Whether ``answer`` equals ``target``, both LaTeX without dollar signs; False where it cannot be decided in time.

    Raises:
      InputError: math-verify is not installed.
      RunError: the helper process does not start.
    """
    require()
    with _lock:
        try:
            process = _running()
            process.stdin.write(json.dumps({"target": target, "answer": answer}).encode() + b"\n")
            reply = _line(process, WALL_SECONDS)
        except BaseException:  # its late reply must not be taken for the next question's
            stop()
            raise
        if reply is None:
            stop()
            return False
        return json.loads(reply)["same"]


def stop() -> None:
    """End the helper process, if one runs."""
    global _process
    if _process is not None:
        _process.kill()
        _process.communicate()
        _process = None


def _running() -> subprocess.Popen[bytes]:
    global _process
    if _process is not None and _process.poll() is not None:
        stop()
    if _process is None:
        # -P: the worker's directory holds a math.py, which must not hide the standard library's.
        command = [sys.executable, "-P", str(_WORKER)]
        pipe = subprocess.PIPE
        _process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        if _line(_process, START_SECONDS) is None:
            stop()
            raise RunError(f"math-verify does not start: {' '.join(command)}")
    return _process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line the process writes; None when it ends or the time does."""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line, end = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            return None
        part = process.stdout.read(4096)
        if not part:
            return None
        line += part
    return line


atexit.register(stop)
