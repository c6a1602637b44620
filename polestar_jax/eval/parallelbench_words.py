"""Words to put into one sentence: the further apart the words, the harder to find one sentence for all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polestar_jax.eval.parallelbench_draws import Draws

# Nouns of one scene each; no word is in two scenes, or is part of another as a whole word.
SCENES = (
    "bread butter cheese knife plate spoon kitchen soup",
    "boat sail harbour captain anchor wave fisherman island",
    "teacher pupil classroom chalk lesson notebook desk homework",
    "doctor nurse patient hospital bandage medicine ambulance fever",
    "farmer cow barn tractor hay fence milk field",
    "violin pianist concert stage audience song drum singer",
    "tent campfire forest backpack trail lantern mountain blanket",
    "goal referee whistle stadium team trophy coach match",
    "king castle crown dragon sword knight throne princess",
    "train station ticket conductor passenger platform suitcase railway",
    "gardener rose spade seed soil watering bee tulip",
    "painter canvas brush gallery portrait colour frame museum",
)
# Quotes, straight and curly, brackets and marks of Markdown around a sentence; what ends one.
_OPENING, _CLOSING, _ENDS = "\"'\u201c\u2018\u00ab*_`( \n", "\"'\u201d\u2019\u00bb*_`) ", ".!?\u2026"
# How many words of how many scenes.
LEVELS = {"easy": (3, 1), "medium": (4, 2), "hard": (5, 5)}


def make(level: str, draws: Draws) -> tuple[str, dict[str, Any]]:
    """A prompt and its target: the words, and under "answer" a sentence that has them all."""
    count, scenes = LEVELS[level]
    each = -(-count // scenes)
    drawn = [draws.sample(scene.split(), each) for scene in draws.sample(SCENES, scenes)]
    words = draws.shuffled([word for scene in drawn for word in scene])
    prompt = (
        f"Write one short English sentence that has all of these words in it: {', '.join(words)}. Use each word exactly as it is "
        "given, in any order. Write the sentence alone."
    )
    answer = f"The story has a {', a '.join(words[:-1])} and a {words[-1]}."
    return prompt, {"words": words, "answer": answer}


def right(target: Mapping[str, Any], text: str) -> bool:
    """Whether the text is one sentence with all of the words. What stands before a first colon may be left out."""
    return any(one_sentence(part) and has_all(target["words"], part) for part in (text, text.partition(":")[2]))


def has_all(words: Sequence[str], text: str) -> bool:
    """Whether each word stands in the text as a word of its own, in capitals or not."""
    return {word.casefold() for word in words} <= {word.casefold() for word in re.findall(r"[^\W_]+", text)}


def one_sentence(text: str) -> bool:
    """Whether the text has one end of a sentence, at its end: a full stop, exclamation or question mark, then blanks or quotes.

    A blank line ends a sentence too. Whether it is a grammatical one is not looked at.
    """
    inner = re.sub(rf"[{_CLOSING}]*$", "", text.strip()).lstrip(_OPENING)
    ends = re.findall(rf"[{_ENDS}]+(?=[{_CLOSING}]*(?:\s|$))", inner)
    return len(ends) == 1 and inner[-1] in _ENDS and not re.search(r"\n\s*\n", inner)
