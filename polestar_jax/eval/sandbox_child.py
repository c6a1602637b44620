"""The process in which a program and its tests run; started by :mod:`polestar_jax.eval.sandbox`, which says what for.

It imports nothing of this package. The first process makes the namespaces and waits; its child, alone in them, sets the
limits and the audit hook, runs the program, and reports on the pipe whose number is the argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import itertools
import json
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import NoReturn

TIMED_OUT = 124
# linux/sched.h, linux/mount.h, linux/prctl.h; the numbers are the same on every architecture.
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_AT_FDCWD, _AT_RECURSIVE, _READ_ONLY, _MOUNT_SETATTR = -100, 0x8000, 1, 442
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _CAPABILITIES = 1, 38, 0x20080522

# Audit events. Of sqlite3 all: what a database in memory attaches is written without an event of its own.
_FORBIDDEN = frozenset(
    "os.exec os.fork os.forkpty os.posix_spawn os.spawn os.startfile os.system os.kill os.killpg subprocess.Popen pty.spawn "
    "signal.pthread_kill resource.prlimit sys.remote_exec sqlite3.connect ftplib.connect urllib.Request".split()
)
_FORBIDDEN_KINDS = ("socket.", "ctypes.", "syslog.")
# Those that change files: how many of the first arguments are paths, of the last ones directories that these start from.
_CHANGES = (
    dict.fromkeys("os.chflags os.removexattr os.setxattr os.truncate shutil.chown".split(), (1, 0))
    | dict.fromkeys("os.chmod os.chown os.mkdir os.remove os.rmdir os.utime shutil.rmtree".split(), (1, 1))
    | {"shutil.move": (2, 0), "os.symlink": (2, 1), "os.link": (2, 2), "os.rename": (2, 2)}
)
_MAKES = frozenset("os.link os.mkdir os.symlink".split())
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_UNNAMED = getattr(os, "O_TMPFILE", 0)
# What starts processes, makes files or sends signals without any event: functions (whose modules are not to be had afresh),
# and whole modules that few programs need.
_UNSEEN = {
    "_posixsubprocess": ("fork_exec",),
    "_posixshmem": ("shm_open", "shm_unlink"),
    "posix": ("mkfifo", "mknod"),
    "_signal": ("pidfd_send_signal",),
}
# An interpreter within the interpreter has no hook. Without these databases dbm and shelve take their format in plain Python.
_NO_IMPORT = (
    frozenset("_interpreters _xxsubinterpreters _dbm _gdbm dbm.sqlite3 _tkinter readline".split()) | _UNSEEN.keys()
)


def main() -> None:
    channel = int(sys.argv[1])
    with os.fdopen(0, "rb", closefd=False) as stream:
        job = json.loads(stream.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    isolation = _namespaces(job["directory"], job["limits"])
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
    _watch(job["directory"], job["limits"]["files"])
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


def _namespaces(directory: str, limits: dict) -> list[str]:
    """Enter what namespaces the kernel permits; what they keep away, in words."""
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL(None)
    apart = _NEWNET | _NEWPID | _NEWNS | _NEWIPC
    user, group, known = os.geteuid(), os.getegid(), True
    if libc.unshare(_NEWUSER | apart) == 0:
        known = _stay(user, group)
    elif libc.unshare(apart):
        return []
    made = ["network", "processes"]
    path = os.fsencode(directory)
    options = f"size={limits['files'] * limits['file_bytes']},nr_inodes={limits['files'] + 1},mode=700".encode()
    if libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None):
        return made
    if known and libc.mount(b"tmpfs", path, b"tmpfs", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options) == 0:
        made.append("disk")
    elif libc.mount(path, path, None, ctypes.c_ulong(_MS_BIND), None):
        return made
    read_only, writable = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0), (ctypes.c_uint64 * 4)(0, _READ_ONLY, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(read_only))
    sealed = libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(read_only), size)
    if sealed == 0 and libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, 0, ctypes.byref(writable), size) == 0:
        made.append("files")
    return made


def _stay(user: int, group: int) -> bool:
    """Be the same user in the new namespace; whether that worked. One whom it does not know can own no file of a file
    system made in it.
    """
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError:
            return False
    return True


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


def _watch(directory: str, files: int) -> None:
    """Take away what no audit event tells of, and set the hook for all else."""
    _replace_unseen()
    sys.addaudithook(_guard(directory, files))


def _replace_unseen() -> None:
    """Replace the functions of ``_UNSEEN`` in whatever has imported them, and let ``os.open`` start from no directory's
    descriptor: its event does not give that, and hence not which file it is.
    """
    plain = os.open

    def without_directory(path, flags, mode=0o777, *, dir_fd=None):
        if dir_fd is not None:
            raise PermissionError("not in the sandbox: dir_fd")
        return plain(path, flags, mode)

    def refusal(name: str) -> Callable[..., NoReturn]:
        def refused(*_, **__):
            raise PermissionError(f"not in the sandbox: {name}")

        return refused

    replaced = [(plain, without_directory)]
    for module, names in _UNSEEN.items():
        with contextlib.suppress(ImportError):  # each system lacks some
            functions = vars(importlib.import_module(module))
            replaced += [(functions[name], refusal(name)) for name in names if name in functions]
    by = {id(old): new for old, new in replaced}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in by:
                setattr(module, name, by[id(value)])
    os.supports_dir_fd.clear()  # which shutil.rmtree asks


def _guard(directory: str, files: int) -> Callable[[str, tuple], None]:
    """The audit hook; what it needs is bound here, since the program may change the modules' attributes."""
    real, decode, exists, null = os.path.realpath, os.fsdecode, os.path.lexists, os.devnull
    forbidden, kinds, changes, makes, modules = _FORBIDDEN, _FORBIDDEN_KINDS, _CHANGES, _MAKES, _NO_IMPORT
    writing, unnamed, full = _WRITING, _UNNAMED, errno.ENOSPC
    inside, made = directory + os.sep, itertools.count(1)

    def refuse(what: str) -> NoReturn:
        raise PermissionError(f"not in the sandbox: {what}")

    def outside(path: str) -> bool:
        return path != directory and not path.startswith(inside)

    def make() -> None:
        if next(made) > files:
            raise OSError(full, f"not in the sandbox: more than {files} files")

    def opening(path: str, flags: int) -> None:
        if flags & writing:
            if outside(path) and path != null:
                refuse(f"writing {path}")
            if not exists(path) or (unnamed and flags & unnamed == unnamed):
                make()
        elif path.startswith("/proc/") and path.endswith(("/environ", "/mem")):
            refuse(f"reading {path}")

    def change(event: str, args: tuple) -> None:
        paths, directories = changes[event]
        if any(descriptor not in (-1, None) for descriptor in args[len(args) - directories :]):
            refuse(f"{event} with dir_fd")
        for path in args[:paths]:
            if isinstance(path, int):  # a descriptor: of a file that may be read only, unless to be made shorter
                if event != "os.truncate":
                    refuse(f"{event} of a descriptor")
            elif outside(real(decode(path))):
                refuse(f"{event} {path}")
        if event in makes and not exists(args[paths - 1]):
            make()

    def guard(event: str, args: tuple) -> None:
        if event in forbidden or event.startswith(kinds):
            refuse(event)
        if event == "import" and args[0] in modules:
            raise ImportError(f"not in the sandbox: {args[0]}")
        if event == "open" and not isinstance(args[0], int):
            opening(real(decode(args[0])), args[2])
        if event in changes:
            change(event, args)

    return guard


if __name__ == "__main__":
    main()
