"""The two ways a call can fail that are not bugs; the command line turns them into exit statuses 2 and 1."""

from __future__ import annotations


class InputError(ValueError):
    """Wrong use or wrong input: the message names the thing at fault and what is accepted (exit status 2)."""


class RunError(RuntimeError):
    """Something failed while running on input that was fine (exit status 1)."""
