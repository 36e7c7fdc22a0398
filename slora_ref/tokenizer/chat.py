"""Chat templates: the Jinja program in a model's folder that turns messages into the text the model was trained on.

Rendered as transformers does: sandboxed, blocks trimmed, with raise_exception, strftime_now, tojson and the names of
the special tokens. Needs jinja2 (extra `chat`), imported only when a chat is rendered. It knows no token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from slora_ref.config.fields import read_text, show
from slora_ref.errors import TokenizerError, how_to_install

Message = Mapping[str, Any]


def find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template of chat_template.jinja, else of tokenizer_config.json: a text, or several, one named "default".

    Raises TokenizerError for a file that cannot be read as text.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return read_text(file, TokenizerError).decode("utf-8")
        except UnicodeError as cause:
            raise TokenizerError(f"{show(str(file))} is not UTF-8: {show(str(cause))}") from None
    value = settings.get("chat_template")
    if isinstance(value, list):
        defaults = [item for item in value if isinstance(item, dict) and item.get("name") == "default"]
        value = defaults[-1].get("template") if defaults else None
    elif isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def render(template: str | None, messages: Sequence[Message], special: Mapping[str, str]) -> str:
    """The text of a conversation, up to where the assistant is to answer.

    `special` maps names such as bos_token to texts. Raises TokenizerError when there is no template (none is guessed),
    when jinja2 is missing, or when the template refuses the messages.
    """
    if template is None:
        raise TokenizerError("the model's folder has no chat template; send the prompt as plain text instead")
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise TokenizerError(f"chat templates need jinja2: {how_to_install('chat')}") from None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        program = environment.from_string(_without_generation(template))
        return program.render(
            messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **special
        )
    except TokenizerError:
        raise
    except Exception as cause:  # noqa: BLE001  a template is a stranger's program: whatever it does, it ends here
        raise TokenizerError(f"the chat template cannot render these messages: {show(repr(cause))}") from None


def _without_generation(template: str) -> str:
    """{% generation %} marks the assistant's words for training; here it is a block that is always shown."""
    template = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", template)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", template)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    """How templates refuse a conversation."""
    raise TokenizerError(f"the chat template refuses these messages: {show(message)}")
