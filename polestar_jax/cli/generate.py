"""``polestar generate``: prompts in, text out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

from polestar_jax.cli import common, process
from polestar_jax.errors import InputError

EXAMPLES = """examples:
  polestar generate --prompt "Sort the list: k c x a m"
  polestar generate --method vanilla --set order=entropy --gen-length 64 --prompt "What is 12 + 7 - 3?" --json
  polestar generate --model path/to/LLaDA-8B-Instruct --input prompts.jsonl --json --output answers.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="one prompt")
    source.add_argument("--prompt-ids", metavar="1,2,3", help="one prompt as token ids")
    source.add_argument(
        "--input",
        metavar="F.jsonl",
        help='objects with "prompt", "prompt_ids" or "messages", and "id"; - for standard input',
    )
    common.add_model_arguments(parser)
    common.add_method_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts decoded together (default: 1)")
    parser.add_argument("--stream", action="store_true", help="write the answer piece by piece as it is decided")
    parser.add_argument("--json", action="store_true", help="one JSON object an answer: text, tokens, costs, settings")
    parser.add_argument("--trace", metavar="F.npz", help="write what every pass did (one prompt)")
    parser.add_argument("--output", metavar="F", help="write the answers there instead of standard output")


def run(args: argparse.Namespace) -> int:
    decoder = common.build_decoder(args)
    common.check_outputs(output=args.output, trace=args.trace)
    if not args.output and process.output_is_closed():
        raise InputError("standard output is closed; name a file with --output")
    if args.input and args.output and os.path.realpath(args.input) == os.path.realpath(args.output):
        raise InputError(f"--output and --input name the same file {args.input}")
    if args.batch_size < 1:
        raise InputError(f"--batch-size {args.batch_size} is not accepted: a whole number >= 1")
    entries = read_prompts(args)
    for option, on in (("--trace", args.trace), ("--stream", args.stream)):
        if on and len(entries) != 1:
            raise InputError(f"{option} takes one prompt, got {len(entries)}")
    model, tokenizer = common.load_model(args)
    decoder = decoder.for_model(model.spec, tokenizer)
    if args.trace:
        from polestar_jax.decode.trace import Trace

        decoder = decoder.replace(trace=Trace())
    with common.replacing(args.output) if args.output else contextlib.nullcontext(sys.stdout) as out:
        for entry, answer in zip(entries, _answers(args, model, tokenizer, decoder, entries, out), strict=True):
            if args.trace:
                _write_trace(args.trace, answer.trace)
            if args.json:
                common.print_json(report(entry, answer, args, model, decoder), out)
            elif not args.stream:
                print(
                    answer.text if answer.text is not None else ",".join(map(str, answer.tokens)), file=out, flush=True
                )
    return 0


def read_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All prompts as {"id", "prompt"}: from the option, the file or standard input; every line checked first."""
    if args.prompt is not None:
        return [{"id": 0, "prompt": args.prompt}]
    if args.prompt_ids is not None:
        return [{"id": 0, "prompt": common.parse_ids(args.prompt_ids)}]
    if args.input is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("no prompt: give --prompt, --prompt-ids, --input or text on standard input")
        return [{"id": 0, "prompt": _decoded(sys.stdin.buffer.read(), "standard input").rstrip("\n")}]
    name = "standard input" if args.input == "-" else args.input
    if args.input == "-" and sys.stdin is None:
        raise InputError("--input -: standard input is closed")
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if args.input == "-" else open(args.input, "rb") as file:
            text = _decoded(file.read(), name)
    except OSError as error:
        raise InputError(f"--input {args.input}: {error.strerror}") from None
    # Split at newlines alone: str.splitlines would also split at separators inside JSON strings.
    lines = text.split("\n")
    entries = [_entry(line, f"{name} line {i + 1}", i) for i, line in enumerate(lines) if line.strip()]
    if not entries:
        raise InputError(f"{name} has no prompts")
    return entries


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _entry(line: str, where: str, index: int) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # half a surrogate pair is a ValueError too
        raise InputError(f"{where} is not JSON: {error}") from None
    kinds = [key for key in ("prompt", "prompt_ids", "messages") if isinstance(value, dict) and key in value]
    if len(kinds) != 1:
        raise InputError(f'{where} must be an object with one of "prompt", "prompt_ids" or "messages"')
    prompt = value[kinds[0]]
    if kinds[0] == "prompt" and not isinstance(prompt, str):
        raise InputError(f'{where}: "prompt" must be text')
    whole = isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    if kinds[0] == "prompt_ids" and not whole:
        raise InputError(f'{where}: "prompt_ids" must be a list of whole numbers')
    if kinds[0] == "messages" and not (
        isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    ):
        raise InputError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    return {"id": value.get("id", index), "prompt": prompt}


def _answers(
    args: argparse.Namespace, model: Any, tokenizer: Any, decoder: Any, entries: list, out: IO[str]
) -> Iterator[Any]:
    from polestar_jax import generation

    prompts = [entry["prompt"] for entry in entries]
    if args.stream:
        yield from _streamed(args, model, tokenizer, decoder, prompts[0], out)
        return
    progress = lambda done, total: total > 1 and print(f"{done}/{total}", file=sys.stderr, flush=True)  # noqa: E731
    yield from generation.iterate(
        model, tokenizer, prompts, decoder, raw=args.raw, batch_size=args.batch_size, seed=args.seed, on_batch=progress
    )


def _streamed(
    args: argparse.Namespace, model: Any, tokenizer: Any, decoder: Any, prompt: Any, out: IO[str]
) -> Iterator[Any]:
    """Show the decided beginning as it grows: as text, or with --json one object a pass; then the answer."""
    import time

    from polestar_jax import generation
    from polestar_jax.cli.streaming import DecidedText
    from polestar_jax.decode import engine

    ids = generation.all_prompt_ids([prompt], tokenizer, model.spec, decoder.gen_length, raw=args.raw)
    state = engine.init_state(model, decoder, ids, seed=args.seed)
    compile_seconds = engine.compile_step(model, decoder, state)
    shown = DecidedText(tokenizer, model.spec)
    started = time.perf_counter()
    for now in engine.steps(model, decoder, state):
        tokens = now.generated[0].tolist()
        new = shown.grow(tokens)
        if args.json:
            common.print_json({"nfe": int(now.nfe[0]), "tokens": tokens, "text": shown.text}, out)
        else:
            print(new, end="", file=out, flush=True)
    if not args.json:
        print(file=out, flush=True)
    finished = generation.Finished(now, time.perf_counter() - started, compile_seconds)
    yield from generation.answers(finished, ids, model, decoder, tokenizer)


def report(entry: dict[str, Any], answer: Any, args: argparse.Namespace, model: Any, decoder: Any) -> dict[str, Any]:
    """The JSON object of one answer."""
    import jax

    return {
        "id": entry["id"],
        "text": answer.text,
        "prompt_ids": answer.prompt_ids,
        "tokens": answer.tokens,
        **dataclasses.asdict(answer.stats),
        "method": decoder.name,
        "settings": decoder.settings() | {"seed": args.seed, "batch_size": args.batch_size, "raw": args.raw},
        "model": args.model,
        "dtype": str(model.dtype),
        "matmul_precision": "highest" if str(model.dtype) == "float32" else "default",
        "device": jax.devices()[0].device_kind,
        "versions": common.versions(),
    }


def _write_trace(path: str, arrays: dict[str, Any]) -> None:
    import numpy as np

    with common.replacing(path, "wb") as file:
        np.savez_compressed(file, **arrays)
