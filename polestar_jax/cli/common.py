"""Arguments and small services that several verbs share."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import IO, Any

from polestar_jax import unfinished
from polestar_jax.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="tiny", metavar="M", help="tiny (default), a Hugging Face directory, or a converted one"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights; default: float32 on a CPU, as stored elsewhere"
    )
    add_cache_arguments(parser)


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        metavar="DIR|off",
        help="compilation cache; default: POLESTAR_CACHE_DIR, else the user's cache directory",
    )


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method", default="polestar", metavar="NAME", help="see `polestar methods` (default: polestar)"
    )
    parser.add_argument("--preset", metavar="NAME", help="of the method: polestar has paper (default) and release")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a setting of the method; repeatable",
    )
    parser.add_argument("--gen-length", type=int, metavar="N", help="generated positions (default: 256)")
    parser.add_argument(
        "--block-length", type=int, metavar="N", help="positions of a block (default: 32, or gen-length below 32)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0: arg max (default); above: samples")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples (default: 0)")
    parser.add_argument(
        "--stop-at-eos", action="store_true", help="stop at the first complete block with an end of text"
    )
    parser.add_argument("--raw", action="store_true", help="no chat template")


def build_decoder(args: argparse.Namespace) -> Any:
    """The decoder of ``--method``, its options and ``--set``; InputError names what is wrong and what is accepted."""
    from polestar_jax.decoders import METHODS

    if args.method not in METHODS:
        raise InputError(f"unknown method {args.method!r}; methods: {', '.join(METHODS)}")
    if not 0 <= args.seed < 2**32:
        raise InputError(f"--seed {args.seed} is not accepted: a whole number in 0..{2**32 - 1}")
    method = METHODS[args.method]
    options = ("gen_length", "block_length", "temperature")
    values: dict[str, Any] = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    if args.stop_at_eos:
        values["stop_at_eos"] = True
    if args.preset is not None:
        if "preset" not in method.settings:
            raise InputError(f"--preset {args.preset} is not accepted: method {args.method} has no presets")
        values["preset"] = method.settings["preset"].parse("preset", args.preset)
    texts: dict[str, str] = {}
    for text in args.settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text} is not accepted: KEY=VALUE")
        if texts.setdefault(name, value) != value:
            raise InputError(f"setting {name} is given twice: {texts[name]} and {value}")
    for name, value in method.parsed(texts).items():
        if values.setdefault(name, value) != value:
            raise InputError(f"setting {name} is given twice: {values[name]} and {value}")
    return method.build(**values)


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer) of ``--model``, with the compilation cache on."""
    import jax

    from polestar_jax import compilation_cache
    from polestar_jax.loading import load

    compilation_cache.enable(args.cache_dir)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else None)
    return load(args.model, dtype=dtype)


def parse_ids(text: str) -> list[int]:
    """Token ids of ``1,2,3``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"prompt ids {text!r} are not accepted: whole numbers with commas, such as 1,2,3") from None


def versions() -> dict[str, str]:
    """Versions that can change a result."""
    from importlib.metadata import version

    from polestar_jax import __version__

    return {"polestar-jax": __version__} | {
        name: version(name) for name in ("jax", "jaxlib", "flax", "transformers", "numpy")
    }


def print_json(value: Any, file: IO[str] | None = None) -> None:
    """One JSON object on one line, in ASCII where the stream cannot take more."""
    out = file or sys.stdout
    wide = (getattr(out, "encoding", None) or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not wide, allow_nan=False), file=out, flush=True)


def check_outputs(**paths: str | None) -> None:
    """Refuse output paths before the work, not after it: option name -> path."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        name = f"--{option}"
        target = pathlib.Path(os.path.realpath(path))
        try:
            if target.is_dir() or path.endswith(os.sep) or not path:
                raise InputError(f"{name} {path} is a directory; a file name is needed")
            if not target.parent.is_dir():
                raise InputError(f"{name} {path}: the directory {target.parent} does not exist")
            special = target.exists() and not target.is_file()
            if not special:
                handle, partial = _partial(target)
                os.close(handle)
                os.unlink(partial)
        except OSError as error:
            raise InputError(f"{name} {path} cannot be written: {error.strerror}") from None
        if not special and str(target) in seen:
            raise InputError(f"{name} and {seen[str(target)]} name the same file {path}")
        seen[str(target)] = name


@contextlib.contextmanager
def replacing(path: str | pathlib.Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that appears under ``path`` only when complete: written beside it under another name, then renamed.

    A link is followed; a device or pipe is written straight to.
    """
    target = pathlib.Path(os.path.realpath(path))
    options = {} if "b" in mode else {"encoding": "utf-8"}
    if target.exists() and not target.is_file():
        with open(target, mode, **options) as file:
            yield file
        return
    handle, name = _partial(target)
    with unfinished.noted(name):
        try:
            with os.fdopen(handle, mode, **options) as file:
                yield file
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise


def _partial(target: pathlib.Path) -> tuple[int, str]:
    """A fresh file beside ``target``: (descriptor, name). OSError where the target's own name is not one either."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(target)
    name = str(target.parent / f".polestar-{os.getpid()}.partial")
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), name
