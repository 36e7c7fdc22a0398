"""TextStream: what may be shown after each token, against the whole text so far and a search in it.

The tokens are byte strings (GPT-2's byte-level form), some of them half a character, some several; the oracle joins the
bytes and decodes them with Python's own UTF-8 decoder.
"""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config, write_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from slora_ref.text import TextStream
from slora_ref.tokenizer import Tokenizer

PIECES = [
    *(bytes([byte]) for byte in range(256)),
    *(piece.encode() for piece in ("ab", "bc", "abc", "cab", "é", "🙂", "aé", " a", "</s>")),
    *("é".encode()[:1].join([b"a", b""]), "🙂".encode()[:3], "🙂".encode()[2:] + b"b"),
]
IDS = {piece: token for token, piece in enumerate(PIECES)}
END = len(PIECES)  # a special token


def new_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with these pieces, and one special token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    assert set(spelling.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"".join(spelling[byte] for byte in piece): token for token, piece in enumerate(PIECES)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    assert library.token_to_id("<end>") == END
    return Tokenizer(library, {"eos_token": "<end>"})


TOKENIZER = new_tokenizer()


def stream_of(*stop: str) -> TextStream:
    return TextStream(TOKENIZER, [IDS[b"x"]], stop)


def push_all(stream: TextStream, pieces: list[bytes]) -> list[str]:
    return [stream.push(IDS[piece]) for piece in pieces]


def cut(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the earliest stop string, if there is one."""
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else None


def beginning(text: str, stops: tuple[str, ...]) -> int:
    """How much of the end of `text` may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


some_pieces = st.lists(
    st.sampled_from([b"a", b"b", b"c", *PIECES[256:], "é".encode()[1:], b"\x9f", b"\xf0"]), max_size=20
)
some_stops = st.lists(st.text("abcé", min_size=1, max_size=4) | st.sampled_from(["🙂b", "�", " a"]), max_size=3)


@given(pieces=some_pieces, stop=some_stops)
@settings(max_examples=400)
def test_shown_is_all_that_is_certain_and_no_more(pieces: list[bytes], stop: list[str]) -> None:
    """After every token: the text so far, less half characters and what may become a stop string."""
    stops, whole, shown = tuple(stop), "", ""
    stream, utf8 = stream_of(*stops), codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        shown += stream.push(IDS[piece])
        whole += utf8.decode(piece)
        before_stop = cut(whole, stops)
        assert stream.stopped == (before_stop is not None)
        if stream.stopped:
            assert shown == before_stop
            assert stream.push(IDS[b"z"]) == stream.flush() == ""
            return
        assert shown == whole[: len(whole) - beginning(whole, stops)]
    shown += stream.flush()
    whole += utf8.decode(b"", final=True)
    before_stop = cut(whole, stops)
    assert shown == (whole if before_stop is None else before_stop)
    assert stream.stopped == (before_stop is not None)


def test_a_stop_string_split_over_tokens_is_not_shown() -> None:
    stream = stream_of("cab")
    assert push_all(stream, [b"a", b"b", b"c", b"a"]) == ["a", "b", "", ""]
    assert not stream.stopped
    assert stream.push(IDS[b"b"]) == ""
    assert stream.stopped


def test_what_looked_like_a_stop_string_is_shown_when_it_is_none() -> None:
    stream = stream_of("cabc", "abb")
    assert push_all(stream, [b"c", b"a", b"b", b"z"]) == ["", "", "", "cabz"]
    assert push_all(stream, [b"ab", b"a", b"b"]) == ["", "ab", ""]
    assert stream.flush() == "ab"
    assert stream.flush() == ""


def test_the_earliest_of_overlapping_stop_strings_wins() -> None:
    stream = stream_of("bc", "cab", "abc")
    assert push_all(stream, [b"z", b"abc"]) == ["z", ""]
    assert stream.stopped
    within = stream_of("aba")
    assert push_all(within, [b"ab", b"ab", b"a"]) == ["", "", ""]  # found at 0, not at 2
    longer = stream_of("ab", "abc")
    assert push_all(longer, [b"a", b"bc"]) == ["", ""]
    assert longer.stopped


def test_text_behind_a_stop_string_within_one_token_is_dropped() -> None:
    stream = stream_of("b")
    assert push_all(stream, [b"abc", b"a"]) == ["a", ""]
    assert stream.flush() == ""


@pytest.mark.parametrize("character", ["é", "你", "🙂"])
def test_a_character_is_shown_whole_or_not_at_all(character: str) -> None:
    parts = [bytes([byte]) for byte in character.encode()]
    assert push_all(stream_of(), parts) == [""] * (len(parts) - 1) + [character]
    assert push_all(stream_of(character), [*parts, b"a"]) == [""] * (len(parts) + 1)


def test_a_character_that_never_ends_is_flushed_not_dropped() -> None:
    stream = stream_of()
    assert push_all(stream, [b"a", b"\xf0", b"\x9f"]) == ["a", "", ""]
    assert stream.flush() == "�"
    held = stream_of("abc")  # held back for a stop string, and half a character behind it
    assert push_all(held, [b"a", b"b", b"\xc3"]) == ["", "", ""]
    assert held.flush() == "ab�"


def test_a_real_replacement_character_is_text() -> None:
    parts = [bytes([byte]) for byte in "�".encode()]
    assert "".join(push_all(stream_of(), [*parts, b"a"])) == "�a"


def test_special_tokens_are_no_text() -> None:
    stream = stream_of("</s>")
    assert stream.push(END) == ""
    assert not stream.stopped
    assert stream.push(IDS[b"</s>"]) == ""
    assert stream.stopped


def test_a_character_begun_in_the_prompt_belongs_to_the_answer() -> None:
    stream = TextStream(TOKENIZER, [IDS[b"a"], IDS[b"\xc3"]], ())
    assert stream.push(IDS[b"\xa9"]) == "é"


def test_ids_without_a_text_are_passed_over(tmp_path: Path) -> None:
    """A head may have more rows than the tokenizer has tokens."""
    write_tokenizer(tmp_path, tiny_config())
    stream = TextStream(Tokenizer.from_folder(tmp_path), [33], ("B",))
    assert [stream.push(token) for token in (33, 97, 500, 34)] == ["A", "", "", ""]
    assert stream.stopped
