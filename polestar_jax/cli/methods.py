"""``polestar methods``: the decoding methods, their settings, defaults and sources."""

from __future__ import annotations

import argparse
from typing import Any

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
            about = {"method": name, "summary": method.summary, "source": method.source, "presets": method.presets}
            common.print_json(about | {"settings": settings})
            continue
        print(f"{name}: {method.summary} ({method.source})")
        for key, about in settings.items():
            print(f"  {key} = {_shown(about['default'])}  [{about['accepted']}]  {about['help']}")
        for preset, changes in method.presets.items():
            if changes:
                print(f"  preset {preset}: {', '.join(f'{key} = {_shown(value)}' for key, value in changes.items())}")
    return 0


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
