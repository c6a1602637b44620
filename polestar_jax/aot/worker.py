"""The process that compiles: a request as JSON on standard input, report.json in the dump folder."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import sys

from polestar_jax.aot.compile import compile_case


def main() -> None:
    request = json.load(sys.stdin)
    dump = pathlib.Path(request["dump"])
    make = getattr(importlib.import_module(request["module"]), request["case"])
    report = compile_case(make(**request["options"]), request["target"], dump=dump, ptx=request["ptx"])
    (dump / "report.json").write_text(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
