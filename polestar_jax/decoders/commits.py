"""The commit rules by name, with their settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from polestar_jax import commit
from polestar_jax.commit.certainty import NARROWEST, WIDEST
from polestar_jax.commit.dawn import ADJACENCIES
from polestar_jax.decoders.part import Frame, Part, own
from polestar_jax.errors import InputError
from polestar_jax.polestar.commit import PolestarCommit
from polestar_jax.polestar.presets import SETTINGS
from polestar_jax.settings import Setting

QUOTA = {
    "steps": Setting(type=int, default=None, low=1, help="forward passes in all, the same for every block; none: gen_length"),
    "order": Setting(
        type=str, default="low_confidence", choices=(*commit.ORDERS, "origin"),
        help="what positions are ranked by; low_confidence (LLaDA) and maskgit_plus (Dream) rank alike",
    ),
    "quota": Setting(
        type=str, default="uniform", choices=("uniform", "dream_floor"),
        help="commits a pass: masks / steps with the remainder first, or Dream's floored share of what is left",
    ),
    "eps": Setting(type=float, default=1e-3, above=0, high=0.5, help="last time of dream_floor and origin"),
    "order_temperature": Setting(type=float, default=0.0, low=0, least=1e-3, high=1e3, help="draws positions (Dream's alg_temp)"),
}  # fmt: skip
THRESHOLD = {
    "threshold": Setting(type=float, default=0.9, help="commit every position with at least this confidence, else the best one"),
    "steps": Setting(
        type=int, default=None, low=1,
        help="caps commits: a pass may commit masks / steps plus what earlier passes left unused; none: no cap. "
        "Passes go on until all is decided, so under a threshold steps is no number of passes",
    ),
}  # fmt: skip
FACTOR = {
    "factor": Setting(type=float, default=1.0, low=0, help="commit the n best while (n + 1)(1 - the n-th confidence) <= factor"),
}  # fmt: skip
FAST_DLLM = {
    "threshold": Setting(
        type=float, default=0.9, none="a fixed number a pass, by steps",
        help="commit every position with at least this confidence, else the best one",
    ),
    "factor": Setting(type=float, default=None, low=0, help="the factor rule instead of the threshold; none: the threshold"),
    "steps": Setting(type=int, default=None, low=1, help="passes in all where threshold and factor are none; none: gen_length"),
}  # fmt: skip
ADAPTIVE = {
    "threshold": Setting(type=float, default=0.9, help="the confidence that each position is committed from, at first"),
    "alpha": Setting(
        type=float, default=0.001, low=0, help="how much (1 - the second largest probability) lowers it, every pass"
    ),
    "beta": Setting(type=float, default=0.0008, low=0, help="how much a turn of the probabilities (1 - cosine) raises it"),
}  # fmt: skip
KLASS = {
    "threshold": Setting(
        type=float, default=None, none="LLaDA 0.6, Dream 0.9", help="commit what is stable and above this confidence"
    ),
    "kl_threshold": Setting(
        type=float, default=None, low=0, none="LLaDA 0.01, Dream 0.005", help="stable: distributions that moved by less, nats"
    ),
    "kl_history": Setting(type=int, default=2, low=1, high=1000, help="in each of so many passes"),
    "inclusive": Setting(
        type=bool, default=None, none="LLaDA false, Dream true", help="whether exactly the threshold is enough"
    ),
    "step_gate": Setting(
        type=bool, default=None, none="LLaDA true, Dream false", help="a block's first kl_history - 1 passes commit one token"
    ),
}  # fmt: skip
DAWN = {
    "low_threshold": Setting(
        type=float, default=None, none="LLaDA 0.75, Dream 0.8", help="commit what is independent from this confidence on"
    ),
    "sink_threshold": Setting(
        type=float, default=None, low=0, none="LLaDA 0.01, Dream 0.03", help="nobody depends on what gets more attention"
    ),
    "edge_threshold": Setting(
        type=float, default=None, above=0, none="LLaDA 0.07, Dream 0.1", help="attention from which on one depends on the other"
    ),
    "induced_threshold": Setting(
        type=float, default=None, none="LLaDA 0.7, Dream 0.75", help="commit what depends on a sure token from this confidence on"
    ),
    "adjacency": Setting(
        type=str, default=ADJACENCIES[0], choices=ADJACENCIES,
        help="an independent one may not depend on one that is sure and induced, or either",
    ),
}  # fmt: skip
CERTAINTY = {
    "threshold": Setting(
        type=float, default=None, none="a fixed number a pass, by steps",
        help="commit every position whose confidence times density is at least this, else the best one",
    ),
    "steps": Setting(type=int, default=None, low=1, help="passes in all where threshold is none; none: gen_length"),
    "certainty_sigma": Setting(
        type=float, default=10.0, low=NARROWEST, high=WIDEST, help="of the density of decided positions: the Gaussian's width"
    ),
}  # fmt: skip
HIERARCHY = {
    "threshold": Setting(type=float, default=0.9, help="commit every position above this confidence"),
    "low_threshold": Setting(type=float, default=0.4, help="and the best of each run of undecided ones above this"),
}  # fmt: skip
PROPHET = QUOTA | {
    "gap_early": Setting(
        type=float, default=7.5, help="commit all where the two best logits differ by this, up to 33 % of the steps"
    ),
    "gap_middle": Setting(type=float, default=5.0, help="the same from 33 % on"),
    "gap_late": Setting(type=float, default=2.5, help="the same from 67 % on"),
    "answer_start": Setting(
        type=int, default=None, low=0, help="first position of the answer, whose gap counts; none: all that is undecided"
    ),
    "answer_length": Setting(type=int, default=5, low=1, help="positions of the answer"),
}  # fmt: skip


def steps_a_block(steps: int | None, frame: Frame) -> int:
    """Passes that a block takes, of ``steps`` in all."""
    blocks = frame.gen_length // frame.block_length
    steps = frame.gen_length if steps is None else steps
    if steps % blocks or steps > frame.gen_length:
        raise InputError(
            f"setting steps={steps} is not accepted: a multiple of the {blocks} blocks "
            f"(gen_length {frame.gen_length} / block_length {frame.block_length}) up to gen_length"
        )
    return steps // blocks


def _quota(values: dict[str, Any], frame: Frame) -> commit.Rule:
    each = steps_a_block(values["steps"], frame)
    if values["order"] == "origin":
        return commit.Origin(steps_per_block=each, eps=values["eps"])
    return own(commit.Quota, values, steps_per_block=each)


def _threshold(values: dict[str, Any], frame: Frame) -> commit.Rule:
    if values["steps"] is None:
        return commit.threshold(values["threshold"])
    return own(commit.Allowance, values)


def _fast_dllm(values: dict[str, Any], frame: Frame) -> commit.Rule:
    if values["steps"] is not None and (values["factor"], values["threshold"]) != (None, None):
        raise InputError(f"setting steps={values['steps']} goes with threshold=none and factor=none alone")
    if values["factor"] is not None:
        return commit.Factor(values["factor"])
    if values["threshold"] is not None:
        return commit.threshold(values["threshold"])
    return commit.Quota(steps_per_block=steps_a_block(values["steps"], frame))


def _certainty(values: dict[str, Any], frame: Frame) -> commit.Certainty:
    if values["threshold"] is None:
        rule = commit.Quota(steps_per_block=steps_a_block(values["steps"], frame))
    elif values["steps"] is None:
        rule = commit.threshold(values["threshold"])
    else:
        raise InputError(f"setting steps={values['steps']} goes with threshold=none alone")
    return commit.Certainty(rule, certainty_sigma=values["certainty_sigma"])


def _prophet(values: dict[str, Any], frame: Frame) -> commit.Prophet:
    steps = frame.gen_length if values["steps"] is None else values["steps"]
    return own(commit.Prophet, values, rule=_quota(values, frame), steps=steps, gen_length=frame.gen_length)


COMMITS = {
    "quota": Part(build=_quota, summary="a fixed number a pass, the best by an order", settings=QUOTA),
    "threshold": Part(build=_threshold, summary="every position above a confidence, else the best", settings=THRESHOLD),
    "fast_dllm": Part(
        build=_fast_dllm, summary="Fast-dLLM's: by threshold, by factor, or a fixed number", settings=FAST_DLLM
    ),
    "factor": Part(
        build=lambda values, frame: commit.Factor(values["factor"]),
        summary="as many of the most confident as a factor allows",
        settings=FACTOR,
    ),
    "klass": Part(
        build=lambda values, frame: own(commit.Klass, values),
        summary="every position that is confident and whose distribution is stable, else the best",
        settings=KLASS,
    ),
    "dawn": Part(
        build=lambda values, frame: own(commit.Dawn, values, block_length=frame.capacity),
        summary="sure positions, those that depend on sure ones, and others that do not depend on each other",
        settings=DAWN,
    ),
    "certainty": Part(
        build=_certainty,
        summary="by confidence times the density of decided positions around, by threshold or a fixed number",
        settings=CERTAINTY,
    ),
    "hierarchy": Part(
        build=lambda values, frame: own(commit.Hierarchy, values),
        summary="every position above a confidence and the best of each run of undecided ones",
        settings=HIERARCHY,
    ),
    "prophet": Part(
        build=_prophet,
        summary="a fixed number a pass until the answer is clear, then all that is left",
        settings=PROPHET,
    ),
    "adaptive": Part(
        build=lambda values, frame: own(commit.Adaptive, values),
        summary="every position above a confidence of its own, which its predictions move, else the best",
        settings=ADAPTIVE,
    ),
    "polestar": Part(
        build=lambda values, frame: own(PolestarCommit, values),
        summary="by confidence, by a jump of drift, and early ones behind the block",
        settings={
            name: setting
            for name, setting in SETTINGS.items()
            if name in {field.name for field in dataclasses.fields(PolestarCommit)}
        },
    ),
}
