"""The process that compares answers; started by :mod:`polestar_jax.eval.math_judge`, and importing nothing of this package.

One line of JSON in, ``{"target", "answer"}``; one line out, ``{"same"}``. A first line says that math-verify is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

MEMORY_BYTES = 4 << 30


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the libraries print is no reply
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has the limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import LatexExtractionConfig, parse, verify

    def read(answer: str) -> list:
        return parse(f"\\boxed{{{answer}}}", extraction_config=[LatexExtractionConfig(boxed_match_priority=0)])

    replies.write(b"{}\n")
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        # Both return nothing, respectively False, on whatever they cannot read, on errors and after five seconds.
        same = bool(verify(read(asked["target"]), read(asked["answer"])))
        replies.write(json.dumps({"same": same}).encode() + b"\n")


if __name__ == "__main__":
    main()
