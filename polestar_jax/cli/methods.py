"""``polestar methods``: the decoding methods, their settings, defaults and sources."""

from __future__ import annotations

import argparse

from polestar_jax.cli import common

EXAMPLES = """examples:
  polestar methods
  polestar methods --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--json", action="store_true", help="one JSON object a method")


def run(args: argparse.Namespace) -> int:
    from polestar_jax.decoders import METHODS

    for name, method in METHODS.items():
        settings = {
            key: {"default": setting.default, "accepted": setting.accepted, "help": setting.help}
            for key, setting in method.settings.items()
        }
        if args.json:
            common.print_json(
                {"method": name, "summary": method.summary, "source": method.source, "settings": settings}
            )
            continue
        print(f"{name}: {method.summary} ({method.source})")
        for key, about in settings.items():
            default = str(about["default"]).lower() if about["default"] in (None, True, False) else about["default"]
            print(f"  {key} = {default}  [{about['accepted']}]  {about['help']}")
    return 0
