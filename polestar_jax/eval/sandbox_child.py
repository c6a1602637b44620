"""The process in which a program and its tests run; started by :mod:`polestar_jax.eval.sandbox`, which says what for.

It imports nothing of this package. The first process makes the namespaces and waits; its child, alone in them, sets the
limits and the audit hook, runs the program, and reports on the pipe whose number is the argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import types

TIMED_OUT = 124
# linux/sched.h, linux/mount.h, linux/prctl.h; the numbers are the same on every architecture.
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_AT_FDCWD, _AT_RECURSIVE, _READ_ONLY, _MOUNT_SETATTR = -100, 0x8000, 1, 442
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _CAPABILITIES = 1, 38, 0x20080522

_FORBIDDEN = frozenset(
    "os.exec os.fork os.forkpty os.posix_spawn os.spawn os.startfile os.system os.kill os.killpg subprocess.Popen pty.spawn "
    "signal.pthread_kill ctypes.dlopen syslog.openlog ftplib.connect urllib.Request".split()
)
_CHANGES = frozenset(
    "os.chflags os.chmod os.chown os.link os.mkdir os.remove os.removexattr os.rename os.rmdir os.setxattr os.symlink "
    "os.truncate os.utime shutil.rmtree shutil.move shutil.chown".split()
)
_TWO_PATHS = frozenset("os.link os.rename os.symlink shutil.move".split())
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


def main() -> None:
    channel = int(sys.argv[1])
    with os.fdopen(0, "rb", closefd=False) as stream:
        job = json.loads(stream.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    isolation = _namespaces(job["directory"])
    _die_with_parent()  # after the namespaces: changing user takes this back
    if os.getppid() != job["parent"]:
        os._exit(1)
    child = os.fork()
    if child:
        os.close(channel)
        _, status, used = os.wait4(child, 0)
        late = used.ru_utime + used.ru_stime > job["limits"]["cpu_seconds"] - 0.5
        os._exit(TIMED_OUT if os.WIFSIGNALED(status) and late else 1)
    _die_with_parent()
    _drop_capabilities()
    _set_limits(job["limits"])
    os.chdir(job["directory"])
    sys.addaudithook(_guard(job["directory"]))
    _run(job["program"], job["tests"], job["token"], isolation, channel)


def _run(program: str, tests: str, token: str, isolation: list[str], channel: int) -> None:
    dump, write, leave = json.dumps, os.write, os._exit  # the program may replace the modules' own
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    status, detail = "passed", ""
    try:
        for name, source in (("program", program), ("tests", tests)):
            exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        status, detail = "failed", type(error).__name__
        with contextlib.suppress(BaseException):
            detail = f"{detail}: {error}"[:300]
    verdict = {"token": token, "status": status, "detail": detail, "isolation": isolation}
    write(channel, b"\n" + dump(verdict).encode() + b"\n")
    leave(0)


def _namespaces(directory: str) -> list[str]:
    """Enter what namespaces the kernel permits; what they keep away, in words."""
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL(None)
    apart = _NEWNET | _NEWPID | _NEWNS | _NEWIPC
    if libc.unshare(_NEWUSER | apart) and libc.unshare(apart):
        return []
    made = ["network", "processes"]
    path = os.fsencode(directory)
    read_only, writable = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0), (ctypes.c_uint64 * 4)(0, _READ_ONLY, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(read_only))
    private = libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    if private == 0 and libc.mount(path, path, None, ctypes.c_ulong(_MS_BIND), None) == 0:
        sealed = libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(read_only), size)
        if sealed == 0 and libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, 0, ctypes.byref(writable), size) == 0:
            made.append("files")
    return made


def _die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _drop_capabilities() -> None:
    """Give up the powers over its namespaces, such as making the files writable again."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)())


def _set_limits(limits: dict) -> None:
    seconds = int(limits["cpu_seconds"])
    for name, value in (
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_AS", int(limits["memory_bytes"])),
        ("RLIMIT_FSIZE", int(limits["file_bytes"])),
        ("RLIMIT_NOFILE", int(limits["open_files"])),
        ("RLIMIT_NPROC", int(limits["processes"])),
        ("RLIMIT_CORE", 0),
    ):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # each system lacks some
            resource.setrlimit(getattr(resource, name), (value, value))


def _guard(directory: str):
    """The audit hook; what it needs is bound here, since the program may change the modules' attributes."""
    real, decode, inside = os.path.realpath, os.fsdecode, (directory, directory + os.sep)

    def outside(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a descriptor, whose opening was seen
        path = real(decode(path))
        return path != inside[0] and not path.startswith(inside[1]) and path != os.devnull

    def guard(event: str, args: tuple) -> None:
        if event in _FORBIDDEN or event.startswith("socket."):
            raise PermissionError(f"not in the sandbox: {event}")
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITING and outside(args[0]):
            raise PermissionError(f"not in the sandbox: writing {args[0]}")
        if event == "open" and str(args[0]).startswith("/proc/") and str(args[0]).endswith(("/environ", "/mem")):
            raise PermissionError(f"not in the sandbox: reading {args[0]}")
        if event in _CHANGES:
            for path in args[: 2 if event in _TWO_PATHS else 1]:
                if outside(path):
                    raise PermissionError(f"not in the sandbox: {event} {path}")

    return guard


if __name__ == "__main__":
    main()
