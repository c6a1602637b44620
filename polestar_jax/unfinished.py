"""Outputs being written under temporary names, so that a process that ends without unwinding can remove them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

_paths: set[str] = set()


@contextlib.contextmanager
def noted(path: str | pathlib.Path) -> Iterator[None]:
    """Within, ``path`` is unfinished; the caller removes or renames it."""
    _paths.add(os.fspath(path))
    try:
        yield
    finally:
        _paths.discard(os.fspath(path))


def remove_all() -> None:
    """Remove every unfinished file and directory, as far as the file system lets it."""
    for path in tuple(_paths):
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
