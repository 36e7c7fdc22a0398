"""The toy model's tokenizer: one token a character, printable ASCII, and three special tokens.

Made with the `tokenizers` library, so that it is loaded like any other model's tokenizer.json. It puts the begin
token in front of a text by its post-processor, as Llama's does. A character that is not printable ASCII becomes
`<unk>`.
"""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

BOS: Final = "<s>"
EOS: Final = "</s>"
UNKNOWN: Final = "<unk>"
SPECIAL: Final = (BOS, EOS, UNKNOWN)
BOS_ID, EOS_ID, UNKNOWN_ID = range(len(SPECIAL))
CHARACTERS: Final = "".join(map(chr, range(ord(" "), ord("~") + 1)))
SIZE: Final = len(SPECIAL) + len(CHARACTERS)


def build_tokenizer() -> Tokenizer:
    """Byte-pair encoding without any pair: every character is its own token."""
    ids = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
