"""The schedules by name, with their settings."""

from __future__ import annotations

from polestar_jax import schedule
from polestar_jax.decoders.part import Part, own
from polestar_jax.settings import Setting

ADABLOCK = {
    "delimiter_threshold": Setting(
        type=float, default=None, low=0, none="LLaDA 0.3, Dream 0.5", help="least confidence of a delimiter that ends a block"
    ),
    "delimiters": Setting(
        type=tuple, default=None, none="published ids, else the tokenizer's tokens with a new line",
        help="token ids that may end a block",
    ),
}  # fmt: skip
CYCLES = {
    "block_length": Setting(
        type=int, default=None, low=1, help="positions of a block, a divisor of gen_length; none: gen_length, one block"
    ),
    "slow_passes": Setting(type=int, default=6, low=1, help="passes of a cycle that look for its end"),
    "end_threshold": Setting(
        type=float, default=0.3, help="a cycle ends behind the last undecided position with at least this confidence"
    ),
}  # fmt: skip

SCHEDULES = {
    "blocks": Part(
        build=lambda values, frame: schedule.Blocks(block_length=frame.block_length),
        summary="blocks of block_length positions, left to right",
    ),
    "adablock": Part(
        build=lambda values, frame: own(
            schedule.AdaBlock, values, gen_length=frame.gen_length, block_length=frame.block_length
        ),
        summary="blocks that end at a confident delimiter, else of block_length positions",
        settings=ADABLOCK,
    ),
    "cycles": Part(
        build=lambda values, frame: own(schedule.Cycles, values, block_length=frame.block_length),
        summary="as far as the model is certain, estimated by slow passes and finished by fast ones",
        settings=CYCLES,
        whole=True,
    ),
    "whole": Part(
        build=lambda values, frame: schedule.Blocks(block_length=frame.gen_length),
        summary="one block as long as the generation, whatever block_length says",
        whole=True,
    ),
}
