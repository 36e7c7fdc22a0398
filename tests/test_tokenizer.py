"""Tokenizer and streams: characters are never cut, begin tokens never doubled. Faults of area T."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config, write_model_folder
from tokenizers import decoders, models, pre_tokenizers, processors

from slora_ref.errors import TokenizerError
from slora_ref.tokenizer import IncrementalDecoder, Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WORDS = ["▁", "▁▁", "▁Hello", "▁you", "x", ".", "\ufffd", "é"]


def sentence_piece(bos: bool = True, words: Sequence[str] = WORDS) -> tokenizers.Tokenizer:
    """Llama 2's kind: byte tokens <0xE4> for what has no token, ▁ for spaces, the first space stripped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    return with_special(library, bos)


def byte_level(bos: bool = True) -> tokenizers.Tokenizer:
    """Llama 3's and GPT-2's kind: every byte has a character, tokens are strings of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, "ä½", "ł¥", "Ġhello", "Ġðł"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return with_special(library, bos)


def with_special(library: tokenizers.Tokenizer, bos: bool) -> tokenizers.Tokenizer:
    """Begin and end tokens, the begin token added to every text if wanted."""
    library.add_special_tokens(["<s>", "</s>"])
    if bos:
        special = [("<s>", library.token_to_id("<s>"))]
        library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", special_tokens=special)
    return library


def ids_of(library: tokenizers.Tokenizer, data: bytes) -> list[int]:
    """One id a byte."""
    if library.decoder.__class__ is decoders.ByteLevel:
        table = dict(zip(range(256), byte_characters(), strict=True))
        return [library.token_to_id(table[byte]) for byte in data]
    return [library.token_to_id(f"<0x{byte:02X}>") for byte in data]


def byte_characters() -> list[str]:
    """ByteLevel's character of each byte, as the library itself makes them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(extra)) for byte in range(256)]


def stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """The pieces of a text, the last from flush."""
    decoder = IncrementalDecoder(tokenizer, prompt)
    pieces = [decoder.push(token) for token in ids]
    decoder.check()
    return [*pieces, decoder.flush()]


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {"bytes as tokens": sentence_piece, "byte level": byte_level}
kinds = pytest.mark.parametrize("kind", KINDS)


# --- streams ---


@kinds
def test_nothing_is_sent_in_the_middle_of_a_character(kind: str) -> None:
    library = KINDS[kind]()
    pieces = stream(Tokenizer(library, SPECIAL), ids_of(library, "你🙂".encode()))
    assert pieces == ["", "", "你", "", "", "", "🙂", ""]


@kinds
def test_a_text_cut_inside_a_character_ends_with_the_replacement_character(kind: str) -> None:
    library = KINDS[kind]()
    tokenizer = Tokenizer(library, SPECIAL)
    for cut, shown in ((2, ""), (5, "你")):
        ids = ids_of(library, "你🙂".encode()[:cut])
        pieces = stream(tokenizer, ids)
        assert "".join(pieces[:-1]) == shown
        assert pieces[-1] == "\ufffd" * (2 if kind == "bytes as tokens" else 1)
        assert "".join(pieces) == tokenizer.decode(ids)
    assert tokenizer.decode(ids_of(library, "你".encode()[:2])) == library.decode(ids_of(library, "你".encode()[:2]))


@kinds
def test_a_real_replacement_character_is_sent_at_once(kind: str) -> None:
    library = KINDS[kind]()
    tokenizer = Tokenizer(library, SPECIAL)
    assert stream(tokenizer, ids_of(library, "\ufffd".encode()))[2] == "\ufffd"
    if kind == "bytes as tokens":
        assert stream(tokenizer, [library.token_to_id("\ufffd"), library.token_to_id("x")]) == ["\ufffd", "x", ""]


@kinds
def test_bytes_that_are_no_text_leave_their_neighbours_whole(kind: str) -> None:
    library = KINDS[kind]()
    ids = ids_of(library, "你".encode() + b"\xff" + "é".encode())
    assert stream(Tokenizer(library, SPECIAL), ids) == ["", "", "你", "\ufffd", "", "é", ""]


