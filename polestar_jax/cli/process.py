"""What a command owes its terminal: Ctrl-C ends it at once and cleanly, and a closed or broken stream is no traceback."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from polestar_jax import unfinished
from polestar_jax.errors import RunError


def end_with(main: Callable[[], int], program: str) -> NoReturn:
    """Run ``main`` and end the process with the status it returns, whatever happens to the streams or the keyboard.

    Args:
      main: returns the exit status. It reports its own errors; a BrokenPipeError is left to this function.
      program: what an error line begins with.
    """
    _fill_closed_streams()
    _end_on_interrupt(program)
    try:
        status = main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        status = 1  # the reader left; nothing to say
    sys.exit(_flush(program, status))


class ClosedOutput(io.TextIOBase):
    """Stands for a standard output that was closed at the start: what is written to it is an error, not lost unseen."""

    def write(self, text: str) -> NoReturn:
        raise RunError("standard output is closed")


def output_is_closed() -> bool:
    """Whether nothing can be written to standard output."""
    return sys.stdout is None or isinstance(sys.stdout, ClosedOutput)


def _end_on_interrupt(program: str) -> None:
    """Let a second thread end the process on Ctrl-C (status 1), unless that is ignored, as for a background job.

    A KeyboardInterrupt will not do. Python raises it only between its own instructions, and a compiled decode loop, which
    may run for minutes, has none; raised in a collector's callback it is lost, and inside an extension's import or a
    compilation it can crash the interpreter later.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def wait() -> None:
        while reader.recv(1) != bytes([signal.SIGINT]):
            pass
        try:
            unfinished.remove_all()
            _say(program, "interrupted")
        finally:
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    signal.set_wakeup_fd(writer.detach())  # written to when the signal arrives, whatever the main thread is doing
    signal.signal(signal.SIGINT, lambda number, frame: None)


def _fill_closed_streams() -> None:
    """Give closed standard streams a place.

    The next file opened would get the free descriptor, and with it what libraries print; and print() to a standard error
    that is None goes to standard output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", errors="replace")  # noqa: SIM115


def _flush(program: str, status: int) -> int:
    """Write out what is buffered; the status, 1 where that failed. The interpreter's own flush then finds nothing wrong."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if status == 0 and not isinstance(error, BrokenPipeError):
                _say(program, f"error: {error}")
            status = status or 1
    return status


def _say(program: str, line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"{program}: {line}", file=sys.stderr, flush=True)
