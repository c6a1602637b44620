"""Schedules: which generated positions may be committed now."""

from polestar_jax.schedule.adablock import AdaBlock
from polestar_jax.schedule.blocks import Blocks, Spans
from polestar_jax.schedule.cycles import Cycles

__all__ = ["AdaBlock", "Blocks", "Cycles", "Spans"]
