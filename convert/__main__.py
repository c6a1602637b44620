"""``python -m convert``."""

from convert.cli import main
from polestar_jax.cli.process import end_with

end_with(main, "python -m convert")
