"""JAX's persistent compilation cache, so that the second run of a program starts at once."""

from __future__ import annotations

import os
import pathlib
import sys

import jax

VARIABLE = "POLESTAR_CACHE_DIR"


def default_directory() -> pathlib.Path:
    """``$XDG_CACHE_HOME/polestar-jax`` or ``~/.cache/polestar-jax``."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "polestar-jax"


def enable(directory: str | None = None) -> pathlib.Path | None:
    """Turn the cache on and return its directory, or None where it is off.

    Args:
      directory: where; "off" for none. Default: the environment variable POLESTAR_CACHE_DIR, else jax's own setting
        (JAX_COMPILATION_CACHE_DIR), else the user's cache directory. One that cannot be written is left out with a notice.
    """
    chosen = directory or os.environ.get(VARIABLE)
    if chosen == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    path = pathlib.Path(chosen or jax.config.jax_compilation_cache_dir or default_directory()).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is not writable")
    except OSError as error:
        print(f"notice: no compilation cache: {error}", file=sys.stderr)
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    # jax leaves out what compiles in under a second, which on a CPU is most of what there is.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return path
