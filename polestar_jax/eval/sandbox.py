"""Running what a model wrote, together with its tests, in a process of its own.

What is between that program and the machine, and what each part is for:

- Consent: nothing runs unless the caller says so.
- A fresh interpreter (``-I``: no user site, no ``PYTHON*`` settings, nothing imported from the working directory) with an
  environment of four variables: the caller's tokens and settings are not in it.
- An empty temporary directory to work in, removed afterwards.
- Limits of time (CPU and wall clock), memory, file size, open files and, unless the caller is root, processes: against
  programs that loop, wait, or fill memory.
- Namespaces, where the kernel lets an ordinary user make them: no network at all; no signals to other processes, nor a
  look into their memory and environment; every file system read-only but for that directory, which is one of its own, in
  memory, with room for as many files of the largest size as the limits let a program make. :func:`isolation` says which of
  these there are.
- An audit hook, everywhere: sockets, new processes, signals to others, native libraries and ctypes'
  access to memory, databases of sqlite3, more files than the limits allow, and writing or removing files outside of that
  directory raise PermissionError or another OSError. What Python tells no hook of is taken away: the function behind
  subprocess and multiprocessing, shared memory, named pipes and devices, ``dir_fd`` of ``os.open``, and the import of the
  modules in C that write dbm files or a history of lines, run Tcl, or make interpreters that have no hook. It stops Python
  code that does these things by the ways that the standard library offers for them, which is what a model writes; it is no
  wall against code made to get around it (by way of the interpreter's own memory, for one), nor against other packages'
  native code.
- A session of its own, killed at the end with everything in it; also when the caller itself dies.

Hence, where there are no namespaces, nothing but the hook is between such code and the caller's files, network and disk.

Not protected: files that the caller can read can be read.

The verdict comes through a pipe and carries a token made for the run, so printing, ``exit(0)``, ``os._exit(0)`` or a crash
is never a pass. The program shares an interpreter with its tests, as in every harness of this kind: one that searches the
interpreter's memory for the token, or gives the tests objects that are equal to everything, is not found out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Literal

from polestar_jax import unfinished
from polestar_jax.errors import InputError, RunError

_CHILD = pathlib.Path(__file__).with_name("sandbox_child.py")
_MOST_BYTES = 1 << 20  # of a verdict
TIMED_OUT = 124  # exit status of the child's first process, see sandbox_child


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    Attributes:
      cpu_seconds: of computing. The limit that decides, as it does not depend on what else the machine does.
      wall_seconds: from start to verdict.
      memory_bytes: of address space.
      file_bytes: of each file written.
      files: made in all, directories and links among them; on disk thus at most ``files`` times ``file_bytes``.
      open_files, processes: at a time; the second holds for the caller's user, and not for root.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 30.0
    memory_bytes: int = 2 << 30
    file_bytes: int = 4 << 20
    files: int = 64
    open_files: int = 64
    processes: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
      status: passed; failed: an exception, SystemExit included; timeout; died: ended without a verdict.
      detail: the exception's type and message, "" for none.
      isolation: what namespaces kept away: network, processes, disk (its limit), files (others'); empty too where there was no
        verdict.
    """

    status: Literal["passed", "failed", "timeout", "died"]
    detail: str = ""
    isolation: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def require_consent(allowed: object, *, task: str) -> None:
    """Refuse to run what a model wrote unless ``allowed`` is True.

    Raises:
      InputError: names ``--allow-code-execution``.
    """
    if allowed is not True:
        raise InputError(f"{task} runs code that the model writes; say --allow-code-execution to let it (in a sandbox)")


def self_check() -> None:
    """Run a right program and a wrong one, so that a sandbox that does not work here is not taken for wrong answers.

    Raises:
      RunError: either was misjudged.
    """
    for program, expected in (("x = 1", "passed"), ("x = 2", "failed")):
        _checked(program, expected)


@functools.cache
def isolation() -> tuple[str, ...]:
    """What namespaces keep away from a program on this machine, as :attr:`Outcome.isolation` has it, sorted; found by running
    one line of our own.

    Raises:
      RunError: code cannot be run here.
    """
    return tuple(sorted(_checked("x = 1", "passed").isolation))


def _checked(program: str, expected: str) -> Outcome:
    outcome = run(program, "assert x == 1", allow_code_execution=True)
    if outcome.status != expected:
        raise RunError(
            f"code cannot be run here: '{program}' should have {expected}, and {outcome.status} {outcome.detail}"
        )
    return outcome


def run(program: str, tests: str, *, allow_code_execution: bool, limits: Limits | None = None) -> Outcome:
    """Execute a program and then tests of it, both in one namespace, whose ``__name__`` is not ``__main__``.

    Args:
      program: Python source.
      tests: Python source that raises if the program is wrong.
      allow_code_execution: must be True.
      limits: the default ones where None.

    Raises:
      InputError: no consent.
      RunError: no process can be started here.
    """
    require_consent(allow_code_execution, task="the sandbox")
    if os.name != "posix":
        raise RunError("code is run on Linux and macOS only")
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="polestar-code-", ignore_cleanup_errors=True) as directory:
        # Resolved: the child compares paths with it. No pipe: a program that is never read must not block the caller.
        directory = os.path.realpath(directory)
        with unfinished.noted(directory), tempfile.TemporaryFile() as job:
            token = secrets.token_hex(16)
            told = {"token": token, "program": program, "tests": tests, "directory": directory}
            told |= {"parent": os.getpid(), "limits": dataclasses.asdict(limits)}
            job.write(json.dumps(told).encode())
            job.seek(0)
            return _outcome(job, directory, token, limits)


def _outcome(job: IO[bytes], directory: str, token: str, limits: Limits) -> Outcome:
    verdicts, channel = os.pipe()
    try:
        process = _start(job, directory, channel)
        os.close(channel)
        channel = -1
        try:
            verdict, in_time = _verdict(verdicts, token, limits.wall_seconds)
            if verdict is None and in_time:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)  # whose status tells why it ended
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    finally:
        os.close(verdicts)
        if channel >= 0:
            os.close(channel)
    return verdict or Outcome(status="died" if in_time and status != TIMED_OUT else "timeout")


def _start(job: IO[bytes], directory: str, channel: int) -> subprocess.Popen[bytes]:
    names = ("HOME", "TMPDIR")
    environment = dict.fromkeys(names, directory) | {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-B", str(_CHILD), str(channel)],
            stdin=job,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=environment,
            pass_fds=(channel,),
            start_new_session=True,
        )
    except OSError as error:
        raise RunError(f"no process can be started to run code in: {error.strerror or error}") from None


def _verdict(pipe: int, token: str, seconds: float) -> tuple[Outcome | None, bool]:
    """(what the child reports, or None where it does not; whether it reported or ended in time)."""
    poll, data, end = select.poll(), b"", time.monotonic() + seconds
    poll.register(pipe, select.POLLIN)
    while len(data) < _MOST_BYTES:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            return None, False
        part = os.read(pipe, 65536)
        data += part
        for line in data.split(b"\n")[:-1]:
            # A program may write anything here, such as brackets in brackets.
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                told = json.loads(line)
                if secrets.compare_digest(told["token"], token):
                    kept_away = tuple(told["isolation"])
                    return Outcome(status=told["status"], detail=told["detail"], isolation=kept_away), True
        if not part:
            break
    return None, True
