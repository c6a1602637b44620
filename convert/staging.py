"""Output directories that appear whole or not at all.

Everything is written into ``.NAME.partial`` beside the destination and renamed at the end. What a killed run leaves
there is removed by the next one; two runs at once are told apart by a lock that dies with its process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from polestar_jax.errors import InputError, RunError
from polestar_jax.unfinished import noted

try:
    import fcntl
except ImportError:  # no POSIX locks on this platform: two runs at once are then the user's own care
    fcntl = None


def partial_path(destination: Path) -> Path:
    """Where a directory is written before it gets its name."""
    return destination.parent / f".{destination.name}.partial"


def is_partial(directory: Path) -> bool:
    """Whether a path is the unfinished output of :func:`staged`."""
    name = Path(os.path.abspath(directory)).name
    return name.startswith(".") and name.endswith(".partial")


@contextlib.contextmanager
def staged(destination: str | Path) -> Iterator[Path]:
    """An empty directory to write into; on success it becomes ``destination``, on failure it is removed.

    Raises:
      InputError: the destination exists and is not an empty directory, or another run is writing it.
      RunError: the file system refused something (disk full, permissions).
    """
    if not os.fspath(destination):
        raise InputError("the destination's name is empty; give a directory to make")
    final = Path(os.path.realpath(destination))
    partial = partial_path(final)
    _check_name(final, partial)
    _check_free(final)
    with _os_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = _open_locked(partial, final)
        try:
            _clear(partial)
            with noted(partial):
                yield partial
                _check_free(final)
                for path in (*(child for child in partial.iterdir() if child.is_file()), partial):
                    _sync(path)
                os.rename(partial, final)
            with contextlib.suppress(OSError):  # it is complete under its name, whatever the parent's state on disk
                _sync(final.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            os.close(lock)


def _check_name(final: Path, partial: Path) -> None:
    """Refuse names under which no directory can be made, whatever the state of the file system."""
    try:
        os.lstat(partial)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        file = next(parent for parent in final.parents if parent.exists())
        raise InputError(f"{final}: cannot be made, since {file} is not a directory") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise InputError(f"{final}: cannot be made ({error.strerror}); choose another destination") from None


def _check_free(final: Path) -> None:
    if final.is_dir():
        if next(final.iterdir(), None) is not None:
            raise InputError(f"{final}: exists and is not empty; choose another destination or remove it")
    elif final.exists():
        raise InputError(f"{final}: exists and is not a directory")


def _open_locked(partial: Path, final: Path) -> int:
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us may have renamed or removed the directory between our opening and locking it.
        same = os.path.samestat(os.fstat(lock), os.stat(partial))
    except BlockingIOError:
        os.close(lock)
        raise InputError(f"{final}: another run is writing it (into {partial.name})") from None
    except FileNotFoundError:
        same = False
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):  # file systems without locks
            os.close(lock)
            raise
        same = True
    if not same:
        os.close(lock)
        raise InputError(f"{final}: another run has just written it")
    return lock


def _clear(partial: Path) -> None:
    for child in partial.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _os_errors(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise RunError(f"writing {final} failed: {error.strerror or error}{where}; nothing was left there") from error
