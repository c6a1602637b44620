"""lm-eval's tasks with this project's methods: ``python -m polestar_jax.eval.harness``, or :func:`evaluate` from Python.

``import polestar_jax.eval.harness`` is all that lm-eval's own ``simple_evaluate(model="polestar", model_args=...)`` needs. Tasks
are lm-eval's by name (their data comes from the hub) or task files of the user's (YAML, with local data). The paper's benchmarks
have their settings in :data:`BENCHMARKS`. Where the hub is out of reach, ``polestar eval`` scores the same benchmarks from local
files; it also scores HumanEval answers of chat models as published numbers are, with the code taken out of prose and fences:
lm-eval runs prompt and answer as they stand.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from polestar_jax.cli import common, process
from polestar_jax.cli.main import Parser
from polestar_jax.decoders import METHODS
from polestar_jax.errors import InputError, RunError
from polestar_jax.eval import choices

try:
    from polestar_jax.eval.harness_model import PolestarLM
except InputError as missing:  # lm-eval is not installed
    if __name__ != "__main__":
        raise
    print(f"error: {missing}", file=sys.stderr)
    sys.exit(2)

__all__ = ["BENCHMARKS", "Benchmark", "PolestarLM", "evaluate", "main"]
FEWSHOT_SEED = 1234  # lm-eval's own default; which examples GSM8K's prompts show depends on it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One of the paper's benchmarks (arXiv 2607.14107, section 5.1) as the baselines run it.

    Attributes:
      task: lm-eval's name.
      shots: examples in the prompt.
      gen_lengths: what the paper decodes; the first is the default.
      block_length: of each.
      modes: the prompt mode by model family. LLaDA-1.5's published numbers are of "raw": say so where they are to be compared.
      escape_until: whether stop strings are left out of account in a chat.
      runs_code: whether lm-eval executes what a model wrote, in this process's rights.
    """

    task: str
    shots: int
    gen_lengths: tuple[int, ...] = (256, 512)
    block_length: int = 32
    modes: tuple[tuple[str, str], ...] = (("llada", "chat_single_user"), ("dream", "raw_bos"))
    escape_until: bool = False
    runs_code: bool = False


BENCHMARKS = {
    "gsm8k": Benchmark(task="gsm8k", shots=5),
    "math": Benchmark(task="minerva_math", shots=4),
    "humaneval": Benchmark(task="humaneval", shots=0, escape_until=True, runs_code=True),
    "mbpp": Benchmark(task="mbpp", shots=3, runs_code=True),
}


