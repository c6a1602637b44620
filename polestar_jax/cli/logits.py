"""``polestar logits``: one full forward, written as float32 logits."""

from __future__ import annotations

import argparse

from polestar_jax.cli import common

EXAMPLES = """example:
  polestar logits --prompt-ids 1,2,3 --out logits.npz
writes the array "logits", float32 [S, V]: row i as the model gives it (Dream: row i scores position i + 1).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    common.add_model_arguments(parser)
    parser.add_argument("--prompt-ids", required=True, metavar="1,2,3", help="token ids; mask tokens are allowed")
    parser.add_argument("--out", required=True, metavar="F.npz", help="where to write")
    parser.add_argument("--json", action="store_true", help="report as a JSON object")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from polestar_jax.generation import logits

    ids = common.parse_ids(args.prompt_ids)
    common.check_outputs(out=args.out)
    model, _ = common.load_model(args)
    values = logits(model, ids)
    with common.replacing(args.out, "wb") as file:
        np.savez(file, logits=values)
    if args.json:
        common.print_json(
            {"out": args.out, "shape": list(values.shape), "model": args.model, "dtype": str(model.dtype)}
        )
    return 0
