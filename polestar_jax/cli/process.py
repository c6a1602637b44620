"""What a command owes its terminal: Ctrl-C ends it soon and cleanly, and a closed or broken stream is no traceback."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from polestar_jax.cli import common
from polestar_jax.errors import RunError

INTERRUPTED = 1  # the exit statuses are 0, 1 (failed while running) and 2 (wrong use)
PATIENCE = 1.0  # seconds an interrupt may take to have its effect
_program: str | None = None  # the running program's name, where this module may end the process


def end_with(main: Callable[[], int], program: str) -> NoReturn:
    """Run ``main`` and end the process with the status it returns, whatever happens to the streams or the keyboard.

    Args:
      main: returns the exit status; it reports its own errors, but not a KeyboardInterrupt or BrokenPipeError.
      program: what an error line begins with.
    """
    global _program
    _program = program
    _fill_closed_streams()
    sys.unraisablehook = _unraisable
    interrupted = False
    try:
        status = main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        status = 1  # the reader left; nothing to say
    except KeyboardInterrupt:
        interrupted, status = True, INTERRUPTED
        _say("interrupted")
    status = _flush(status)
    if interrupted:
        os._exit(status)  # an interrupted compilation can crash the interpreter's orderly end
    sys.exit(status)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C inside ends the process within about a second, also while a compiled program runs.

    Python notices an interrupt only between its own instructions, and a decode loop is none of them: it may run for
    minutes. A second thread is told by the system at once. Where the interrupt has not led out of the block a second later,
    it removes unfinished output files and ends the process. Without effect outside :func:`end_with` and where Ctrl-C is
    ignored.
    """
    if _program is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    left = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=_watch, args=(reader, left), daemon=True).start()
    signal.set_wakeup_fd(writer.fileno())
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(-1)
        writer.close()


def _watch(reader: socket.socket, left: threading.Event) -> None:
    with reader:
        while number := reader.recv(1):
            if number[0] == signal.SIGINT and not left.wait(PATIENCE):
                _abandon()


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt that hits a destructor or a collector's callback would be printed and forgotten."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _abandon()
    sys.__unraisablehook__(lost)


def _abandon() -> NoReturn:
    """End the process here and now, without unwinding."""
    try:
        common.discard_unfinished()
        _say("interrupted")
    finally:
        os._exit(INTERRUPTED)


class ClosedOutput(io.TextIOBase):
    """Stands for a standard output that was closed at the start: what is written to it is an error, not lost unseen."""

    def write(self, text: str) -> NoReturn:
        raise RunError("standard output is closed")


def output_is_closed() -> bool:
    """Whether nothing can be written to standard output."""
    return sys.stdout is None or isinstance(sys.stdout, ClosedOutput)


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


def _flush(status: int) -> int:
    """Write out what is buffered; the status, 1 where that failed. The interpreter's own flush then finds nothing wrong."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if status == 0 and not isinstance(error, BrokenPipeError):
                _say(f"error: {error}")
            status = status or 1
    return status


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"{_program}: {line}", file=sys.stderr, flush=True)
