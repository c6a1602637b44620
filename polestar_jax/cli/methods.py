"""``polestar methods``: the decoding methods, their settings, defaults and sources."""

from __future__ import annotations

import argparse
from typing import Any

from polestar_jax.cli import common
from polestar_jax.errors import InputError

EXAMPLES = """examples:
  polestar methods
  polestar methods klass adablock
  polestar methods --json

A method is a schedule, a cache and a commit rule; --set schedule=..., cache=... and commit=... put others in their place:
  polestar generate --method polestar --set commit=klass --prompt "..."
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("names", nargs="*", metavar="NAME", help="of methods; default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object a method")


def run(args: argparse.Namespace) -> int:
    from polestar_jax.decoders import METHODS

    for name in args.names:
        if name not in METHODS:
            raise InputError(f"unknown method {name!r}; methods: {', '.join(METHODS)}")
    for name in dict.fromkeys(args.names) or METHODS:
        _print(METHODS[name], args.json)
    return 0


def _print(method: Any, as_json: bool) -> None:
    settings = {
        key: {"default": setting.default, "accepted": setting.accepted, "help": setting.help}
        for key, setting in method.settings.items()
    }
    if as_json:
        fields = ("summary", "source", "schedule", "cache", "commit", "cost", "deviations", "presets")
        about = {"method": method.name} | {field: getattr(method, field) for field in fields}
        common.print_json(about | {"settings": settings})
        return
    print(f"{method.name}: {method.summary} ({method.source})")
    print(f"  parts: schedule {method.schedule}, cache {method.cache}, commit {method.commit}")
    print(f"  a pass computes: {method.cost}")
    for line in method.deviations:
        print(f"  differs from its authors' code: {line}")
    for key, about in settings.items():
        print(f"  {key} = {_shown(about['default'])}  [{about['accepted']}]  {about['help']}")
    for preset, changes in method.presets.items():
        if changes:
            print(f"  preset {preset}: {', '.join(f'{key} = {_shown(value)}' for key, value in changes.items())}")


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
