"""``polestar convert``: the same as ``python -m convert``."""

from convert.cli import add_convert_arguments as add_arguments
from convert.cli import run_convert as run

__all__ = ["add_arguments", "run"]
