"""Tokenizer: text to token ids and back, by the tokenizers library and the folder's own files.

What is decided here: one begin token, never two, whoever wrote the first; special tokens in a prompt's text are the
special tokens (as in transformers); ids that the tokenizer does not have decode to nothing, since a padded head may
still name them; tokenizer.json is the truth about normalising and splitting, also where transformers 5 rebuilds it
from the name of the tokenizer's class (so as transformers 4 did it); bytes that are no UTF-8 become one U+FFFD each and
do not take their neighbours with them (the library turns a whole run of byte tokens into U+FFFD when one is wrong, so a
text would change after it was shown). It knows no requests; streaming is in stream.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from slora_ref.config.fields import read_json, show
from slora_ref.errors import TokenizerError
from slora_ref.tokenizer.chat import Message, find_template, render

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
UNKNOWN = "\ufffd"
LARGEST_ID = (1 << 32) - 1  # the library raises above it
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")  # later ones win


class Tokenizer:
    """The tokenizer of a model folder.

    `bos_id` and `eos_id` are None where the folder names none; `adds_bos` says whether it begins every text with one.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, special: Mapping[str, str], chat_template: str | None = None
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._special = dict(special)
        self._chat_template = chat_template
        self._special_ids = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
        kind = b"" if library.decoder is None else library.decoder.__getstate__()
        self._byte_fallback, self._byte_level = b"ByteFallback" in kind, b"ByteLevel" in kind
        empty = library.encode("").ids
        self.bos_id = self._id_of("bos_token", empty[0] if empty else None)
        self.eos_id = self._id_of("eos_token", None)
        self.adds_bos = self.bos_id is not None and empty[:1] == [self.bos_id]

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder. Raises TokenizerError when tokenizer.json is missing or damaged."""
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise TokenizerError(f"no tokenizer.json in {show(str(path))}; save the tokenizer in its fast form")
        try:
            library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as cause:  # noqa: BLE001 - the library raises plain Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {show(str(cause))}") from None
        settings: dict[str, Any] = {}
        for file in SETTINGS:
            settings |= read_json(path / file, TokenizerError) if (path / file).is_file() else {}
        special = _special_texts(settings)
        _add_tokens(library, settings, special)
        return cls(library, special, find_template(path, settings))

    @property
    def size(self) -> int:
        """Number of tokens that have a text; a model's head may be larger."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with a begin token if the folder's tokenizer adds one, and then exactly one."""
        return self._begun_once(self._encode(text, add_special=True))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation by the folder's chat template; one begin token at most, as `encode`."""
        text = render(self._chat_template, messages, self._special)
        return self._begun_once(self._encode(text, add_special=False))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids; those without a text, and with `skip_special` special tokens, are passed over."""
        try:
            text = self._library.decode([i for i in ids if 0 <= i <= LARGEST_ID], skip_special_tokens=skip_special)
            if self._byte_fallback and UNKNOWN in text:
                text = self._library.decoder.decode(_mend(self._tokens(ids, skip_special)))
        except BaseException as cause:
            if type(cause).__name__ != "PanicException":  # Rust's, which is no Exception
                raise
            raise TokenizerError(f"the folder's decoder cannot decode {show(list(ids))}: {show(str(cause))}") from None
        return str(text)

    def open_bytes(self, ids: Sequence[int]) -> int:
        """How many U+FFFD at the end of decode(ids) stand for a character whose last bytes are still to come."""
        if not (self._byte_fallback or self._byte_level):
            return 0
        data = b""
        for token in reversed(self._tokens(ids, skip_special=True)):
            piece = self._bytes_of(token)
            if piece is None or len(data) > 3:
                break
            data = piece + data
        waiting = _unfinished(data)
        return waiting if self._byte_fallback else min(waiting, 1)

    def _begun_once(self, ids: list[int]) -> list[int]:
        """The ids with one begin token in front if the folder's tokenizer adds one; the text may have named it too."""
        if self.bos_id is None or not self.adds_bos:
            return ids
        first = next((i for i, token in enumerate(ids) if token != self.bos_id), len(ids))
        return [self.bos_id, *ids[first:]]

    def _encode(self, text: str, add_special: bool) -> list[int]:
        """Raises TokenizerError for a text that is no Unicode (lone surrogates)."""
        try:
            return list(self._library.encode(text, add_special_tokens=add_special).ids)
        except (TypeError, UnicodeError) as cause:
            raise TokenizerError(f"the text cannot be encoded: {show(str(cause))}") from None

    def _id_of(self, name: str, default: int | None) -> int | None:
        """The id of a named special token; one that the folder names must be in the vocabulary."""
        text = self._special.get(name)
        if text is None:
            return default
        found: int | None = self._library.token_to_id(text)
        if found is None:
            raise TokenizerError(f"{name} is {show(text)}, which tokenizer.json does not have")
        return found

    def _tokens(self, ids: Sequence[int], skip_special: bool) -> list[str]:
        """The tokens of ids, without those that are skipped or unknown."""
        skipped = self._special_ids if skip_special else ()
        tokens = [self._library.id_to_token(i) for i in ids if 0 <= i <= LARGEST_ID and i not in skipped]
        return [token for token in tokens if token is not None]

    def _bytes_of(self, token: str) -> bytes | None:
        """The bytes that a token stands for; None when it is text of its own."""
        if self._byte_level:
            known = all(c in BYTE_OF for c in token)
            return bytes(BYTE_OF[c] for c in token) if known else token.encode("utf-8", "replace")
        found = BYTE_TOKEN.fullmatch(token)
        return bytes([int(found[1], 16)]) if found else None


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens, which the files give as a text or as an object with `content`."""
    texts = {}
    more = settings.get("extra_special_tokens")
    for name, value in (*settings.items(), *(more if isinstance(more, dict) else {}).items()):
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            texts[name] = content
    return texts


def _add_tokens(library: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens of tokenizer_config.json that tokenizer.json lacks; and those with a name are special, as in transformers.

    Raises TokenizerError when a token would get another id than the file says.
    """
    added = settings.get("added_tokens_decoder")
    for text, value in sorted((added if isinstance(added, dict) else {}).items(), key=lambda item: item[0].zfill(10)):
        content = value.get("content") if isinstance(value, dict) else None
        if not isinstance(content, str) or library.token_to_id(content) is not None:
            continue
        options = {key: value.get(key) is True for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        library.add_tokens([tokenizers.AddedToken(content, **options)])
        if str(library.token_to_id(content)) != text:
            raise TokenizerError(
                f"tokenizer_config.json gives {show(content)} the id {show(text)}; after those of tokenizer.json it "
                f"would be {library.token_to_id(content)}"
            )
    known = [content for content in special.values() if library.token_to_id(content) is not None]
    library.add_special_tokens(known)


def _mend(tokens: Sequence[str]) -> list[str]:
    """Tokens with each byte that is no UTF-8 in its run replaced by U+FFFD, so that the rest of the run stays whole."""
    mended = list(tokens)
    start = 0
    while start < len(tokens):
        end = start
        while end < len(tokens) and BYTE_TOKEN.fullmatch(tokens[end]):
            end += 1
        data = bytes(int(token[3:5], 16) for token in tokens[start:end])
        for i in _wrong_bytes(data):
            mended[start + i] = UNKNOWN
        start = end + 1
    return mended


def _wrong_bytes(data: bytes) -> list[int]:
    """The places in `data` of bytes that belong to no whole character."""
    wrong: list[int] = []
    start = 0
    while start < len(data):
        try:
            data[start:].decode("utf-8")
            break
        except UnicodeDecodeError as error:
            wrong += range(start + error.start, start + error.end)
            start += error.end
    return wrong


def _unfinished(data: bytes) -> int:
    """How many bytes at the end of `data` begin a character that is not complete."""
    for count in range(min(3, len(data)), 0, -1):
        try:
            data[-count:].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.start == 0 and error.end == count and error.reason == "unexpected end of data":
                return count
    return 0


def _byte_table() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_table()
