"""The sandbox: verdicts that cannot be had by printing or leaving, limits, and what a program cannot reach."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from polestar_jax.errors import InputError, RunError
from polestar_jax.eval import sandbox
from polestar_jax.eval.sandbox import Limits, Outcome

SHORT = Limits(cpu_seconds=1, wall_seconds=20.0, memory_bytes=1 << 28, file_bytes=1 << 20)


def run(program: str, tests: str = "", limits: Limits = SHORT) -> Outcome:
    return sandbox.run(textwrap.dedent(program), textwrap.dedent(tests), allow_code_execution=True, limits=limits)


def replaced(source: str, call: str, by: str) -> str:
    assert source.count(call) == 1
    return source.replace(call, by)


@pytest.fixture
def child(tmp_path, monkeypatch) -> pathlib.Path:
    """The sandbox's program under a path of this test's own, by which its processes are known."""
    path = tmp_path / "child" / "sandbox_child.py"
    path.parent.mkdir()
    path.write_text(sandbox._CHILD.read_text())
    monkeypatch.setattr(sandbox, "_CHILD", path)
    return path


@pytest.fixture(params=["namespaces", "hook only"])
def protection(request, child):
    """Both with what the kernel offers, and as where it offers nothing."""
    if request.param == "hook only":
        child.write_text(replaced(child.read_text(), '_namespaces(job["directory"], job["limits"])', "[]"))
    return request.param


@pytest.mark.parametrize("allowed", [False, None, "yes", 1])
def test_nothing_runs_without_consent(allowed, tmp_path):
    with pytest.raises(InputError, match="--allow-code-execution"):
        sandbox.run(f"open({str(tmp_path / 'ran')!r}, 'w')", "", allow_code_execution=allowed)
    assert not (tmp_path / "ran").exists()


def test_verdicts(protection):
    passed = run("def f(x): return x + 1", "assert f(1) == 2")
    assert (passed.status, passed.passed, passed.detail) == ("passed", True, "")
    assert (passed.isolation == ()) if protection == "hook only" else True
    failed = run("def f(x): return x", "assert f(1) == 2, 'no'")
    assert (failed.status, failed.passed, failed.detail) == ("failed", False, "AssertionError: no")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def f(x):\n    import os\n    os._exit(0)",
        "def f(x): quit()",
        "print('passed')\nimport os\nos._exit(0)",
        "import os, signal\nsignal.raise_signal(signal.SIGKILL)",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import threading, os\nthreading.Timer(0, os._exit, (0,)).start()\ndef f(x):\n    import time\n    time.sleep(5)",
        # Every descriptor is told that all is well, in the form of a verdict.
        'import os\nfor fd in range(64):\n    try: os.write(fd, b\'\\n{"token": "", "status": "passed", "detail": "", '
        '"isolation": []}\\n\')\n    except OSError: pass\nos._exit(0)',
        "import os\nos.closerange(0, 64)",
        # Nor is a verdict that the caller cannot read.
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'[' * 60000 + b'\\n')\n    except OSError: pass",
        "import json, os\njson.dumps = lambda *_: '{}'\nos.write = print\nos._exit = print\ndef f(x): return 0",
        "import faulthandler\nfaulthandler._sigsegv()",
        "def f(x): return x",
        "def f(x): raise KeyboardInterrupt",
        "def g(",
        "x = 1\0",
        "'\ud800'",
        "",
    ],
)
def test_a_wrong_program_never_passes(program):
    outcome = run(program, "assert f(1) == 2")
    assert outcome.status in ("failed", "died"), outcome


def test_a_right_program_passes_whatever_it_prints_and_leaves_behind():
    program = """
        from __future__ import annotations
        import atexit, dataclasses, json, os, sys, threading, time
        print("failed", flush=True)
        sys.stderr.write("x" * 10**6)
        atexit.register(os._exit, 3)
        json.dumps = os.write = os._exit = None
        @dataclasses.dataclass
        class Pair:  # its annotations are looked up in its module
            first: int
        threading.Thread(target=time.sleep, args=(60,)).start()
        if __name__ == "__main__":
            raise ValueError("no program of its own")
        def f(x): return x + 1
    """
    begun = time.monotonic()
    assert run(program, "assert f(1) == 2").passed
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_a_loop_is_ended_by_its_computing_time(program, protection):
    begun = time.monotonic()
    assert run(program, limits=Limits(cpu_seconds=1, wall_seconds=60)).status == "timeout"
    assert time.monotonic() - begun < 55


def test_waiting_is_ended_by_the_clock(protection, child):
    for program in ("import time; time.sleep(600)", "import os, time; os.setsid(); time.sleep(600)"):
        assert run(program, limits=Limits(wall_seconds=2)).status == "timeout"
    assert not survivors(child)


def survivors(child: pathlib.Path) -> list[str]:
    """Processes of this test that still run; a moment is left for the kernel to remove them."""
    for _ in range(50):
        found = processes(child)
        if not found:
            break
        time.sleep(0.1)
    return found


def processes(child: pathlib.Path) -> list[str]:
    """Command lines of the processes that run it."""
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if f" -B {child}" in line]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError"),
        ("open('big', 'wb').write(bytes(2 << 20))", "OSError"),
        ("files = [open('a', 'w') for _ in range(500)]", "OSError"),
        ("def f(): return f()\nf()", "RecursionError"),
        (
            "import threading, time\nfor _ in range(500): threading.Thread(target=time.sleep, args=(30,)).start()",
            "RuntimeError",
        ),
    ],
)
def test_limits(program, error, protection):
    limits = dataclasses.replace(SHORT, cpu_seconds=10)  # filling memory takes a busy machine a while
    outcome = run(program, limits=limits)
    assert outcome.status == "failed" and outcome.detail.startswith(error), outcome


FORBIDDEN = [
    "import socket; socket.socket()",
    "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)",
    "import socket; socket.getaddrinfo('localhost', 80)",
    "import _socket; _socket.socket()",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9', timeout=1)",
    "import asyncio; asyncio.run(asyncio.sleep(0))",  # its loop needs a pair of sockets
    "import os; os.system('true')",
    "import os; os.fork()",
    "import os; os.execv('/bin/true', ['true'])",
    "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "import subprocess; subprocess.run(['true'])",
    "import os; os.kill(1, 0)",
    "import ctypes; ctypes.CDLL(None)",
    "import ctypes; ctypes.pythonapi.system(b'true')",
    "import ctypes; ctypes.string_at(id(1))",
    "import multiprocessing, os; multiprocessing.get_context('spawn').Process(target=os.system, args=('true',)).start()",
    "import multiprocessing, os; multiprocessing.get_context('forkserver').Process(target=os.getpid).start()",
    "import subprocess; subprocess._fork_exec()",
    "import _posixsubprocess; _posixsubprocess.fork_exec()",
    "import signal; signal.pidfd_send_signal(0, 0)",
    "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    "import syslog; syslog.syslog('x')",
    "import sqlite3; sqlite3.connect('x.db')",
    "import sqlite3; sqlite3.connect(':memory:').execute(\"attach 'x.db' as x\")",
    "import sqlite3; sqlite3.Connection('file:x.db?mode=rwc', uri=True)",
    "from multiprocessing import shared_memory; shared_memory.SharedMemory(create=True, size=1)",
    "import os; os.mkfifo('x')",
    "import os; os.mknod('x')",
    "import posix; posix.mkfifo('x')",
]
if not sys.platform.startswith("linux"):
    FORBIDDEN = [program for program in FORBIDDEN if "pidfd" not in program and "prlimit" not in program]


@pytest.mark.parametrize("program", FORBIDDEN)
def test_no_network_no_processes_no_signals(program, protection):
    outcome = run(program)
    assert outcome.status == "failed" and outcome.detail.startswith("PermissionError: not in the sandbox"), outcome


@pytest.mark.parametrize(
    "name",
    "_posixsubprocess _posixshmem posix _signal _interpreters _xxsubinterpreters _dbm _gdbm _tkinter readline".split(),
)
def test_modules_that_act_unseen_are_not_imported(name, protection):
    """Nor imported afresh, with the functions that were taken away."""
    outcome = run(f"import sys; sys.modules.pop({name!r}, None); import {name}")
    assert (outcome.status, outcome.detail) == ("failed", f"ImportError: not in the sandbox: {name}")


def test_what_programs_import_and_tidy_up_still_works(protection):
    program = """
        import asyncio, concurrent.futures, ctypes, multiprocessing, os, pathlib, shelve, shutil, sqlite3, subprocess, tempfile
        import numpy
        assert numpy.linalg.det(numpy.eye(2)) == 1.0 and ctypes.sizeof(ctypes.c_int32) == 4
        with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile("w+") as file:
            file.write("x")
            pathlib.Path(place, "a", "b").mkdir(parents=True)
            pathlib.Path(place, "a", "c").write_text("x")
            os.chmod(place, 0o700)
        assert os.listdir() == []
        with shelve.open("kept") as kept: kept["a"] = 1
        with shelve.open("kept") as kept: assert kept["a"] == 1
        with concurrent.futures.ThreadPoolExecutor(2) as pool: assert list(pool.map(abs, [-1, 2])) == [1, 2]
        os.close(os.open(".", os.O_RDONLY))
        os.close(os.open("new", os.O_CREAT | os.O_WRONLY, 0o600))
    """
    outcome = run(program, limits=Limits())
    assert outcome.passed, outcome


def test_files_outside_of_the_directory_stay_as_they_are(tmp_path, protection):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    place, before = str(victim), os.stat(victim / "file")
    # Where the directory's descriptor was not opened by os.open, but is the one of a listing under way.
    at = f"import os; at = os.open('{place}', os.O_RDONLY); os.close(at); listing = os.scandir('{place}'); next(listing);"
    for program in (
        f"open('{place}/file', 'w')",
        f"open('{place}/new', 'x')",
        f"open('{place}/file', 'r+').write('gone')",
        f"import os; os.remove('{place}/file')",
        f"import os; os.rename('{place}/file', 'here')",
        f"import os; open('a', 'w'); os.rename('a', '{place}/file')",
        f"import os; os.symlink('{place}', 'link'); open('link/file', 'w')",
        f"import os; os.symlink('here', '{place}/new')",
        f"import os; open('a', 'w'); os.link('a', '{place}/new')",
        f"import os; os.mkdir('{place}/new')",
        f"import pathlib; pathlib.Path('{place}/file').unlink()",
        f"import shutil; shutil.rmtree('{place}')",
        f"import os; os.chdir('{place}'); open('file', 'w')",
        f"import os; os.truncate('{place}/file', 0)",
        f"import os; os.mkfifo('{place}/new')",
        f"import os; os.mknod('{place}/new')",
        f"import sqlite3; sqlite3.connect('{place}/new').execute('create table t(a)')",
        f"import sqlite3; sqlite3.connect(':memory:').execute(\"attach '{place}/new' as x\").execute('create table x.t(a)')",
        f"import sqlite3; sqlite3.connect('file:{place}/new', uri=True).execute('create table t(a)')",
        f"{at} os.open('file', os.O_WRONLY | os.O_TRUNC, dir_fd=at)",
        f"{at} os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=at)",
        f"{at} os.remove('file', dir_fd=at)",
        f"{at} os.rename('file', 'new', src_dir_fd=at, dst_dir_fd=at)",
        f"{at} os.replace('file', 'file', src_dir_fd=at)",
        f"{at} open('a', 'w'); os.replace('a', 'file', dst_dir_fd=at)",
        f"{at} os.mkdir('new', dir_fd=at)",
        f"{at} os.symlink('a', 'new', dir_fd=at)",
        f"{at} open('a', 'w'); os.link('a', 'new', dst_dir_fd=at)",
        f"{at} os.link('file', 'here', src_dir_fd=at)",
        f"{at} os.mkfifo('new', dir_fd=at)",
        f"{at} open('file', 'w'); os.chmod('file', 0o777, dir_fd=at)",
        f"{at} open('file', 'w'); os.utime('file', (0, 0), dir_fd=at)",
        f"import os; os.chmod(os.open('{place}/file', os.O_RDONLY), 0o777)",
        f"import os; os.utime(os.open('{place}/file', os.O_RDONLY), (0, 0))",
    ):
        outcome = run(program)
        assert outcome.status == "failed" and "Error" in outcome.detail, (program, outcome)
        assert os.stat(victim / "file")[:9] == before[:9]
        assert [path.name for path in victim.iterdir()] == ["file"] and (victim / "file").read_text() == "kept"


def test_files_are_read_only_without_the_hook_too(tmp_path, child):
    """The namespaces alone, for code that gets around the hook."""
    if "files" not in run("").isolation:
        pytest.skip("the kernel gives no read-only file system here")
    child.write_text(replaced(child.read_text(), '_watch(job["directory"], job["limits"]["files"])', "pass"))
    assert run(f"open({str(tmp_path / 'new')!r}, 'w')").detail.startswith("OSError: [Errno 30]")
    assert run("open('own', 'w').write('x')").passed
    assert run(f"open('/proc/{os.getpid()}/environ')").detail.startswith("PermissionError: [Errno 13]")
    undone = "ctypes.CDLL(None).syscall(442, -100, b'/', 0, (ctypes.c_uint64 * 4)(0, 1, 0, 0), ctypes.c_size_t(32))"
    assert run(f"import ctypes\nassert {undone} == -1").passed  # the caller's rights over the mounts are given up
    assert (
        "Network is unreachable" in run("import socket; socket.create_connection(('192.0.2.1', 9), timeout=5)").detail
    )
    assert run("import os; os.kill(os.getppid() or 1, 0); os.kill(2**22 - 1, 9)").detail.startswith(
        "ProcessLookupError"
    )


def test_own_directory_and_environment(protection, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = f"""
        import os, sys, tempfile
        assert os.listdir(".") == [], os.listdir(".")
        assert set(os.environ) <= {{"HOME", "TMPDIR", "PATH", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}}, sorted(os.environ)
        assert os.path.realpath(os.environ["HOME"]) == os.getcwd() == os.path.realpath(tempfile.gettempdir())
        assert "" not in sys.path and os.getcwd() not in sys.path and sys.flags.isolated
        assert {str(pathlib.Path(sandbox.__file__).parent)!r} not in sys.path
        with open("a", "w") as file: file.write("x")
        os.mkdir("d"); os.rename("a", "d/b")
        with tempfile.NamedTemporaryFile("w") as file: file.write("x")
        os.symlink("d", "link")
        for directory, path in (
            (".", "/proc/{os.getpid()}/environ"),
            (".", b"/proc/{os.getpid()}/environ"),
            (".", "/dev/../proc/{os.getpid()}/environ"),
            ("/proc/{os.getpid()}", "environ"),
        ):
            os.chdir(directory)
            try: open(path, "rb")
            except PermissionError as error: assert str(error).startswith("not in the sandbox: reading"), error
            else: raise AssertionError("the caller's environment is open")
    """
    outcome = run(program)
    assert outcome.passed, outcome
    assert not list(tmp_path.glob("polestar-code-*"))


@pytest.mark.parametrize(
    "make",
    [
        "open(str(i), 'w')",
        "os.close(os.open(str(i), os.O_CREAT | os.O_WRONLY))",
        "os.mkdir(str(i))",
        "os.symlink('a', str(i))",
        "open('a', 'w'); os.replace('a', str(i))",
        "keep.append(os.open('.', os.O_TMPFILE | os.O_RDWR))",
    ],
)
def test_as_many_files_as_the_limit_says(make, protection):
    if "O_TMPFILE" in make and not hasattr(os, "O_TMPFILE"):
        pytest.skip("Linux only")
    limits = Limits(files=8)
    program = f"import os\nkeep = []\nfor i in range({{}}):\n    {make}\n"
    assert run(program.format(8), limits=limits).passed
    outcome = run(program.format(9), limits=limits)
    assert outcome.detail == "OSError: [Errno 28] not in the sandbox: more than 8 files", outcome


def test_a_file_written_again_is_one_file(protection):
    program = "for i in range(100):\n    with open('a', 'a') as file: file.write('x')"
    assert run(program, limits=Limits(files=1)).passed


def test_the_disk_is_limited_without_the_hook_too(child):
    if "disk" not in run("").isolation:
        pytest.skip("the kernel gives no file system of its own here")
    child.write_text(replaced(child.read_text(), '_watch(job["directory"], job["limits"]["files"])', "pass"))
    limits = Limits(files=8, file_bytes=1 << 20)
    program = "for i in range({}):\n    with open(str(i), 'wb') as file: file.write(bytes(1 << 20))"
    assert run(program.format(8), limits=limits).passed
    assert run(program.format(9), limits=limits).detail.startswith("OSError: [Errno 28] No space left on device")


def test_isolation_is_what_a_program_runs_in(child):
    sandbox.isolation.cache_clear()
    try:
        found = sandbox.isolation()
        assert found == tuple(sorted(run("").isolation)) and set(found) <= {"disk", "files", "network", "processes"}
        child.write_text("")
        assert sandbox.isolation() is found  # asked once
        sandbox.isolation.cache_clear()
        with pytest.raises(RunError, match="code cannot be run here: 'x = 1' should have passed, and died"):
            sandbox.isolation()
    finally:
        sandbox.isolation.cache_clear()


def test_isolation_is_none_where_there_are_no_namespaces(child):
    child.write_text(replaced(child.read_text(), '_namespaces(job["directory"], job["limits"])', "[]"))
    sandbox.isolation.cache_clear()
    try:
        assert sandbox.isolation() == ()
    finally:
        sandbox.isolation.cache_clear()


def test_a_killed_caller_leaves_no_program_running(child, tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells a process that its parent is gone")
    code = f"""
        import pathlib
        from polestar_jax.eval import sandbox
        sandbox._CHILD = pathlib.Path({str(child)!r})
        sandbox.run("import time; time.sleep(600)", "", allow_code_execution=True)
    """
    root = pathlib.Path(sandbox.__file__).parents[2]
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=root, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    for _ in range(300):
        time.sleep(0.1)
        if len(processes(child)) == 2:  # the first process and the program's own
            break
    else:
        raise AssertionError("the program was never started")
    time.sleep(0.5)
    caller.kill()
    caller.communicate()
    assert not survivors(child)
