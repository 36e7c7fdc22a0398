"""Where the toy model's words come from, and which of them it may be trained on.

A word is 3 to 10 small letters that look a little like a word: about one vowel in three, at least one vowel and two
consonants (a word without vowels would make "drop the vowels" the same as copying). A word's own checksum says
whether it is for training, for validation (deciding what to train again) or for the test, so no list has to be kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, Literal
from zlib import crc32

VOWELS: Final = "aeiou"
CONSONANTS: Final = "bcdfghjklmnpqrstvwxyz"
ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz"
LENGTHS: Final = range(3, 11)
VOWEL_SHARE: Final = 0.35

Split = Literal["train", "validation", "test"]


def split_of(word: str) -> Split:
    """The part that `word` belongs to for ever: 18 words of 20 are for training, one each for validation and test."""
    return {0: "validation", 10: "test"}.get(crc32(word.encode()) % 20, "train")  # type: ignore[return-value]


def stream(seed: int, split: Split) -> Iterator[str]:
    """An endless stream of words of one part; words may come again. The same seed gives the same words everywhere."""
    rng = random.Random(seed)
    while True:
        word = _draw(rng)
        if split_of(word) == split and _acceptable(word):
            yield word


def distinct_words(seed: int, count: int, split: Split) -> list[str]:
    """The first `count` different words of the stream."""
    found: dict[str, None] = {}
    words = stream(seed, split)
    while len(found) < count:
        found[next(words)] = None
    return list(found)


def held_out_words(seed: int, count: int) -> list[str]:
    """`count` different words that neither the base nor any adapter was trained on or chosen by."""
    return distinct_words(seed, count, "test")


def _draw(rng: random.Random) -> str:
    """Only `random()` is used: its stream is the one that Python promises never to change."""
    letters = []
    for _ in range(LENGTHS[int(rng.random() * len(LENGTHS))]):
        kind = VOWELS if rng.random() < VOWEL_SHARE else CONSONANTS
        letters.append(kind[int(rng.random() * len(kind))])
    return "".join(letters)


def _acceptable(word: str) -> bool:
    vowels = sum(letter in VOWELS for letter in word)
    return vowels >= 1 and len(word) - vowels >= 2
