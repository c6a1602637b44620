"""The ``polestar`` command: one module a verb, errors as one line, exit status 0, 1 (failed while running) or 2 (wrong use)."""

from polestar_jax.cli.main import command, main

__all__ = ["command", "main"]
