"""Accuracy and cost of a method on the embedded model's evaluation set, task by task.

``python -m polestar_jax.tiny.evaluate --method parallel --set threshold=0.9 --gen-length 64 --block-length 16``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from polestar_jax.decode.policy import Decoder
from polestar_jax.generation import Stats, iterate
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.tiny.tasks import TASKS, Example, load_evaluation_set, score
from polestar_jax.tokenization import Tokenizer


def evaluate(
    model: Denoiser,
    tokenizer: Tokenizer,
    decoder: Decoder,
    examples: Sequence[Example],
    *,
    batch_size: int = 50,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, float]]:
    """Per task, and under "all": items, accuracy in percent, TPF (sum of tokens / sum of passes), mean NFE and refreshes."""
    prompts = [example.prompt for example in examples]
    found: dict[str, list[tuple[bool, Stats]]] = {task: [] for task in TASKS}
    answers = iterate(model, tokenizer, prompts, decoder, batch_size=batch_size, on_batch=on_batch)
    for example, answer in zip(examples, answers, strict=True):
        found[example.task].append((score(example, answer.text), answer.stats))
    found["all"] = [item for items in found.values() for item in items]
    return {
        task: {
            "items": len(items),
            "accuracy": 100 * sum(right for right, _ in items) / len(items),
            "tpf": sum(stats.tokens_non_eos for _, stats in items) / sum(stats.nfe for _, stats in items),
            "nfe": sum(stats.nfe for _, stats in items) / len(items),
            "refreshes": sum(stats.refreshes for _, stats in items) / len(items),
        }
        for task, items in found.items()
        if items
    }


def main(argv: Sequence[str] | None = None) -> int:
    from polestar_jax.cli import common

    parser = argparse.ArgumentParser(
        prog="python -m polestar_jax.tiny.evaluate", description=__doc__.partition("\n")[0]
    )
    common.add_model_arguments(parser)
    common.add_method_arguments(parser)
    parser.add_argument(
        "--per-task", type=int, default=100, metavar="N", help="items of each task (default and most: 100)"
    )
    parser.add_argument("--batch-size", type=int, default=50, metavar="N")
    parser.add_argument("--json", action="store_true", help="one JSON object a task")
    args = parser.parse_args(argv)
    decoder = common.build_decoder(args)
    model, tokenizer = common.load_model(args)
    shipped = load_evaluation_set()
    examples = [e for task in TASKS for e in [x for x in shipped if x.task == task][: args.per_task]]
    progress = lambda done, total: print(f"{done}/{total}", file=sys.stderr, flush=True)  # noqa: E731
    results = evaluate(model, tokenizer, decoder, examples, batch_size=args.batch_size, on_batch=progress)
    for task, row in results.items():
        if args.json:
            common.print_json({"task": task, **row, "method": decoder.name, "settings": decoder.settings()})
        else:
            cost = f"TPF {row['tpf']:.2f}  NFE {row['nfe']:.1f}  refreshes {row['refreshes']:.1f}"
            print(f"{task:15} {row['accuracy']:5.1f} %  {cost}  ({row['items']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
