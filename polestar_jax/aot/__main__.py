"""``python -m polestar_jax.aot TARGET``: compile a case for a GPU that is not here and print the report as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from polestar_jax.aot import launch
from polestar_jax.aot.cases import DTYPES, Size, names
from polestar_jax.aot.targets import TARGETS
from polestar_jax.errors import InputError, RunError
from polestar_jax.models.published import PUBLISHED

EXAMPLE = "example: python -m polestar_jax.aot h100 --model llada-8b --what vanilla-step"


def parser() -> argparse.ArgumentParser:
    size = Size()
    result = argparse.ArgumentParser(prog="python -m polestar_jax.aot", description=__doc__, epilog=EXAMPLE)
    result.add_argument("target", choices=TARGETS)
    result.add_argument("--what", choices=names(), default="vanilla-step", help="default: %(default)s")
    result.add_argument("--model", choices=PUBLISHED, default=size.model, help="default: %(default)s")
    result.add_argument("--layers", type=int, help="keep only this many layers; default: all")
    result.add_argument("--prompt", type=int, default=size.prompt, help="prompt columns; default: %(default)s")
    result.add_argument("--gen", type=int, default=size.gen, help="generated positions; default: %(default)s")
    result.add_argument("--block", type=int, default=size.block, help="positions of a block; default: %(default)s")
    result.add_argument("--batch", type=int, default=size.batch, help="sequences; default: %(default)s")
    result.add_argument("--dtype", choices=DTYPES, default=size.dtype, help="of the weights; default: %(default)s")
    result.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="NAME=VALUE", help="a setting of the method"
    )
    result.add_argument("--ptx", action="store_true", help="report registers and spills of every kernel")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 (compiling failed) or 2 (wrong use)."""
    options = vars(parser().parse_args(argv))
    target, what, ptx = options.pop("target"), options.pop("what"), options.pop("ptx")
    options["settings"] = tuple(tuple(pair.partition("=")[::2]) for pair in options["settings"])
    try:
        report = launch.run(target, what, Size(**options), ptx=ptx)
    except (InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