def evaluate(
    lm: PolestarLM,
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    limit: int | None = None,
    fewshot_seed: int = FEWSHOT_SEED,
    gen_kwargs: dict[str, Any] | None = None,
    allow_code_execution: bool = False,
    samples: bool = False,
) -> dict[str, Any]:
    """lm-eval's results, with the model's record under ``["config"]["polestar"]``.

    Args:
      lm: the model; its prompt mode decides whether lm-eval hands over messages.
      tasks: names of lm-eval's, task files (YAML), or directories of such.
      shots: examples in a prompt; None: as each task says.
      limit: items of each task.
      fewshot_seed: of the choice of examples.
      gen_kwargs: what to change in the tasks' generation arguments.
      allow_code_execution: run tasks that execute what the model writes.
      samples: keep every prompt and answer under ``["samples"]``.

    Raises:
      InputError: a task that is not known, or whose requests are not accepted.
      RunError: a task's data or files cannot be read, or decoding failed.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    specs = [spec for name in tasks for spec in _specs(name)]
    named = [spec for spec in specs if not pathlib.Path(spec).is_file()]
    manager = TaskManager(include_defaults=bool(named))
    unknown = sorted(set(named) - set(manager.all_tasks))
    if unknown:
        raise InputError(
            f"task {unknown[0]!r} is not accepted: no file, no directory and none of lm-eval's {len(manager.all_tasks)} names"
        )
    if allow_code_execution:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # asked for by the library that lm-eval's code tasks execute with
    turns = lm.encoding.prompt_mode == "chat_multiturn"
    try:
        return simple_evaluate(
            model=lm, tasks=specs, num_fewshot=shots, limit=limit, fewshot_random_seed=fewshot_seed, gen_kwargs=gen_kwargs,
            apply_chat_template=turns, fewshot_as_multiturn=turns, task_manager=manager, log_samples=samples,
            confirm_run_unsafe_code=allow_code_execution,
        )  # fmt: skip
    except (InputError, RunError):
        raise
    except Exception as error:  # reading a task's files and data may raise anything
        if os.environ.get("POLESTAR_DEBUG"):
            raise
        if "confirm_run_unsafe_code" in str(error):
            raise InputError(
                f"{', '.join(tasks)}: executes what the model writes; give --allow-code-execution"
            ) from None
        raise RunError(f"lm-eval on {', '.join(tasks)}: {type(error).__name__}: {error}") from error


def _specs(name: str) -> list[str]:
    """A task's name or file, or the task files of a directory."""
    path = pathlib.Path(name)
    if not path.is_dir():
        return [name]
    files = sorted(str(file) for file in (*path.glob("*.yaml"), *path.glob("*.yml")) if not file.name.startswith("_"))
    if not files:
        raise InputError(f"--tasks {name}: the directory has no task files (*.yaml)")
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        return _run(_parser().parse_args(argv))
    except BrokenPipeError:
        raise
    except (InputError, RunError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m polestar_jax.eval.harness", description="lm-eval's tasks with one decoding method.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tasks", metavar="T,T", help="names of lm-eval's, task files, or directories of task files")
    what.add_argument("--benchmark", choices=BENCHMARKS, help="one of the paper's, with its settings")
    common.add_model_arguments(parser)
    parser.add_argument(
        "--method", default="polestar", metavar="NAME", help="see `polestar methods` (default: polestar)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="a setting of it"
    )
    modes = "; ".join(f"{name}: {meaning}" for name, meaning in choices.PROMPT_MODES.items())
    parser.add_argument("--prompt-mode", choices=choices.PROMPT_MODES, help=f"how a prompt is made; {modes}")
    parser.add_argument(
        "--gen-length", type=int, metavar="N", help="positions to decode, in place of the tasks' max_gen_toks"
    )
    parser.add_argument("--block-length", type=int, metavar="N", help="positions of a block (default: 32)")
    parser.add_argument("--shots", type=int, metavar="N", help="examples in a prompt (default: as the tasks say)")
    parser.add_argument(
        "--fewshot-seed", type=int, default=FEWSHOT_SEED, metavar="N", help="of the examples (default: 1234)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="items of each task")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts decoded together (default: 1)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of samples and of likelihoods' masks (default: 0)"
    )
    parser.add_argument(
        "--mc-samples", type=int, default=128, metavar="N", help="masks a likelihood averages (default: 128)"
    )
    parser.add_argument(
        "--post-process", choices=choices.POST, default=next(iter(choices.POST)), help="of an answer's text"
    )
    parser.add_argument(
        "--allow-code-execution", action="store_true", help="run tasks that execute what the model writes"
    )
    parser.add_argument("--output", metavar="F.json", help="write everything there, prompts and answers included")
    return parser


def _run(args: argparse.Namespace) -> int:
    import jax
    from lm_eval.utils import handle_non_serializable, make_table

    from polestar_jax import compilation_cache

    common.check_outputs(output=args.output)
    least = {"shots": 0, "limit": 1, "gen_length": 1, "block_length": 1, "mc_samples": 1, "seed": 0}
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise InputError(f"--{name.replace('_', '-')} {value} is not accepted: a whole number >= {low}")
    chosen = BENCHMARKS[args.benchmark] if args.benchmark else None
    options = _options(args, chosen)
    if chosen and chosen.runs_code and not args.allow_code_execution:
        raise InputError(f"--benchmark {args.benchmark} executes what the model writes: give --allow-code-execution")
    compilation_cache.enable(args.cache_dir)
    lm = PolestarLM(args.model, dtype=args.dtype, **options)
    gen_kwargs = {"max_gen_toks": options["gen_length"]} if options["gen_length"] else None
    results = evaluate(
        lm, [chosen.task] if chosen else args.tasks.split(","), shots=_or(args.shots, chosen and chosen.shots),
        limit=args.limit, fewshot_seed=args.fewshot_seed, gen_kwargs=gen_kwargs,
        allow_code_execution=args.allow_code_execution, samples=args.output is not None,
    )  # fmt: skip
    results["config"]["platform"] = jax.default_backend()
    if args.output:
        with common.replacing(args.output) as file:
            json.dump(results, file, indent=1, default=handle_non_serializable, ensure_ascii=False)
            file.write("\n")
    print(make_table(results))
    common.print_json(results["config"]["polestar"])
    return 0


def _options(args: argparse.Namespace, chosen: Benchmark | None) -> dict[str, Any]:
    """The model class's arguments: those given, else the benchmark's."""
    if args.method not in METHODS:
        raise InputError(f"unknown method {args.method!r}; methods: {', '.join(METHODS)}")
    texts: dict[str, str] = {}
    for text in args.settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text} is not accepted: KEY=VALUE")
        if texts.setdefault(name, value) != value:
            raise InputError(f"setting {name} is given twice: {texts[name]} and {value}")
    settings = METHODS[args.method].parsed(texts)
    for name in ("gen_length", "block_length"):
        if name in settings:
            raise InputError(f"--set {name} is not accepted here: give --{name.replace('_', '-')}")
    mode, escape = args.prompt_mode, False
    if chosen:
        from polestar_jax.loading import load_spec

        mode = mode or dict(chosen.modes)[load_spec(args.model).family]
        escape = chosen.escape_until and mode.startswith("chat")
    if mode is None:
        raise InputError(f"--prompt-mode is missing: {' | '.join(choices.PROMPT_MODES)}")
    block = _or(args.block_length, chosen and chosen.block_length)
    return settings | ({"block_length": block} if block else {}) | {
        "prompt_mode": mode, "method": args.method, "gen_length": _or(args.gen_length, chosen and chosen.gen_lengths[0]),
        "batch_size": args.batch_size, "seed": args.seed, "post": args.post_process, "escape_until": escape,
        "mc_samples": args.mc_samples,
    }  # fmt: skip


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


if __name__ == "__main__":
    process.end_with(main, "polestar_jax.eval.harness")
