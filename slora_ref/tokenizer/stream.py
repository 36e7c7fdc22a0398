"""IncrementalDecoder: a text as its tokens come, never a character in halves.

Decoding each token alone loses characters whose bytes lie in several tokens, and the spaces that SentencePiece keeps at
the beginning of words; decoding the whole text anew at each token is quadratic. Here a short window of the last tokens
is decoded: it begins at a character's boundary and shows at least one character, so that what the decoder does at the
beginning of a text (strip a space) happens to text that is already out. The pieces joined, and `flush`, are the text of
prompt and answer together less the text of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from slora_ref.tokenizer.tokenizer import Tokenizer

LONGEST = 16  # tokens that are tried as a window; a character has at most 4 bytes


class IncrementalDecoder:
    """Feed it an answer's tokens one by one.

    `prompt_ids` only give context: whether a first space is shown, and the first bytes of a character that the prompt
    leaves unfinished (the whole character then belongs to the answer).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids)
        self._sent = 0
        self._advance()

    def push(self, token_id: int) -> str:
        """Take the next token; the text that is now certain, perhaps none."""
        self._window.append(token_id)
        return self._advance()

    def flush(self) -> str:
        """The text is over: the rest, an unfinished character as U+FFFD."""
        text = self._tokenizer.decode(self._window)
        piece, self._sent = text[self._sent :], len(text)
        return piece

    def check(self) -> None:
        """Raises AssertionError unless exactly the certain text of the window is out (or, after `flush`, all of it)."""
        text, waiting = self._decode(self._window)
        assert self._sent in (len(text) - waiting, len(text)), (self._sent, text, waiting)

    def _advance(self) -> str:
        """The certain text that is not out yet; it is out then, and the window is shortened."""
        text, waiting = self._decode(self._window)
        certain = text[: len(text) - waiting]
        piece, self._sent = certain[self._sent :], max(self._sent, len(certain))
        self._shorten(text, waiting)
        return piece

    def _decode(self, ids: list[int]) -> tuple[str, int]:
        """The text of ids, and how many characters at its end are still to be completed."""
        return self._tokenizer.decode(ids), self._tokenizer.open_bytes(ids)

    def _shorten(self, text: str, waiting: int) -> None:
        """Keep the fewest last tokens that alone show the same end of `text`, and something of it for certain."""
        for length in range(1, min(LONGEST, len(self._window) - 1) + 1):
            end, end_waiting = self._decode(self._window[-length:])
            if len(end) > waiting == end_waiting and text.endswith(end):
                self._window, self._sent = self._window[-length:], len(end) - waiting
                return
