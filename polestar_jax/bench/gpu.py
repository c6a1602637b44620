"""``python -m polestar_jax.bench.gpu``: the checks and times to take on a real NVIDIA GPU, in one run of some minutes.

First every Pallas kernel against its definition at the shapes of LLaDA-8B's and Dream-7B's passes; then a small float32 decode,
whose tokens must be the same by kernels and by XLA; then decodes at the size of LLaDA-8B with random weights, by kind of pass.
What the time does not allow is left out and named. ``--rehearse`` runs all of it, tiny and interpreted, on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import dispatch, shapes
from polestar_jax import decoders
from polestar_jax.bench import gpu_report, loops
from polestar_jax.bench.kernels import Outcome, Shape, check, checks
from polestar_jax.bench.models import random_denoiser, random_prompts
from polestar_jax.bench.sizes import parse_sizes, random_spec
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.models.published import PUBLISHED
from polestar_jax.spec import ModelSpec

PARTS = ("kernels", "exact", "loops", "residency")
# Seconds that a stage is given before one of its sort has shown how long it takes.
EXPECTED = {"kernel": 10.0, "exact": 40.0, "weights": 30.0, "passes": 90.0, "single": 45.0, "whole": 90.0}
SMALL = "layers=2,d_model=64,heads=4,kv_heads=2,vocab=416"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run.

    Attributes:
      route: of the kernels, "pallas" or "interpret".
      shapes: at which kernels are checked.
      spec, dtype, prompt, gen, block: of the decodes.
      calls, repeats: how often what is timed runs in a row, and how many of those are timed.
      expected: seconds by sort of stage, see EXPECTED.
    """

    route: str
    shapes: tuple[Shape, ...]
    spec: ModelSpec
    dtype: str
    prompt: int
    gen: int
    block: int
    calls: int
    repeats: int
    expected: dict[str, float]


def real() -> Setup:
    """LLaDA-8B and Dream-7B, a prompt of 1,000 tokens in 1,024 columns."""
    found = tuple(
        Shape(
            spec=spec,
            name=name,
            rows=32 + spec.logit_shift,
            window=96,
            keys=1280,
            pad=24,
            clusters=8,
            barred=shapes.BARRED[spec.family],
            dtype="bfloat16",
        )
        for name, spec in PUBLISHED.items()
    )
    return Setup(
        route="pallas", shapes=found, spec=PUBLISHED["llada-8b"], dtype="bfloat16", prompt=1024, gen=256, block=32,
        calls=10, repeats=5, expected=EXPECTED,
    )  # fmt: skip


def rehearsal() -> Setup:
    """Tiny models; kernels in the dtype of the real ones, decodes in float32."""
    llada, dream = (random_spec(parse_sizes(f"{SMALL},family={family}")) for family in ("llada", "dream"))
    shape = Shape(
        spec=dream,
        name="tiny",
        rows=9,
        window=24,
        keys=80,
        pad=5,
        clusters=4,
        barred=(dream.mask_id,),
        dtype="bfloat16",
    )
    return Setup(
        route="interpret", shapes=(shape,), spec=llada, dtype="float32", prompt=32, gen=16, block=8, calls=2, repeats=2,
        expected=dict.fromkeys(EXPECTED, 0.0),
    )  # fmt: skip


