"""``polestar verify``: the same as ``python -m convert verify``."""

from convert.cli import add_verify_arguments as add_arguments
from convert.cli import run_verify as run

__all__ = ["add_arguments", "run"]
