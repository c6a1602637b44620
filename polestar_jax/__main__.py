"""``python -m polestar_jax VERB``: the same as ``polestar VERB``."""

from polestar_jax.cli import command

command()
