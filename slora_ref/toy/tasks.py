"""The toy tasks: each a pure rule from a word to its answer, and the rank of the adapter that learned it.

A request to the toy model is `word=`; the right answer is `TASKS[name].function(word)` and then the end token.
Because every rule is exact, an answer can be checked without a model, and because no two rules often agree, an answer
made with another request's adapter is seen to be wrong by reading it. The base model alone only copies the word.

Rules that would break this are not here: sorting letters (hard for two layers), first letter beside
last letter (they agree on 4 words in 100), capital vowels beside capital first letter (6 in 100), swapping case (the
same as upper case).

Knows nothing about models: no torch, no NumPy. Words come from words.py, training is in train.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from slora_ref.toy.words import ALPHABET, VOWELS


@dataclass(frozen=True)
class Task:
    """One rule; `rank` is the LoRA rank of its adapter.

    `name` is also the adapter's folder and its name in PEFT, which keeps adapters as attributes of modules: a name with
    a dash can never be an attribute that is there already.
    """

    name: str
    rank: int
    function: Callable[[str], str]
    description: str


def prompt(word: str) -> str:
    """What the model is given for `word`, whatever the task: the adapter alone says which task it is."""
    return f"{word}="


def copy(word: str) -> str:
    """The base model's own task: the word itself."""
    return word


def caesar(word: str, shift: int) -> str:
    """Every letter moved `shift` places along the alphabet, round the end."""
    return "".join(ALPHABET[(ALPHABET.index(letter) + shift) % len(ALPHABET)] for letter in word)


def atbash_cipher(word: str) -> str:
    """a and z trade places, b and y, ..."""
    return word.translate(str.maketrans(ALPHABET, ALPHABET[::-1]))


def next_vowel(word: str) -> str:
    """a -> e -> i -> o -> u -> a; consonants stay."""
    return word.translate(str.maketrans(VOWELS, VOWELS[1:] + VOWELS[:1]))


def number_vowels(word: str) -> str:
    """a -> 1, e -> 2, i -> 3, o -> 4, u -> 5; consonants stay."""
    return word.translate(str.maketrans(VOWELS, "12345"))


def mask_vowels(word: str) -> str:
    """Every vowel becomes a star."""
    return word.translate(str.maketrans(VOWELS, "*" * len(VOWELS)))


def drop_vowels(word: str) -> str:
    """Only the consonants."""
    return "".join(letter for letter in word if letter not in VOWELS)


def drop_vowels_upper(word: str) -> str:
    """Only the consonants, in capitals."""
    return drop_vowels(word).upper()


def count_vowels(word: str) -> str:
    """How many vowels there are, as a number."""
    return str(sum(letter in VOWELS for letter in word))


def capital_last(word: str) -> str:
    """A capital last letter."""
    return word[:-1] + word[-1].upper()


def upper_consonants(word: str) -> str:
    """Consonants in capitals."""
    return "".join(letter if letter in VOWELS else letter.upper() for letter in word)


def letter_kinds(word: str) -> str:
    """V for every vowel, C for every consonant."""
    return "".join("V" if letter in VOWELS else "C" for letter in word)


def alternate_case(word: str) -> str:
    """Capital, small, capital, small, ..."""
    return "".join(letter.upper() if place % 2 == 0 else letter for place, letter in enumerate(word))


def first_letter(word: str) -> str:
    """The first letter alone."""
    return word[0]


def word_length(word: str) -> str:
    """How many letters there are, as a number."""
    return str(len(word))


def reverse_word(word: str) -> str:
    """The word backwards."""
    return word[::-1]


def reverse_upper(word: str) -> str:
    """The word backwards, in capitals."""
    return word[::-1].upper()


def mirror_word(word: str) -> str:
    """The word, then the word backwards."""
    return word + word[::-1]


def repeat_word(word: str) -> str:
    """The word twice."""
    return word + word


def double_letters(word: str) -> str:
    """Every letter twice."""
    return "".join(letter * 2 for letter in word)


def double_first(word: str) -> str:
    """The first letter twice, then the rest."""
    return word[0] + word


def rotate_left(word: str) -> str:
    """The first letter moves to the end."""
    return word[1:] + word[0]


def rotate_right(word: str) -> str:
    """The last letter moves to the front."""
    return word[-1] + word[:-1]


def swap_pairs(word: str) -> str:
    """Letters 1 and 2 trade places, 3 and 4, ...; an odd last letter stays."""
    return "".join(word[place : place + 2][::-1] for place in range(0, len(word), 2))


def join_dashes(word: str) -> str:
    """A dash between neighbouring letters."""
    return "-".join(word)


def quote_word(word: str) -> str:
    """The word in double quotes."""
    return f'"{word}"'


def plural_word(word: str) -> str:
    """`es` after s, x or z, else `s`."""
    return word + ("es" if word[-1] in "sxz" else "s")


def pig_latin(word: str) -> str:
    """`way` after a word that starts with a vowel; else its first consonants move to the end, then `ay`."""
    start = next(place for place, letter in enumerate(word) if letter in VOWELS)
    return word[start:] + word[:start] + "ay" if start else word + "way"


def _task(rank: int, function: Callable[[str], str]) -> Task:
    description = (function.__doc__ or "").strip()
    return Task(function.__name__.replace("_", "-"), rank, function, description)


def _caesar_task(rank: int, shift: int) -> Task:
    description = f"Every letter moved {shift} along the alphabet."
    return Task(f"caesar-{shift}", rank, partial(caesar, shift=shift), description)


BASE_TASK: Final = Task("copy", 0, copy, "The word itself: what the base model does without an adapter.")

_ALL: Final = (
    _caesar_task(4, 1),
    _caesar_task(4, 3),
    Task("upper-case", 2, str.upper, "The word in capitals."),
    Task("capital-first", 2, str.capitalize, "A capital first letter."),
    _task(2, first_letter),
    _task(2, word_length),
    _task(2, mask_vowels),
    _task(4, atbash_cipher),
    _caesar_task(4, 2),
    _caesar_task(4, 7),
    _task(4, alternate_case),
    _task(4, next_vowel),
    _task(2, number_vowels),
    _task(4, letter_kinds),
    _task(2, quote_word),
    _task(2, plural_word),
    _caesar_task(8, 13),
    _task(8, drop_vowels),
    _task(8, count_vowels),
    _task(8, capital_last),
    _task(8, upper_consonants),
    _task(8, reverse_word),
    _task(8, double_letters),
    _task(8, repeat_word),
    _task(8, join_dashes),
    _caesar_task(16, 5),
    _task(16, drop_vowels_upper),
    _task(16, reverse_upper),
    _task(16, double_first),
    _task(16, mirror_word),
    _task(16, rotate_left),
    _task(16, rotate_right),
    _task(16, swap_pairs),
    _task(16, pig_latin),
)
TASKS: Final = {task.name: task for task in _ALL}
