"""What decoding takes from around it: kernels that a context or the environment names, and the memory a cache stays in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from pallas_kernels import dispatch
from polestar_jax.decode.policy import Decoder
from polestar_jax.decode.state import DecodeState
from polestar_jax.errors import InputError


@contextlib.contextmanager
def kernels_of(decoder: Decoder) -> Iterator[None]:
    """What is traced inside takes the decoder's choice of kernels."""
    try:
        with dispatch.using(decoder.kernels, strict=decoder.strict_kernels):
            yield
    except dispatch.Unsupported as error:
        raise InputError(f"kernels={decoder.kernels} cannot be had: {error}") from error


def settled(decoder: Decoder, state: DecodeState) -> tuple[Decoder, DecodeState]:
    """The decoder with the kernels that the context or the environment names where it names none, since programs are kept by
    decoder; and the state with its cache in the memory where the policy keeps it, wherever it was loaded to."""
    if decoder.kernels == dispatch.AUTO:
        try:
            decoder = dataclasses.replace(decoder, kernels=dispatch.asked() or dispatch.AUTO)
        except dispatch.UnknownBackend as error:
            raise InputError(str(error)) from error
    place = getattr(decoder.cache, "placed", None)
    return decoder, state if place is None else state.replace(cache=place(state.cache))
