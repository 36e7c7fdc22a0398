"""TextStream: from tokens to text that can be shown, one request at a time.

Holds back what is not certain yet: the bytes of an unfinished character, and the beginning of what may become a stop
string. It knows no scheduling.
"""

from __future__ import annotations

from slora_ref.tokenizer import IncrementalDecoder, Tokenizer


class TextStream:
    """Decodes one request's tokens as they come.

    Args:
        tokenizer: of the model.
        prompt_ids: decides, for example, whether a first space is shown.
        stop: strings that end the text; the earliest wins and is not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], stop: tuple[str, ...] = ()) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that is now certain. After a stop string, `stopped` is true."""
        return self._take(self._decoder.push(token_id))

    def flush(self) -> str:
        """The text is over: returns what was held back, an unfinished character as U+FFFD."""
        if self.stopped:
            return ""
        text = self._take(self._decoder.flush()) + self._held
        self._held = ""
        return text

    def _take(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        certain = len(text) - self._longest_beginning(text)
        self._held = text[certain:]
        return text[:certain]

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stop), default=0))
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)