@kinds
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character(kind: str, cut: int) -> None:
    """The character that the answer completes belongs to the answer, whole."""
    library = KINDS[kind]()
    data = "a🙂b".encode()
    prompt, answer = ids_of(library, data[: 1 + cut]), ids_of(library, data[1 + cut :])
    assert "".join(stream(Tokenizer(library, SPECIAL), answer, prompt)) == "🙂b"


def test_a_prompt_that_ends_with_a_real_replacement_character_gives_none_to_the_answer() -> None:
    library = sentence_piece()
    prompt = [library.token_to_id("x"), library.token_to_id("\ufffd")]
    assert stream(Tokenizer(library, SPECIAL), [library.token_to_id("x")], prompt) == ["x", ""]


def test_leading_spaces_of_words_are_kept_after_a_prompt_and_stripped_at_the_beginning() -> None:
    library = sentence_piece()
    hello, you, begin = (library.token_to_id(token) for token in ("▁Hello", "▁you", "<s>"))
    tokenizer = Tokenizer(library, SPECIAL)
    assert stream(tokenizer, [hello, you]) == ["Hello", " you", ""]
    assert stream(tokenizer, [hello, you], [begin]) == ["Hello", " you", ""]
    assert stream(tokenizer, [you], [hello]) == [" you", ""]
    assert stream(tokenizer, [begin, you, begin, you], [hello]) == ["", " you", "", " you", ""]


