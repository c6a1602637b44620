"""Decoding and scoring: every run over the same items, in batches for accuracy and one at a time for the clock."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence

import jax

from polestar_jax import generation
from polestar_jax.decode import engine
from polestar_jax.decode.policy import Decoder
from polestar_jax.errors import InputError, RunError
from polestar_jax.eval.records import Answers, Line
from polestar_jax.eval.task import Item, Task, cut
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec
from polestar_jax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is decoded, and how.

    Attributes:
      model, tokenizer: from ``load``.
      task, items: what is asked, and how it is scored.
      prompts: token ids of each item's prompt.
      runs: by key, decoders made for the model.
      batch_size: items decoded together; with 1 every answer is timed.
      timed: places of the items to decode once more, one at a time, for the clock; none where ``batch_size`` is 1.
      seed: of the sampling noise.
      post: how an answer's ids become the text that is scored, a key of ``choices.POST``.
    """

    model: Denoiser
    tokenizer: Tokenizer
    task: Task
    items: Sequence[Item]
    prompts: list[list[int]]
    runs: dict[str, Decoder]
    batch_size: int = 1
    timed: Sequence[int] = ()
    seed: int = 0
    post: str = "eos_then_stop"

    def batches(self) -> list[list[int]]:
        """The items' places, batch by batch."""
        places = list(range(len(self.items)))
        return [places[first : first + self.batch_size] for first in range(0, len(places), self.batch_size)]


def evaluate(
    work: Evaluation,
    answers: Answers,
    *,
    on_batch: Callable[[str, bool, int], None] = lambda run, timed, count: None,
    on_run: Callable[[str], None] = lambda run: None,
) -> dict[str, str]:
    """Decode what has no answer yet, writing each batch down as it ends.

    Args:
      work: what to decode.
      answers: where it goes; what is there already is not decoded again.
      on_batch: called with (run, timed, answers) after each batch.
      on_run: called with a run's key when all its answers are there, or no more will come.

    Returns:
      By key, why a run could not be finished; the others go on.
    """
    failed = {}
    for key, decoder in work.runs.items():
        todo = pending(work, answers, key)
        try:
            for timed, batch in todo:
                answers.append(list(_decoded(work, key, decoder, batch, timed=timed)))
                on_batch(key, timed, len(batch))
        except (OSError, AssertionError):
            raise
        except Exception as error:  # a model's numbers, or the device's memory: the other runs may do
            if os.environ.get("POLESTAR_DEBUG"):
                raise
            failed[key] = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        on_run(key)
        if todo and len(work.runs) > 1:
            engine.forget_programs()
    return failed


def check(work: Evaluation) -> None:
    """Refuse runs that do not suit the model, before anything is decoded.

    Raises:
      InputError: a run's cache or schedule that the model's sizes rule out; names the run.
    """
    for key, decoder in work.runs.items():
        try:
            jax.eval_shape(lambda decoder=decoder: engine.init_state(work.model, decoder, work.prompts[0]))
        except InputError as error:
            raise InputError(f"run {key}: {error}") from None


def pending(work: Evaluation, answers: Answers, key: str) -> list[tuple[bool, list[int]]]:
    """(timed, places) of the batches of a run that have no answers yet."""
    done, timed = (answers.done(key, timed=kind) for kind in (False, True))
    return [(False, batch) for batch in work.batches() if batch[0] not in done] + [
        (True, [place]) for place in work.timed if place not in timed
    ]


def _decoded(work: Evaluation, key: str, decoder: Decoder, batch: list[int], *, timed: bool) -> Iterator[Line]:
    """The lines of one batch's answers."""
    prompts = [work.prompts[place] for place in batch]
    # A short last batch is filled up, so that it runs the program of the others.
    short = 0 if timed or batch[0] == 0 else work.batch_size - len(batch)
    filled = prompts + prompts[-1:] * short
    finished = generation.run(work.model, decoder, filled, seed=work.seed, first=batch[0])
    if finished.compile_seconds and (timed or work.batch_size == 1):
        # The first run of a program is its warm-up: what counts is a second one.
        again = generation.run(work.model, decoder, filled, seed=work.seed, first=batch[0])
        finished = dataclasses.replace(again, compile_seconds=finished.compile_seconds)
    found = generation.answers(finished, prompts, work.model, decoder, work.tokenizer)
    for i, (place, answer) in enumerate(zip(batch, found, strict=True)):
        item = work.items[place]
        text = answer_text(answer.tokens, work)
        stats = answer.stats
        yield {
            "run": key,
            "id": item.id,
            "subset": item.subset,
            "timed": timed,
            "place": place,
            "batch": [batch[0], len(batch)],
            "metrics": {} if timed else scores(work.task, item, text),
            "text": text,
            "tokens": answer.tokens,
            "prompt_tokens": len(answer.prompt_ids),
            "tokens_all": len(answer.tokens),
            "tokens_non_eos": stats.tokens_non_eos,
            "tokens_pre_eos": pre_eos(answer.tokens, work.model.spec),
            **{name: getattr(stats, name) for name in _STATS},
            "compile_seconds": stats.compile_seconds if i == 0 else 0.0,
        }


_STATS = (
    "nfe", "full_forwards", "partial_forwards", "refreshes", "rows", "commits", "seconds", "near_ties", "repetition",
)  # fmt: skip


def answer_text(tokens: Sequence[int], work: Evaluation) -> str:
    """The text that is scored, from all generated ids."""
    if work.post == "eos_then_stop":
        return cut(work.tokenizer.text(tokens, work.model.spec), work.task.stop)
    text = cut(work.tokenizer.decode(tokens, skip_special=False), work.task.stop)
    return work.tokenizer.decode(work.tokenizer.hf.encode(text, add_special_tokens=False))


def pre_eos(tokens: Sequence[int], spec: ModelSpec) -> int:
    """How many tokens stand before the first end of text or turn."""
    return next((place for place, token in enumerate(tokens) if token in spec.stop_ids), len(tokens))


def scores(task: Task, item: Item, text: str) -> dict[str, float]:
    """An answer's metrics; a scorer that fails or gives no shares is a RunError that names the item."""
    try:
        found = {name: float(value) for name, value in task.score(item, text).items()}
    except Exception as error:
        raise RunError(f"scoring item {item.id} of task {task.name}: {type(error).__name__}: {error}") from error
    if not found or not all(math.isfinite(value) for value in found.values()):
        raise RunError(f"scoring item {item.id} of task {task.name} gave {found}, not numbers")
    return found
