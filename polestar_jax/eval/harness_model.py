"""``polestar`` as a model class of lm-eval: requests in, texts and likelihoods out, and a record of how they were made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from polestar_jax.decode.prompts import check_prompt
from polestar_jax.decoders import METHODS, Decoder
from polestar_jax.errors import InputError
from polestar_jax.eval import choices, likelihood
from polestar_jax.eval.harness_requests import BLOCK, Encoding, Turns, plan, whole
from polestar_jax.eval.run import pre_eos
from polestar_jax.generation import Answer, iterate

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:
    raise InputError("lm-eval is not installed; install polestar-jax[eval]") from None

T = TypeVar("T")
COUNTS = ("all", "non_eos", "pre_eos")  # every position; neither end of text nor of turn; before the first of those
_SUMS = ("nfe", "full_forwards", "partial_forwards", "refreshes", "rows")


@register_model("polestar")
class PolestarLM(LM):
    """A model and a decoding method.

    Args:
      model: "tiny", a directory, or a (model, tokenizer) pair from ``load``.
      prompt_mode: how a task's text becomes a prompt, always to be named: chat_single_user, chat_multiturn, raw or raw_bos. With
        chat_multiturn lm-eval must be told to use chat templates (``apply_chat_template``, and ``fewshot_as_multiturn`` for
        examples as turns of their own); with the others it must not.
      method: of ``polestar methods``.
      gen_length: positions to decode; none: what a task's max_gen_toks says, else 256. A task's max_gen_toks is rounded up to
        whole blocks, lowers ``gen_length``, and no answer has more tokens. All positions are decoded whatever stop strings there
        are; those are looked for afterwards.
      batch_size: requests decoded together; it changes no token in float32.
      seed: of sampling noise and of the likelihood's masks.
      dtype: of the weights, as of ``load``; by default float32 on a CPU.
      post: how an answer's ids become text: eos_then_stop or stop_then_special.
      escape_until: leave stop strings out of account (a chat model's HumanEval answers: they would end before the "def").
      mc_samples, mc_batch_size: of :func:`polestar_jax.eval.likelihood.log_likelihood`.
      settings: of the method; how to sample is the task's to say (``gen_kwargs``).

    Raises:
      InputError: an argument that is not accepted, by name.
    """

    def __init__(
        self,
        model: str | tuple[Any, Any] = "tiny",
        *,
        prompt_mode: str | None = None,
        method: str = "polestar",
        gen_length: int | None = None,
        batch_size: int | str = 1,
        seed: int = 0,
        dtype: str | None = None,
        post: str = next(iter(choices.POST)),
        escape_until: bool = False,
        mc_samples: int = likelihood.SAMPLES,
        mc_batch_size: int = likelihood.BATCH,
        device: str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ):
        super().__init__()
        _one_of("prompt_mode", prompt_mode, choices.PROMPT_MODES)
        _one_of("method", method, METHODS)
        _one_of("post", post, choices.POST)
        if device is not None or max_batch_size is not None:
            raise InputError(
                "device and max_batch_size are not accepted: JAX_PLATFORMS chooses the device, batch_size is fixed"
            )
        taken = [name for name in ("temperature", "top_p", "top_k") if name in settings]
        if taken:
            raise InputError(
                f"{taken[0]} is not accepted: the task says how to sample (gen_kwargs do_sample=True,temperature=T)"
            )
        self.method, self.gen_length, self.seed = METHODS[method], gen_length, seed
        self.escape_until = bool(escape_until)
        self.batch_size = whole("batch_size", batch_size)
        self.mc_samples, self.mc_batch_size = whole("mc_samples", mc_samples), whole("mc_batch_size", mc_batch_size)
        self._settings = settings
        probe = gen_length if gen_length is not None else settings.get("block_length") or BLOCK
        self.method.build(**settings | {"gen_length": probe})  # refused before a model is read
        self.model_name = model if isinstance(model, str) else "loaded"
        self.model, tokenizer = _loaded(model, dtype)
        if tokenizer is None:
            raise InputError(f"model {self.model_name}: its directory has no tokenizer files, and prompts are texts")
        self.encoding = Encoding(tokenizer, self.model.spec, prompt_mode, post)
        self._decoders: dict[tuple, Decoder] = {}
        self._sums = dict.fromkeys(
            (*_SUMS, *COUNTS, "answers", "likelihoods", "seconds", "compile_seconds", "repetition"), 0
        )

    # --- what lm-eval calls

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, in the requests' order: the text before the first end of text and the first stop string."""
        block = self._settings.get("block_length")
        plans = [plan(request.args[1], gen_length=self.gen_length, block_length=block) for request in requests]
        groups: dict[tuple, list[int]] = {}
        for place, one in enumerate(plans):
            groups.setdefault(one.settings, []).append(place)
        ids: dict[int, list[int]] = {}
        for settings, places in groups.items():  # all prompts are looked at before any is decoded
            contexts = [requests[place].args[0] for place in places]
            ids |= zip(places, self.encoding.prompts(contexts, self._decoder(settings).gen_length), strict=True)
        texts: dict[int, str] = {}
        for settings, places in groups.items():
            places = sorted(places, key=lambda place: -len(ids[place]))  # alike in length: little padding in a batch
            answers = self._answers([ids[place] for place in places], self._decoder(settings), disable_tqdm)
            for place, tokens in zip(places, answers, strict=True):
                stop = () if self.escape_until else plans[place].stop
                texts[place] = self.encoding.text(tokens[: plans[place].limit], stop)
                self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
        return [texts[place] for place in range(len(requests))]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(Monte-Carlo log-likelihood in nats, whether one-by-one decoding gives the continuation), in the requests' order."""
        pairs = [self.encoding.pair(*request.args) for request in requests]
        for prompt, answer in pairs:
            check_prompt(prompt, self.model.spec, len(answer))
        found = []
        for request, (prompt, answer) in zip(requests, _shown(pairs, disable_tqdm, "likelihoods"), strict=True):
            value = likelihood.log_likelihood(
                self.model, prompt, answer, n_samples=self.mc_samples, seed=self.seed, batch_size=self.mc_batch_size
            )
            found.append((value, likelihood.is_greedy(self.model, prompt, answer)))
            self._sums["likelihoods"] += 1
            self.cache_hook.add_partial("loglikelihood", request.args, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Refused: there is no such number."""
        raise InputError(
            "loglikelihood_rolling is not supported: a masked diffusion model has no likelihood of running text, token after "
            "token; choose tasks of type generate_until, multiple_choice or loglikelihood"
        )

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> Turns:
        """The messages as they are; their template is applied where they are tokenised."""
        mode = self.encoding.prompt_mode
        if mode != "chat_multiturn":
            raise InputError(f"apply_chat_template is not accepted with prompt_mode {mode}, only with chat_multiturn")
        return Turns(json.dumps(list(chat_history), ensure_ascii=False))

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The tokenizer's template, for lm-eval's record."""
        return self.encoding.tokenizer.hf.chat_template or ""

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval files cached requests under."""
        return f"polestar-{self.model_name.replace('/', '-')}-{self.encoding.prompt_mode}"

    def get_model_info(self) -> dict[str, Any]:
        """How the numbers were made, for lm-eval's record of the run."""
        return {"polestar": self.record()}

    def record(self) -> dict[str, Any]:
        """Model, prompts, method with every setting of each length decoded, machine, and what the answers cost.

        TPF and TPS are sums over answers, divided, in the three forms of COUNTS. Compiling is left out of the seconds, but the
        first run of each program is in them, and a batch's answers share them: for the clock, ``polestar eval`` and ``bench``.
        """
        import jax

        from polestar_jax.cli.common import versions
        from polestar_jax.eval.about import weights_digest

        sums, dtype = self._sums, str(self.model.dtype)
        per = lambda whole: {form: sums[form] / whole if whole else None for form in COUNTS}  # noqa: E731
        return {
            "model": self.model_name,
            "family": self.model.spec.family,
            "weights": weights_digest(self.model),
            "prompt_mode": self.encoding.prompt_mode,
            "post_processing": self.encoding.post,
            "escape_until": self.escape_until,
            "method": self.method.name,
            "decoders": [decoder.settings() for decoder in self._decoders.values()],
            "deviations": list(self.method.deviations),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "mc_samples": self.mc_samples,
            "mc_batch_size": self.mc_batch_size,
            "dtype": dtype,
            "matmul_precision": "highest" if dtype == "float32" else "default",
            "device": jax.devices()[0].device_kind,
            "versions": versions(),
            "cost": {name: value for name, value in sums.items() if name not in (*COUNTS, "repetition")},
            "repetition": sums["repetition"] / sums["answers"] if sums["answers"] else None,
            "tokens": {form: sums[form] for form in COUNTS},
            "tpf": per(sums["nfe"]),
            "tps": per(sums["seconds"]),
        }

    def _decoder(self, settings: tuple[tuple[str, Any], ...]) -> Decoder:
        if settings not in self._decoders:
            decoder = self.method.build(**self._settings | dict(settings))
            self._decoders[settings] = decoder.for_model(self.model.spec, self.encoding.tokenizer)
        return self._decoders[settings]

    def _answers(self, prompts: list[list[int]], decoder: Decoder, quiet: bool) -> Iterator[list[int]]:
        """All ids of each answer; what they cost is added up."""
        answers = iterate(
            self.model, self.encoding.tokenizer, prompts, decoder, batch_size=self.batch_size, seed=self.seed
        )
        for place, answer in enumerate(_shown(answers, quiet, "answers", len(prompts))):
            self._count(answer, first=place % self.batch_size == 0)
            yield answer.tokens

    def _count(self, answer: Answer, *, first: bool) -> None:
        sums, stats = self._sums, answer.stats
        for name in (*_SUMS, "repetition"):
            sums[name] += getattr(stats, name)
        sums["answers"] += 1
        sums["all"] += len(answer.tokens)
        sums["non_eos"] += stats.tokens_non_eos
        sums["pre_eos"] += pre_eos(answer.tokens, self.model.spec)
        if first:  # a batch's answers all carry the time of the whole batch
            sums["seconds"] += stats.seconds
            sums["compile_seconds"] += stats.compile_seconds


def _loaded(model: str | tuple[Any, Any], dtype: str | None) -> tuple[Any, Any]:
    if not isinstance(model, str):
        return model
    import jax

    from polestar_jax.loading import load

    return load(model, dtype=dtype or ("float32" if jax.default_backend() == "cpu" else None))


def _one_of(name: str, value: Any, accepted: Mapping[str, Any]) -> None:
    if value not in accepted:
        given = "is missing" if value is None else f"{value!r} is not accepted"
        raise InputError(f"{name} {given}: {' | '.join(accepted)}")


def _shown(values: Iterable[T], quiet: bool, what: str, total: int | None = None) -> Iterable[T]:
    """The values, with a bar of progress on standard error."""
    from tqdm import tqdm

    return tqdm(values, desc=what, total=total, disable=quiet)
