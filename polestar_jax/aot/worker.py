"""The process that compiles: a request as JSON on standard input, report.json in the dump folder."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

from polestar_jax.aot.cases import Size, make
from polestar_jax.aot.compile import compile_case
from polestar_jax.errors import InputError


def main() -> None:
    request = json.load(sys.stdin)
    dump = pathlib.Path(request["dump"])
    try:
        case = make(request["what"], Size(**request["size"]))
        report = dataclasses.asdict(compile_case(case, request["target"], dump=dump, ptx=request["ptx"]))
    except InputError as error:
        report = {"input_error": str(error)}
    except Exception as error:  # compilers raise anything; their messages run to pages, the first line says it
        lines = str(error).strip().splitlines() or ["no message"]
        report = {"error": f"{type(error).__name__}: {lines[0][:500]}"}
    (dump / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