LETTERS = "a é 你 🙂 \ufffd".split()
CHUNKS = [letter.encode() for letter in LETTERS] + [b"\xff", b"\x80", b"\xe4", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0"]


@kinds
@settings(max_examples=300)
@given(data=st.data())
def test_pieces_joined_are_the_whole_decode(kind: str, data: st.DataObject) -> None:
    """For any tokens: special, unknown, half characters, anywhere, cut anywhere."""
    library = KINDS[kind]()
    size = library.get_vocab_size()
    chunk = st.sampled_from(CHUNKS).map(lambda piece: ids_of(library, piece))
    other = st.lists(st.one_of(st.integers(0, 2), st.integers(size - 8, size + 3)), max_size=2)
    tokens = st.lists(st.one_of(chunk, other), max_size=8).map(lambda parts: [i for part in parts for i in part])
    tokenizer = Tokenizer(library, SPECIAL)
    prompt, answer = data.draw(tokens), data.draw(tokens)
    before = tokenizer.decode(prompt)
    certain = before[: len(before) - tokenizer.open_bytes(prompt)]
    assert certain + "".join(stream(tokenizer, answer, prompt)) == tokenizer.decode(prompt + answer)


@kinds
@given(text=st.text(max_size=20))
def test_whole_texts_decode_as_the_library_decodes_them(kind: str, text: str) -> None:
    library = KINDS[kind]()
    ids = ids_of(library, text.encode())
    assert Tokenizer(library, SPECIAL).decode(ids) == library.decode(ids)


def test_a_long_run_of_special_tokens_is_no_trouble() -> None:
    library = sentence_piece()
    ids = [library.token_to_id("▁Hello"), *[library.token_to_id("</s>")] * 300, library.token_to_id("▁you")]
    assert "".join(stream(Tokenizer(library, SPECIAL), ids)) == "Hello you"


# --- ids ---


@kinds
def test_ids_beyond_the_tokenizer_decode_to_nothing(kind: str) -> None:
    """A head may have more rows than the tokenizer has tokens."""
    library = KINDS[kind]()
    tokenizer = Tokenizer(library, SPECIAL)
    [a] = ids_of(library, b"a")
    size = tokenizer.size
    assert tokenizer.decode([size, a, size + 1, -1, 1 << 40, a]) == "aa"
    assert stream(tokenizer, [size, a, 1 << 40, a]) == ["", "a", "", "a", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = Tokenizer(sentence_piece(), SPECIAL)
    ids = tokenizer.encode("x")
    assert tokenizer.decode(ids) == "x" and tokenizer.decode(ids, skip_special=False).startswith("<s>")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, True)


# --- begin tokens ---


@pytest.mark.parametrize(("bos", "count"), [(True, 1), (False, 0)])
def test_a_text_begins_once_if_the_folders_tokenizer_adds_a_begin_token(bos: bool, count: int) -> None:
    tokenizer = Tokenizer(sentence_piece(bos), SPECIAL)
    assert tokenizer.encode("x x").count(1) == count
    assert tokenizer.encode("").count(1) == count
    assert tokenizer.encode("<s>x").count(1) == 1
    assert tokenizer.encode("<s><s>x").count(1) == (1 if bos else 2)
    assert tokenizer.encode("x<s>x").count(1) == count + 1  # special tokens in a text are special tokens
    assert tokenizer.encode("x</s>")[-1] == 2


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.mark.parametrize("begun", ["{{ bos_token }}", "<s>", "{{ bos_token }}{{ bos_token }}", ""])
@pytest.mark.parametrize("bos", [True, False])
def test_a_chat_begins_exactly_once_whoever_wrote_the_begin_token(begun: str, bos: bool) -> None:
    tokenizer = Tokenizer(sentence_piece(bos), SPECIAL, begun + PLAIN)
    ids = tokenizer.chat([{"role": "user", "content": "x"}])
    assert ids.count(1) == (1 if bos else begun.count("s>") + begun.count("bos_token"))
    assert tokenizer.decode(ids).endswith("[user]x>")


def test_a_chat_without_a_template_is_refused_and_none_is_guessed() -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(sentence_piece(), SPECIAL).chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot render"),
        ("{{ messages[0].nothing.at.all }}", "cannot render"),
        ("{{ messages.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 2.0 ** 5000 }}", "OverflowError"),
        ("{{ range(9999999) }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(template: str, word: str) -> None:
    with pytest.raises(TokenizerError, match=word):
        Tokenizer(sentence_piece(), SPECIAL, template).chat([{"role": "user", "content": "x"}])


def test_templates_have_what_transformers_gives_them() -> None:
    template = (
        "{%- for m in messages %}\n{%- generation %}{{ m.content | tojson }}{%- endgeneration %}\n"
        "{%- if loop.first %}{% continue %}{% endif %}{{ eos_token }}{{ strftime_now('%Y')[:2] }}{% endfor %}"
    )
    tokenizer = Tokenizer(sentence_piece(), SPECIAL, template)
    ids = tokenizer.chat([{"role": "user", "content": "<é"}, {"role": "user", "content": "y"}])
    assert tokenizer.decode(ids, skip_special=False).replace("<s>", "") == ' "<é""y"</s>20'


def test_without_jinja2_a_chat_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jinja2", "jinja2.ext", "jinja2.sandbox"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TokenizerError, match=r"pip install -e '\.\[chat\]'"):
        Tokenizer(sentence_piece(), SPECIAL, PLAIN).chat([])


# --- folders ---


def save(folder: Path, settings: dict[str, Any], **files: str) -> Path:
    """A folder with a tokenizer."""
    sentence_piece().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_folders_name_their_special_tokens_and_templates(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    added = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    tokenizer = Tokenizer.from_folder(save(tmp_path, added | {"chat_template": "{{ bos_token }}x"}))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.chat(chat)[0] == 1 and tokenizer.decode(tokenizer.chat(chat)).strip() == "x"
    named = [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "x"}]
    tokenizer = Tokenizer.from_folder(save(tmp_path, added | {"chat_template": named}))
    assert tokenizer.decode(tokenizer.chat(chat)).strip() == "x"
    tokenizer = Tokenizer.from_folder(save(tmp_path, added | {"chat_template": {"default": "z"}}))
    assert tokenizer.decode(tokenizer.chat(chat)).strip() == "z"
    save(tmp_path, added | {"chat_template": [{"name": ["default"], "template": "x"}]})
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer.from_folder(tmp_path).chat(chat)
    save(tmp_path, added | {"chat_template": "x"}, chat_template__jinja=".")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.chat(chat)).strip() == "."


def test_tokens_of_the_settings_are_added_and_named_ones_are_special(tmp_path: Path) -> None:
    """transformers adds what tokenizer.json lacks, and knows extra_special_tokens by their names."""
    size = sentence_piece().get_vocab_size()
    decoder = {str(size): {"content": "<tool>"}, str(size + 1): {"content": "<more>", "special": True}}
    settings = {"added_tokens_decoder": decoder, "extra_special_tokens": {"image_token": "<tool>"}}
    tokenizer = Tokenizer.from_folder(save(tmp_path, SPECIAL | settings | {"chat_template": "{{ image_token }}x"}))
    assert tokenizer.chat([{"role": "user", "content": ""}])[1] == size
    assert tokenizer.encode("<tool><more>")[1:] == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "" and tokenizer.decode([size], skip_special=False).strip() == "<tool>"
    save(tmp_path, SPECIAL | {"added_tokens_decoder": {"9999": {"content": "<tool>"}}})
    with pytest.raises(TokenizerError, match=rf"'9999'; after those of tokenizer.json it would be {size}"):
        Tokenizer.from_folder(tmp_path)


def test_a_template_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {}, chat_template__jinja="x")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="is not UTF-8"):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_breaks_inside_the_library_is_an_error_of_its_text_alone() -> None:
    """The library's own panic is no Exception; it would pass every handler and end the whole step."""
    library = sentence_piece()
    library.decoder = decoders.Strip(content=" ", left=1, right=1)
    library.add_tokens([" "])
    tokenizer = Tokenizer(library, SPECIAL)
    with pytest.raises(TokenizerError, match="cannot decode"):
        tokenizer.decode([library.token_to_id(" ")])