class Session:
    """What was found so far, within a budget of seconds."""

    def __init__(self, setup: Setup, budget: float, started: float):
        self.setup, self._budget, self._started = setup, budget, started
        self._longest = dict(setup.expected)
        self.outcomes: list[Outcome] = []
        self.rows: list[loops.Row] = []
        self.bandwidth: float | None = None
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.skipped: list[str] = []
        self.begun = 0
        self._tokens: dict[tuple[str, str], np.ndarray] = {}

    @property
    def left(self) -> float:
        return self._budget - (time.perf_counter() - self._started)

    def attempt(self, name: str, sort: str, stage: Callable[[], Any]) -> Any:
        """The stage's result; None where it failed, or where one of its sort may take longer than what is left."""
        if self.left <= self._longest[sort]:
            self.skipped.append(name)
            self.say(f"skipped: {name}")
            return None
        self.say(name)
        self.begun += 1
        started = time.perf_counter()
        try:
            return stage()
        except Exception as error:  # a kernel that fails, in whatever way, must not end the others
            lines = str(error).strip().splitlines() or ["no message"]
            self.failures.append(f"{name}: {type(error).__name__}: {lines[0][:300]}")
            self.say(f"failed: {self.failures[-1]}")
            return None
        finally:
            known = self._longest[sort] if self._longest[sort] != self.setup.expected[sort] else 0.0
            self._longest[sort] = max(known, time.perf_counter() - started)

    def say(self, what: str) -> None:
        print(f"[{self.left:.0f} s left] {what}", file=sys.stderr, flush=True)

    def kernels(self) -> None:
        setup = self.setup
        for case in (case for shape in setup.shapes for case in checks(shape)):
            run = lambda case=case: check(case, setup.route, calls=setup.calls, repeats=setup.repeats)  # noqa: E731
            outcome = self.attempt(case.name, "kernel", run)
            if outcome is not None:
                self.outcomes.append(outcome)
                self.say(f"  {outcome.worst.field} {outcome.worst.value:.2g} of {outcome.worst.tolerance:.2g}")

    def exact(self) -> None:
        """In float32 both routes give the same tokens: no rounding is near a decision."""
        spec = random_spec(parse_sizes(SMALL))

        def run() -> int:
            model = random_denoiser(spec, seed=0, dtype="float32")
            prompts = random_prompts(spec, 1, 32, seed=0)
            found = []
            for kernels in (self.setup.route, "xla"):
                decoder = loops.decoder_of("polestar", {"kernels": kernels}, gen=16, block=8)
                found.append(loops.by_kind(model, decoder, prompts, kernels, calls=1, repeats=1, on_progress=self.say))
            return int((found[0].tokens != found[1].tokens).sum())

        name = "small float32 decode, tokens by kernels and by XLA"
        different = self.attempt(name, "exact", run)
        if different:
            self.failures.append(f"{name}: {different} of 16 differ")
        elif different == 0:
            self.notes.append(f"{name}: equal")

    def decodes(self, parts: Sequence[str]) -> None:
        """Decodes of the large model, the most wanted first."""
        setup = self.setup
        make = lambda: random_denoiser(setup.spec, seed=0, dtype=setup.dtype)  # noqa: E731
        model = self.attempt("random weights", "weights", make)
        if model is None:
            return
        read = lambda: loops.read_bandwidth(model, repeats=setup.repeats)  # noqa: E731
        self.bandwidth = self.attempt("reading all weights", "weights", read)
        kernels, xla = {"kernels": setup.route}, {"kernels": "xla"}
        if "loops" in parts:
            self._decode(model, "polestar", kernels)
            self._decode(model, "vanilla", kernels, sort="single")
            self._decode(model, "polestar", xla)
            self._decode(model, "vanilla", xla, sort="single")
            self._decode(model, "polestar", kernels, sort="whole")
        if "residency" in parts:
            self._residency(model)
        if "loops" in parts:
            self._decode(model, "parallel", kernels, sort="single")
            self._decode(model, "parallel", xla, sort="single")
            self._decode(model, "polestar", xla, sort="whole")
            for method in ("polestar", "vanilla", "parallel"):
                self._compare(method, f"kernels={setup.route}", "kernels=xla")

    def _residency(self, model: Denoiser) -> None:
        setting = decoders.METHODS["polestar"].settings.get("residency")
        if setting is None:
            self.notes.append("residency: polestar has no such setting")
            return
        base = {"kernels": self.setup.route}
        for place in setting.choices:
            self._decode(model, "polestar", base | {"residency": place})
        first, *others = (_how(base | {"residency": place}) for place in setting.choices)
        for other in others:
            self._compare("polestar", first, other)

    def _decode(self, model: Denoiser, method: str, settings: dict[str, Any], *, sort: str = "passes") -> None:
        setup, how = self.setup, _how(settings)

        def run() -> loops.Decoded:
            prompts = random_prompts(setup.spec, 1, setup.prompt, seed=0)
            decoder = loops.decoder_of(method, settings, gen=setup.gen, block=setup.block)
            if sort == "whole":
                return loops.whole(model, decoder, prompts, how, repeats=1)
            return loops.by_kind(
                model, decoder, prompts, how, calls=setup.calls, repeats=setup.repeats, on_progress=self.say
            )

        done = self.attempt(f"{method} {how}" + (", whole loop" if sort == "whole" else ""), sort, run)
        if done is None:
            return
        self.rows += done.rows
        self._tokens.setdefault((method, how), done.tokens)
        for row in done.rows:
            self.say(f"  {row.kind} x{row.passes}: {1e3 * row.seconds:.3f} ms")

    def _compare(self, method: str, first: str, other: str) -> None:
        if (method, first) in self._tokens and (method, other) in self._tokens:
            a, b = self._tokens[method, first], self._tokens[method, other]
            differ = int((a != b).sum())
            self.notes.append(f"{method}, {first} and {other}: {differ} of {a.size} tokens differ")


def _how(settings: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in settings.items())


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m polestar_jax.bench.gpu", description=__doc__)
    result.add_argument(
        "--budget-seconds",
        type=float,
        default=420.0,
        metavar="S",
        help="start nothing that may end later (default: 420)",
    )
    result.add_argument("--only", choices=PARTS, action="append", help="this part alone; repeatable")
    result.add_argument("--rehearse", action="store_true", help="tiny and interpreted, on a CPU")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 (no GPU, a check failed, or something could not be run) or 2 (wrong use)."""
    started = time.perf_counter()
    args = parser().parse_args(argv)
    if not args.budget_seconds >= 0:
        print(f"error: --budget-seconds {args.budget_seconds} is not accepted: a number from 0 on", file=sys.stderr)
        return 2
    platform = dispatch.current_platform()
    if platform != "cuda" and not args.rehearse:
        print(f"error: no NVIDIA GPU here (jax runs on {platform}); --rehearse runs it tiny on a CPU", file=sys.stderr)
        return 1
    session = Session(rehearsal() if args.rehearse else real(), args.budget_seconds, started)
    parts = args.only or PARTS
    if "kernels" in parts:
        session.kernels()
    if "exact" in parts:
        session.exact()
    if {"loops", "residency"} & set(parts):
        session.decodes(parts)
    print(gpu_report.text(session), flush=True)
    passed = not session.failures and all(outcome.worst.passed for outcome in session.outcomes)
    return int(not (passed and session.begun))


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
