"""``polestar models``: the models there are, and what can be converted."""

from __future__ import annotations

import argparse

from polestar_jax.cli import common

EXAMPLES = """examples:
  polestar models
  polestar models --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--json", action="store_true", help="one JSON object a model")


def run(args: argparse.Namespace) -> int:
    from polestar_jax.models.published import CHECKPOINTS
    from polestar_jax.tiny import DIRECTORY
    from polestar_jax.tiny.train import SPEC

    rows = [("tiny", SPEC, "embedded", str(DIRECTORY))]
    rows += [(name, spec, "from a local directory (polestar convert)", None) for name, spec in CHECKPOINTS.items()]
    for name, spec, how, path in rows:
        about = {
            "model": name, "family": spec.family, "parameters": spec.parameters, "layers": spec.n_layers, "width": spec.d_model,
            "vocabulary": spec.vocab_size, "max_length": spec.max_length, "weights": how,
        }  # fmt: skip
        if args.json:
            common.print_json(about | ({"path": path} if path else {}))
        else:
            print(
                f"{name}: {spec.family}, {spec.parameters / 1e6:,.1f} M parameters, {spec.n_layers} layers of width "
                f"{spec.d_model}, at most {spec.max_length} tokens; {how}"
            )
    return 0