def test_a_folder_without_settings_still_has_its_begin_token(tmp_path: Path) -> None:
    sentence_piece().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.adds_bos and tokenizer.bos_id == 1 and tokenizer.eos_id is None


def test_truncation_and_padding_of_the_training_are_not_used(tmp_path: Path) -> None:
    library = sentence_piece()
    library.enable_truncation(4)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("x" * 20)) == 1 + 1 + 20
    assert len(Tokenizer.from_folder(tmp_path).encode("x")) == 3


@pytest.mark.parametrize("text", [None, "", "{}", "[", '{"model": {"type": "Nothing"}}'])
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_special_token_that_the_vocabulary_lacks_is_refused() -> None:
    with pytest.raises(TokenizerError, match="eos_token"):
        Tokenizer(sentence_piece(), {"eos_token": "<|end|>"})


def test_a_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(TokenizerError, match="cannot be encoded"):
        Tokenizer(sentence_piece(), SPECIAL).encode("\ud800")


def test_the_tokenizer_of_the_tiny_folders(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_model_folder(tmp_path, tiny_config()))
    ids = tokenizer.encode("Hi =")
    assert ids == [95, 40, 73, 0, 29] and tokenizer.decode(ids) == "Hi ="
    assert stream(tokenizer, ids[1:]) == ["H", "i", " ", "=", ""]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.size) == (95, 96, 97)


@pytest.mark.oracle
@kinds
@pytest.mark.parametrize("bos", [True, False])
def test_transformers_encodes_and_renders_the_same(tmp_path: Path, kind: str, bos: bool) -> None:
    from transformers import AutoTokenizer

    library = {"bytes as tokens": sentence_piece, "byte level": byte_level}[kind](bos)
    library.save(str(tmp_path / "tokenizer.json"))
    settings = SPECIAL | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ bos_token }}" + PLAIN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("x", "", "Hello you é 你", "x</s>y"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    chat = [{"role": "user", "content": "Hello 你"}]
    assert ours.chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
