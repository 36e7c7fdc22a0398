"""Engine: the public face. Register adapters, add requests, step; or have a list of prompts served to the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.config.fields import show
from slora_ref.engine.build import Note, build_parts, build_random_parts, quiet
from slora_ref.engine.inputs import Prompt, make_request, one_for_each, seed_of
from slora_ref.engine.live import Live
from slora_ref.engine.loop import EngineLoop
from slora_ref.engine.outputs import Completion, RequestOutput
from slora_ref.errors import AdapterWarning, RequestError
from slora_ref.policy import Policy
from slora_ref.request import BASE_MODEL, FinishReason, SamplingParams, Sequence
from slora_ref.text import TextStream

DEFAULTS = EngineConfig()
GREEDY = SamplingParams()


class Engine(EngineLoop):
    """Serves requests for many adapters of one base model. Its parts are those of EngineLoop."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        config: EngineConfig = DEFAULTS,
        policy: Policy | None = None,
        note: Note = quiet,
    ) -> Engine:
        """The usual engine for a checkpoint folder.

        Args:
            note: takes the name of each part of the start as it begins.

        Raises:
            CheckpointError, UnsupportedModel, TokenizerError: the folder is damaged or asks for what is not
            implemented. ConfigError: the options cannot work for this model.
        """
        return cls(*build_parts(Path(folder), config, policy, note))

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        config: EngineConfig = DEFAULTS,
        seed: int = 0,
        policy: Policy | None = None,
        note: Note = quiet,
    ) -> Engine:
        """The usual engine with random weights, made where they are used (transformers' name), without a tokenizer.

        Args:
            note: takes the name of each part of the start as it begins.

        Raises:
            ConfigError: the options cannot work for this model.
        """
        return cls(*build_random_parts(model, config, seed, policy, note))

    # --- adapters ---

    @property
    def adapters(self) -> list[str]:
        """Names that requests can use."""
        return self.store.names

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Registers a PEFT folder under a name; its weights are read when first wanted.

        Warns (AdapterWarning) of what in its config has no effect, and when modules that it names are not in its file.

        Raises:
            AdapterError, UnsupportedAdapter: nothing changed.
        """
        self.store.add(name, path)
        self._warn(name)

    def replace_adapter(self, name: str, path: str | Path) -> int:
        """Gives a registered name another folder, or the same one with what is in it now.

        Returns:
            How many requests have not ended that came before; they end on the old version.

        Raises:
            UnknownAdapter: there is no such name. AdapterError, UnsupportedAdapter: nothing changed.
        """
        old = self.store.replace(name, path)
        self._warn(name)
        self._forget_if_unused(old)
        return old.users

    def _warn(self, name: str) -> None:
        for note in self.store.lookup(name).header.warnings:
            warnings.warn(f"adapter {show(name)}: {note}", AdapterWarning, stacklevel=3)

    def remove_adapter(self, name: str) -> int:
        """Takes the name away at once; requests that already use it end in peace, then its pages are freed.

        Returns:
            How many such requests there are: 0, and it is gone. It never waits for them.

        Raises:
            UnknownAdapter: there is no such name.
        """
        version = self.store.remove(name)
        self._forget_if_unused(version)
        return version.users

    # --- requests ---

    def add_request(self, prompt: Prompt, params: SamplingParams = GREEDY, adapter: str | None = None) -> int:
        """Puts a request into the queue and returns its id.

        Args:
            prompt: text (needs a tokenizer) or token ids.
            adapter: a registered name; None: the base model.

        Raises:
            UnknownAdapter, RequestError: refused; nothing changed.
        """
        version = None if adapter is None else self.store.lookup(adapter)
        arrival, longest = self.clock.now(), self.pool.max_positions
        request = make_request(prompt, params, adapter, arrival, self.model_config, self.tokenizer, longest)
        number = self._next_number
        adapter_id = BASE_MODEL if version is None else version.adapter_id
        sequence = Sequence(number, request, adapter_id, seed_of(params, self.scheduler.config.seed, number))
        stream = None if self.tokenizer is None else TextStream(self.tokenizer, list(request.prompt_ids), params.stop)
        self.scheduler.add(sequence)
        if version is not None:
            self.store.acquire(version)
        self._live[number] = Live(sequence, stream)
        self._next_number += 1
        return number

    def abort(self, request_id: int) -> bool:
        """Ends a request in whatever state it is; what it held is free at once. False if it has already ended."""
        if request_id in self._live:
            self._finish(self._live[request_id], FinishReason.ABORT)
            return True
        return False

    def generate(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] = GREEDY,
        adapters: str | Seq[str | None] | None = None,
    ) -> list[Completion]:
        """Serves a list of prompts together, to the end; completions in the order of the prompts.

        Args:
            params, adapters: one for all, or one for each prompt.

        Raises:
            UnknownAdapter, RequestError: one of them is refused; then none is served. Whatever is raised, none goes on.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is one text; give a list of prompts")
        count = len(prompts)
        hows, names = one_for_each(params, count, "params"), one_for_each(adapters, count, "adapters")
        ids: list[int] = []
        done: dict[int, Completion] = {}
        try:
            ids.extend(
                self.add_request(prompt, how, adapter)
                for prompt, how, adapter in zip(prompts, hows, names, strict=True)
            )
            for news in self._follow(set(ids)):
                if news.completion is not None:
                    done[news.request_id] = news.completion
        except BaseException:
            self._withdraw(ids)
            raise
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, adapter: str | None = None
    ) -> Iterator[RequestOutput]:
        """Serves one prompt and yields its pieces as they come; leaving the loop early aborts it.

        Each request's news is given out once: a call of `step` while a stream is open takes its pieces.

        Raises:
            UnknownAdapter, RequestError: at the first piece.
        """
        request_id = self.add_request(prompt, params, adapter)
        try:
            yield from self._follow({request_id})
        finally:
            self._withdraw([request_id])

    def _withdraw(self, ids: Seq[int]) -> None:
        """Ends requests and their news without a trace."""
        for request_id in ids:
            self.abort(request_id)
        self._news = [news for news in self._news if news.request_id not in ids]

    def _follow(self, ids: set[int]) -> Iterator[RequestOutput]:
        """Steps until these requests have ended and yields their news; that of other requests is kept for `step`."""
        while ids & self._live.keys() or any(news.request_id in ids for news in self._news):
            news = self.step()
            self._news = [piece for piece in news if piece.request_id not in ids]
            yield from [piece for piece in news if piece.request_id in ids]
