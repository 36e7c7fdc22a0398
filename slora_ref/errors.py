"""The named errors of slora_ref.

Every error that a user can cause is one of these, carries the numbers, and says what to do about it. The command line
turns a SloraError into one line and exit code 2; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import shlex
import sys


def how_to_install(extra: str) -> str:
    """What to type for a missing optional part, in a checkout: the pip of this very Python, since others are near."""
    return f"{shlex.quote(sys.executable)} -m pip install -e '.[{extra}]'"


class SloraError(Exception):
    """Base of all errors that are about the input, not about a bug."""


class ConfigError(SloraError):
    """An option or a combination of options that cannot work."""


class UnsupportedModel(SloraError):
    """A checkpoint asks for a feature that would change the logits and is not implemented; the message names it."""


class CheckpointError(SloraError):
    """A checkpoint folder is damaged or contradicts itself: missing tensor, wrong shape, bad header."""


class CheckpointWarning(UserWarning):
    """Something in a checkpoint folder has no effect here, though it has in transformers."""


class UnsupportedAdapter(SloraError):
    """An adapter asks for a PEFT feature that changes the function and is not implemented; the message names it."""


class AdapterError(SloraError):
    """An adapter folder is damaged, vanished, or does not fit the base model."""


class AdapterWarning(UserWarning):
    """Something in an adapter's config has no effect, and was perhaps meant to have one."""


class UnknownAdapter(SloraError):
    """No adapter is registered under this name. Never answered by the base model."""


class TokenizerError(SloraError):
    """The tokenizer folder cannot be used, or a text cannot be encoded as asked."""


class RequestError(SloraError):
    """A request is refused before it enters the queue: bad parameters, or it can never fit the pool."""


class LoadFailed(SloraError):
    """An adapter that was registered could not be brought into the pool; only its requests fail."""


class OutOfPages(SloraError):
    """An allocation asked for more pages than are free. Nothing was allocated."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages needed, {free} free")
        self.needed = needed
        self.free = free


class PageError(SloraError):
    """A page was freed twice, or freed by something that does not own it: a bug in the caller, never absorbed."""


class KernelsNotFound(SloraError):
    """The folder of CUDA kernels is neither in the package nor beside it: an incomplete installation or checkout."""


class KernelError(SloraError):
    """A kernel cannot be compiled or launched: no compiler, or an argument of other dtype, shape, layout or device."""


class ShardLost(SloraError):
    """A tensor-parallel worker has died or failed: the group has ended, and nothing more can be computed with it."""
