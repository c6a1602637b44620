"""Chat messages to prompt text: the model's own template, or the family's where a directory has none."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polestar_jax.errors import InputError
from polestar_jax.spec import Family
from polestar_jax.tokenization.files import read_json

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

# Newlines stand in expressions because Jinja drops a bare one after a block tag and at the end of a template.
_LLADA = (
    "{% for message in messages %}"
    "{% if loop.first %}<|startoftext|>{% endif %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>{{ '\n\n' }}{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)
_DREAM = (
    "{% if messages[0]['role'] != 'system' %}"
    "<|im_start|>system{{ '\n' }}You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>{{ '\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}{{ '\n' }}{{ message['content'] }}<|im_end|>{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
_DEFAULTS: dict[Family, tuple[str, tuple[str, ...]]] = {
    "llada": (_LLADA, ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "dream": (_DREAM, ("<|im_start|>", "<|im_end|>")),
}
_PROBE = "\ue000content\ue000"  # private use characters: no template writes them


def find_template(
    directory: pathlib.Path, config: Mapping[str, Any], family: Family, backend: tokenizers.Tokenizer
) -> str | None:
    """The directory's chat template, else the family's where the vocabulary has its markers, else None."""
    path = directory / "chat_template.jinja"
    try:
        own = path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the chat template is not UTF-8 text: {error}") from error
    own = own or config.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(own, list):  # several templates, each an object with a name
        own = next((e.get("template") for e in own if isinstance(e, dict) and e.get("name") == "default"), own)
    if own is not None and not isinstance(own, str):
        raise InputError(f"{directory}: the chat template must be text, or a list with one named 'default'")
    if own is not None:
        return own
    template, markers = _DEFAULTS[family]
    return template if all(backend.token_to_id(marker) is not None for marker in markers) else None


def render(hf: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
    """The prompt text of a conversation.

    LLaDA's template opens an assistant turn whether asked to or not; without ``add_generation_prompt`` that trailing
    header is taken off again, so that the text ends where the last message ends.

    Raises:
      InputError: malformed messages, no template, or a template that refuses or drops a message.
    """
    _check_messages(messages)
    if hf.chat_template is None:
        raise InputError(
            "the tokenizer has no chat template: use --raw (in Python: raw=True) to give the prompt as it is"
        )
    text = _apply(hf, messages, add_generation_prompt)
    for message in messages:
        # An answer in the history may be rewritten by a template; a question or instruction must not get lost.
        if message["role"] != "assistant" and message["content"].strip() not in text:
            raise InputError(f"the model's chat template does not write messages with role {message['role']!r}")
    return text if add_generation_prompt else text.removesuffix(_assistant_header(hf))


def _assistant_header(hf: PreTrainedTokenizerFast) -> str:
    """What the template writes between the start of text and the content of a first assistant turn."""
    try:
        text = _apply(hf, [{"role": "assistant", "content": _PROBE}], False)
    except InputError:  # a template strict about roles
        return ""
    before, found, _ = text.partition(_PROBE)
    return before.removeprefix(hf.bos_token or "") if found else ""


def _apply(hf: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    import jinja2

    conversation = [dict(message) for message in messages]
    try:
        return hf.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
        raise InputError(f"the model's chat template refuses these messages: {_line(error)}") from error
    except Exception as error:  # a template computes with whatever it likes: it may fail in any way
        raise InputError(f"the model's chat template fails: {type(error).__name__}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InputError("messages: expected a list of at least one {'role': ..., 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{index}]: expected an object with role and content, got {message!r}")
        unknown = sorted(map(str, set(message) - {"role", "content"}))
        if unknown:
            raise InputError(f"messages[{index}]: unknown key {unknown[0]!r}; a message has role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                given = type(message[key]).__name__ if key in message else "nothing"
                raise InputError(f"messages[{index}]: {key} must be a string, got {given}")
        if not message["role"].strip():
            raise InputError(f"messages[{index}]: role is empty; use 'system', 'user' or 'assistant'")
