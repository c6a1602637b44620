"""A checkpoint's tokenizer: prompts to ids that are safe to look up, and generated ids to the text a reader sees."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from polestar_jax.errors import InputError
from polestar_jax.spec import ModelSpec
from polestar_jax.tokenization import chat, files

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

IMAGE_PLACEHOLDER = "<image>"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A transformers tokenizer under the conventions of one model.

    Every encoding method returns ids in [0, ``spec.vocab_size``) without the mask token, never truncated (the model's
    length limit is not the tokenizer's business), and raises :class:`InputError` for text it cannot encode so. Markers
    typed inside a prompt are read as markers, as transformers does; the mask token is refused, and so is a second
    start of text inside a chat.

    Attributes:
      hf: the transformers tokenizer, for whoever needs all of it. Called directly it follows its own files, which may
        add a start token that a chat template has written already.
      spec: the model's sizes and special ids.
      bos_id: the start-of-text token, or None.
      add_bos: whether a raw prompt starts with it.
      size: one more than the highest token id that has a text; embedding rows from here on have none.
    """

    hf: PreTrainedTokenizerFast
    spec: ModelSpec
    bos_id: int | None
    add_bos: bool
    size: int

    def __len__(self) -> int:
        return self.size

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the model's chat format.

        Args:
          messages: objects with exactly ``role`` and ``content``, both text, in order.
          add_generation_prompt: open an assistant turn at the end; otherwise nothing follows the last message.
        """
        return self._chat_ids([chat.render(self.hf, messages, add_generation_prompt=add_generation_prompt)])[0]

    def encode_raw(self, text: str) -> list[int]:
        """Ids of a text as it is, with one start token where the tokenizer's settings ask for one."""
        return self._raw_ids([text])[0]

    def encode_prompt(self, text: str, raw: bool) -> list[int]:
        """Ids of one prompt: as it is (``raw``), or as the user's turn of a chat."""
        return self.encode_raw(text) if raw else self.encode_chat([{"role": "user", "content": text}])

    def encode_around_images(self, text: str, n_images: int, *, raw: bool = False) -> list[list[int]]:
        """Ids of the ``n_images + 1`` pieces of one prompt around its ``<image>`` placeholders.

        The pieces together hold at most one start token, at the head of the first, and no stand-in id for an image.

        Raises:
          InputError: the text has another number of placeholders.
        """
        whole = text if raw else chat.render(self.hf, [{"role": "user", "content": text}], add_generation_prompt=True)
        pieces = whole.split(IMAGE_PLACEHOLDER)
        if len(pieces) != n_images + 1:
            raise InputError(f"the prompt has {len(pieces) - 1} {IMAGE_PLACEHOLDER} but {n_images} images are given")
        return self._one_start(self._raw_ids(pieces)) if raw else self._chat_ids(pieces)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids (integers of any kind); without special tokens, undecided positions are left out as well."""
        ids = [int(index) for index in ids]
        self._check_range(ids)
        if skip_special:
            ids = [index for index in ids if index != self.spec.mask_id]
        return self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def text(self, ids: Iterable[int], spec: ModelSpec | None = None) -> str:
        """What a reader sees of an answer: the text before the first stop id of ``spec`` (default: the model's)."""
        stops = (spec or self.spec).stop_ids
        ids = [int(index) for index in ids]
        end = next((place for place, index in enumerate(ids) if index in stops), len(ids))
        return self.decode(ids[:end])

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """Ids of the tokens whose text holds ``text``, special tokens apart."""
        special = set(self.hf.all_special_ids)
        ids = (index for index in range(self.size) if index not in special and index != self.spec.mask_id)
        return tuple(index for index in ids if text in self.hf.decode([index], clean_up_tokenization_spaces=False))

    def _raw_ids(self, pieces: list[str]) -> list[list[int]]:
        first, *rest = (self._encode(piece) for piece in pieces)
        if self.add_bos and first[:1] != [self.bos_id]:
            first = [self.bos_id, *first]
        return [first, *rest]

    def _chat_ids(self, pieces: list[str]) -> list[list[int]]:
        return self._one_start([self._encode(piece) for piece in pieces])

    def _one_start(self, pieces: list[list[int]]) -> list[list[int]]:
        """The pieces as they are, refused where a start token stands anywhere but at their head."""
        later = pieces[0][1:] + [index for ids in pieces[1:] for index in ids]
        # A start token that also ends text (Dream's configuration has but one id for both) starts nothing.
        if self.bos_id in later and self.bos_id not in self.spec.stop_ids:
            token = self.hf.convert_ids_to_tokens(self.bos_id)
            raise InputError(
                f"the prompt contains the start-of-text token {token!r}, which may only stand at the start: remove it; "
                "text that is in the model's chat format already goes with --raw"
            )
        return pieces

    def _encode(self, text: str) -> list[int]:
        """Ids of text without added start or end tokens, checked."""
        if not isinstance(text, str):
            raise InputError(f"a prompt must be text, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the prompt is not valid Unicode: it contains the lone surrogate U+{ord(text[error.start]):04X}"
            ) from error
        ids = self.hf.encode(text, add_special_tokens=False)
        if self.spec.mask_id in ids:
            token = self.hf.convert_ids_to_tokens(self.spec.mask_id)
            raise InputError(
                f"the prompt contains the mask token {token!r} (id {self.spec.mask_id}), which stands for text "
                "still to be written: remove it"
            )
        self._check_range(ids)
        return ids

    def _check_range(self, ids: list[int]) -> None:
        # The embedding lookup clamps or wraps a wrong id without an error.
        for index in ids:
            if not 0 <= index < self.spec.vocab_size:
                token = repr(self.hf.convert_ids_to_tokens(index)) if 0 <= index < self.size else "no text"
                raise InputError(
                    f"token id {index} ({token}) is outside the model's vocabulary [0, {self.spec.vocab_size})"
                )


def load_tokenizer(directory: pathlib.Path, spec: ModelSpec) -> Tokenizer | None:
    """The tokenizer in a checkpoint directory, or None where the directory has no tokenizer files.

    Reads local files only and runs no code from them. ``model_max_length`` in ``tokenizer_config.json`` is ignored: it
    is a placeholder of 1e30 in LLaDA's. The mask id is the spec's, whatever the tokenizer calls its mask.

    Raises:
      InputError: files are missing, unreadable or contradict each other.
    """
    directory = pathlib.Path(directory)
    if not files.has_tokenizer(directory):
        return None
    settings = files.read_settings(directory)
    backend = files.read_backend(directory, settings)
    # Naming a token that has no id would make transformers append it behind the vocabulary.
    named = {role: text for role, text in settings.named.items() if backend.token_to_id(text) is not None}
    size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    bos_id = spec.bos_id if spec.bos_id is not None and spec.bos_id < size else None
    if "bos_token" in named:
        bos_id = backend.token_to_id(named["bos_token"])
    add_bos = settings.add_bos
    if add_bos is None:  # the settings do not say: what the tokenizer's own post-processing does to an empty text
        add_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    if add_bos and bos_id is None:
        raise InputError(f"{directory}: add_bos_token is set but bos_token names no token of the vocabulary")
    hf = _fast_tokenizer_class()(
        tokenizer_object=_Handover(backend),
        chat_template=chat.find_template(directory, settings.config, spec.family, backend),
        clean_up_tokenization_spaces=False,
        **named,
    )
    return Tokenizer(hf=hf, spec=spec, bos_id=bos_id, add_bos=add_bos, size=size)


class _Handover:
    """Hands a backend over as it is: transformers deep-copies what it is given, by writing and parsing all of it.

    Besides the time, the writing prints to standard output about a vocabulary with unused ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend

    def __deepcopy__(self, memo: dict) -> tokenizers.Tokenizer:
        return self._backend


def _fast_tokenizer_class() -> type[PreTrainedTokenizerFast]:
    """Imported late (it takes a second) and without the notice that no deep learning framework was found."""
    before = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        if before is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = before
    return PreTrainedTokenizerFast
