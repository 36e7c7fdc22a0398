"""What goes wrong in one request, adapter or step ends just that; pages, slots and users are given back, once."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from serving import (
    ADAPTERS,
    CONFIG,
    adapter_folder,
    adapter_id,
    assert_all_free,
    assert_right,
    delay_loads,
    image_bytes,
    model_folder,
    new_engine,
    run_to_end,
    without_shape_checks,
)
from tiny import adapter_tensors, write_adapter_folder

from slora_ref import Engine, FinishReason, SamplingParams
from slora_ref.adapter import read_header
from slora_ref.batch import Batch
from slora_ref.errors import AdapterError, RequestError, UnknownAdapter
from slora_ref.executor import Executor, StartedStep
from slora_ref.sampler import Sampling
from slora_ref.tokenizer import Tokenizer

ALL = {name: name for name in ADAPTERS}
KEEP = SamplingParams(max_tokens=8, keep_logits=True, ignore_eos=True)
PROMPT = [3, 4, 5, 6]


def copy_of(weights: str, folder: Path) -> Path:
    """A copy of an adapter folder that a test may damage."""
    return Path(shutil.copytree(adapter_folder(weights), folder))


def assert_serves_on(engine: Engine) -> None:
    """The engine still answers, and has lost nothing."""
    names = [None, *engine.adapters[:1]]
    for name, done in zip(names, engine.generate([PROMPT] * len(names), KEEP, names), strict=True):
        assert_right(done, name, KEEP)
    assert_all_free(engine)


# --- the executor ---


class Failing:
    """Runs the model, but raises in one step."""

    def __init__(self, inner: Executor, at: int, error: BaseException) -> None:
        self.inner, self.left, self.error = inner, at, error

    def start(self, batch: Batch, sampling: Sampling) -> StartedStep:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.inner.start(batch, sampling)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_that_fails_ends_its_requests_and_not_the_engine(at: int) -> None:
    engine = new_engine(ALL, max_running=2)
    engine.executor = Failing(engine.executor, at, MemoryError("no room for a workspace"))
    numbers = [engine.add_request(PROMPT, KEEP, name) for name in (None, "o", "qv", "y")]
    done = run_to_end(engine)
    failed = [number for number in numbers if done[number].finish_reason is FinishReason.ERROR]
    assert 1 <= len(failed) <= 2, "those of the step, and no others"
    for number in failed:
        assert "no room for a workspace" in done[number].error
        assert len(done[number].token_ids) < at
    for number in set(numbers) - set(failed):
        assert_right(done[number], done[number].adapter, KEEP)
    assert_serves_on(engine)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_an_interrupt_leaves_an_engine_that_serves_on(at: int) -> None:
    """Ctrl-C within a step: the call is gone without a trace, and so are the requests of the step."""
    engine = new_engine(ALL, max_running=2)
    executor = engine.executor
    for call in (
        lambda: engine.generate([PROMPT] * 3, KEEP, ["x", "y", "o"]),
        lambda: list(engine.stream(PROMPT, KEEP, "x")),
    ):
        engine.executor = Failing(executor, at, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            call()
        engine.check()
        assert not engine.has_work
    engine.executor = Failing(executor, 2, KeyboardInterrupt())
    number = engine.add_request(PROMPT, KEEP)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(engine)
    assert run_to_end(engine)[number].finish_reason is FinishReason.ERROR
    assert_serves_on(engine)


# --- the tokenizer ---


class Faulty(Tokenizer):
    """Cannot decode one token."""

    def __init__(self, bad: int) -> None:
        self.__dict__ |= Tokenizer.from_folder(model_folder()).__dict__
        self.bad = bad

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if self.bad in ids:
            raise ValueError(f"token {self.bad} cannot be decoded")
        return super().decode(ids, skip_special)

    def encode(self, text: str) -> list[int]:
        if "?" in text:
            raise ValueError("cannot encode this")
        return super().encode(text)


def test_a_token_that_cannot_be_decoded_ends_its_own_request() -> None:
    """At the push, and again when the rest is flushed: neither may reach the step."""
    engine, names = new_engine(ALL), [None, "y", "o", "qv"]
    want = [done.token_ids for done in engine.generate([PROMPT] * 4, KEEP, names)]
    bad = next(token for token in want[1][2:] if sum(token in ids for ids in want) == 1)
    engine.tokenizer = Faulty(bad)
    for done, name, ids in zip(engine.generate([PROMPT] * 4, KEEP, names), names, want, strict=True):
        if bad in ids:
            assert done.finish_reason is FinishReason.ERROR
            assert f"token {bad} cannot be decoded" in done.error
            assert done.token_ids == ids[: ids.index(bad) + 1]
            assert len(done.text) == ids.index(bad)
        else:
            assert_right(done, name, KEEP)
    assert_serves_on(engine)


def test_a_rest_that_cannot_be_flushed_ends_its_own_request() -> None:
    """By an abort, or as others run: the text that was held back raises, and nobody else notices."""

    class Withholding(Faulty):
        def open_bytes(self, ids: Sequence[int]) -> int:
            return len(self.decode(ids))  # nothing is ever certain, so all of it waits for the flush

    engine = new_engine(ALL)
    engine.tokenizer = Withholding(-1)
    broken = [engine.add_request(PROMPT, KEEP, name) for name in (None, "y")]
    for _ in range(4):
        engine.step()
    engine.tokenizer.bad = PROMPT[-1]  # from now on their windows cannot be decoded
    right = engine.add_request([90], KEEP)
    assert engine.abort(broken[0])
    done = run_to_end(engine)
    for number in broken:
        assert done[number].finish_reason is FinishReason.ERROR
        assert "cannot be decoded" in done[number].error
    assert_right(done[right], None, KEEP)
    engine.tokenizer.bad = -1
    assert_serves_on(engine)


def test_a_prompt_that_the_tokenizer_fails_on_leaves_nothing_behind() -> None:
    engine = new_engine(ALL)
    engine.tokenizer = Faulty(PROMPT[1])
    for prompt in (PROMPT, "what?"):
        with pytest.raises(ValueError, match="cannot"):
            engine.add_request(prompt, KEEP, "x")
        engine.check()
        assert not engine.has_work
        assert engine.store.lookup("x").users == 0
    engine.tokenizer.bad = -1
    assert_serves_on(engine)


# --- logits that are not finite ---


def test_an_adapter_that_overflows_ends_its_own_requests_by_an_error(tmp_path: Path) -> None:
    """Never token 0: the fault was a row of NaN whose largest entry is the first."""
    engine = new_engine(ALL)
    engine.add_adapter("huge", write_adapter_folder(tmp_path, CONFIG, 4, seed=9, sd=1e25))
    for temperature in (0.0, 0.8):
        params = replace(KEEP, temperature=temperature, seed=1)
        names = ["x", "huge", None, "huge", "y"]
        for name, done in zip(names, engine.generate([PROMPT] * 5, params, names), strict=True):
            if name == "huge":
                assert (done.finish_reason, done.token_ids, done.text) == (FinishReason.ERROR, (), "")
                assert "not finite" in done.error
            else:
                assert_right(done, name, params)
    engine.remove_adapter("huge")
    assert_serves_on(engine)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_adapter_with_nan_in_its_file_fails_to_load(tmp_path: Path, value: float) -> None:
    engine, ranks = new_engine(ALL), {(0, "q_proj"): 2, (1, "v_proj"): 2}
    tensors = adapter_tensors(CONFIG, ranks, seed=0)
    tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"][3, 1] = value
    engine.add_adapter("bad", write_adapter_folder(tmp_path, CONFIG, ranks, tensors=tensors))
    bad, good = engine.generate([PROMPT] * 2, KEEP, ["bad", "y"])
    assert (bad.finish_reason, bad.token_ids) == (FinishReason.ERROR, ())
    assert "v_proj" in bad.error
    assert_right(good, "y", KEEP)
    assert engine.prefetcher.counts.failures == 1
    assert_serves_on(engine)


# --- adapters that vanish, change, or do not arrive ---


def rewrite(folder: Path) -> None:
    """Other weights of the same size in the same file, as a trainer would write them."""
    write_adapter_folder(folder, CONFIG, **(ADAPTERS["qv"] | {"seed": 77}))
    later = (folder / "adapter_model.safetensors").stat().st_mtime_ns + 10**9
    os.utime(folder / "adapter_model.safetensors", ns=(later, later))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "folder gone": shutil.rmtree,
    "weights gone": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "config gone": lambda folder: (folder / "adapter_config.json").unlink(),
    "cut short": lambda folder: os.truncate(folder / "adapter_model.safetensors", 600),
    "garbage": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 5000),
    "empty": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b""),
    "other weights": rewrite,
    "config is no JSON": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "a folder where a file was": lambda folder: (
        (folder / "adapter_model.safetensors").unlink(), (folder / "adapter_model.safetensors").mkdir()
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("after_use", [False, True], ids=["before its first use", "after an eviction"])
def test_an_adapter_that_is_damaged_fails_its_own_requests(tmp_path: Path, damage: str, after_use: bool) -> None:
    engine = new_engine({"y": "y", "o": "o"}, max_adapters=2, host_bytes=image_bytes("qv"))
    engine.add_adapter("frail", copy_of("qv", tmp_path / "frail"))
    if after_use:
        assert_right(engine.generate([PROMPT], KEEP, "frail")[0], "qv", KEEP)
        engine.generate([PROMPT] * 2, KEEP, ["y", "o"])  # takes both slots, and the only place in host memory
        assert engine.prefetcher.counts.evictions == 1
    DAMAGES[damage](tmp_path / "frail")
    names = ["frail", "y", None, "frail", "o"]
    for name, done in zip(names, engine.generate([PROMPT] * 5, KEEP, names), strict=True):
        if name == "frail":
            assert (done.finish_reason, done.token_ids) == (FinishReason.ERROR, ())
            assert "'frail' could not be loaded" in done.error
        else:
            assert_right(done, name, KEEP)
    engine.check()
    assert not engine.prefetcher.is_resident(adapter_id(engine, "frail"))
    engine.remove_adapter("frail")
    assert_serves_on(engine)


def test_an_adapter_that_comes_back_is_served_again(tmp_path: Path) -> None:
    engine = new_engine()
    engine.add_adapter("frail", copy_of("qv", tmp_path / "frail"))
    (tmp_path / "frail").rename(tmp_path / "away")
    assert engine.generate([PROMPT], KEEP, "frail")[0].finish_reason is FinishReason.ERROR
    (tmp_path / "away").rename(tmp_path / "frail")
    assert_right(engine.generate([PROMPT], KEEP, "frail")[0], "qv", KEEP)


def test_a_folder_written_anew_and_registered_again_has_its_new_weights(tmp_path: Path) -> None:
    """Neither the pages nor the copy in host memory of what was there before may answer."""
    engine, folder = new_engine(), copy_of("qv", tmp_path / "changing")
    for weights in ("qv", "o", "qv"):
        shutil.copytree(adapter_folder(weights), folder, dirs_exist_ok=True)
        engine.add_adapter("changing", folder)
        assert_right(engine.generate([PROMPT], KEEP, "changing")[0], weights, KEEP)
        engine.remove_adapter("changing")
    assert_all_free(engine)


def test_a_load_that_fails_late_fails_those_who_wait_for_it_and_delays_nobody_else() -> None:
    engine = new_engine(ALL)
    loader = delay_loads(engine)
    slow = adapter_id(engine, "x")
    loader.polls, loader.failing = {slow: 6}, {slow}
    waiting = [engine.add_request(PROMPT, KEEP, "x") for _ in range(2)]
    quick = [engine.add_request(PROMPT, KEEP, name) for name in ("y", None)]
    done, ended = {}, {}
    for step in range(40):
        for news in engine.step():
            if news.completion is not None:
                done[news.request_id], ended[news.request_id] = news.completion, step
        engine.check()
    for number in waiting:
        assert done[number].finish_reason is FinishReason.ERROR
        assert "as planned" in done[number].error
        assert ended[number] <= 7, "told at once, not when the engine next has something to do"
    for number in quick:
        assert_right(done[number], done[number].adapter, KEEP)
        assert ended[number] <= 9
    loader.failing.clear()
    assert_right(engine.generate([PROMPT], KEEP, "x")[0], "x", KEEP)
    assert_all_free(engine)


def test_a_failed_load_is_told_while_another_is_still_awaited() -> None:
    """With nothing else to do, the engine waits for a load; but first it says what it knows."""
    engine = new_engine(ALL)
    loader = delay_loads(engine)
    first, second = adapter_id(engine, "y"), adapter_id(engine, "o")
    loader.polls, loader.failing = {second: 1000}, {first}
    numbers = [engine.add_request(PROMPT, KEEP, name) for name in ("y", "o")]
    news = engine.step() or engine.step() or engine.step()
    assert [piece.request_id for piece in news] == numbers[:1]
    assert loader._under_way[second] > 900
    assert_right(run_to_end(engine)[numbers[1]], "o", KEEP)


def test_a_load_waits_while_all_slots_are_pinned() -> None:
    engine = new_engine(ALL, max_adapters=1)
    engine.add_request(PROMPT, replace(KEEP, max_tokens=20), "y")
    number = engine.add_request(PROMPT, KEEP, "o")
    for _ in range(5):
        engine.step()
    assert not engine.prefetcher.is_resident(adapter_id(engine, "o"))
    assert_right(run_to_end(engine)[number], "o", KEEP)


def test_host_memory_for_one_adapter_serves_them_all() -> None:
    engine = new_engine(ALL, host_bytes=image_bytes("x"))
    for name in ("x", "y", "x"):
        assert_right(engine.generate([PROMPT], KEEP, name)[0], name, KEEP)
    assert len(engine.store.host) == 1


def test_registering_reads_no_weights(tmp_path: Path) -> None:
    """Only the header: the first request pays, and a fault in the weights is that request's."""
    engine, folder = new_engine(), copy_of("x", tmp_path / "x")
    engine.add_adapter("x", folder)
    assert engine.store.host_bytes == 0
    header = read_header(folder, CONFIG)
    assert engine.store.lookup("x").header.fingerprint == header.fingerprint


# --- every way to end, then unload ---


def ends_by_eos(engine: Engine) -> None:
    token = engine.generate([PROMPT], KEEP, "x")[0].token_ids[2]
    engine.model_config = replace(CONFIG, eos_token_ids=(token,))
    assert engine.generate([PROMPT], replace(KEEP, ignore_eos=False), "x")[0].finish_reason is FinishReason.STOP


def ends_by_length(engine: Engine) -> None:
    assert engine.generate([PROMPT], KEEP, "x")[0].finish_reason is FinishReason.LENGTH


def ends_by_stop_string(engine: Engine) -> None:
    text = engine.generate([PROMPT], KEEP, "x")[0].text
    assert engine.generate([PROMPT], replace(KEEP, stop=(text[2:4],)), "x")[0].finish_reason is FinishReason.STOP


def ends_by_abort_while_waiting(engine: Engine) -> None:
    assert engine.abort(engine.add_request(PROMPT, KEEP, "x"))


def ends_by_abort_while_running(engine: Engine) -> None:
    number = engine.add_request(PROMPT, KEEP, "x")
    for _ in range(4):
        engine.step()
    assert engine.abort(number)


def ends_by_abort_while_loading(engine: Engine) -> None:
    loader = delay_loads(engine)
    loader.polls = {adapter_id(engine, "x"): 3}
    number = engine.add_request(PROMPT, KEEP, "x")
    engine.add_request(PROMPT, KEEP)
    engine.step()
    assert engine.prefetcher.loading == 1
    assert engine.abort(number)


def ends_by_refusal(engine: Engine) -> None:
    for prompt in ([], [97], [1] * 600):
        with pytest.raises(RequestError):
            engine.add_request(prompt, KEEP, "x")


def ends_by_load_failure(engine: Engine) -> None:
    loader = delay_loads(engine)
    loader.failing = {adapter_id(engine, "x")}
    assert engine.generate([PROMPT], KEEP, "x")[0].finish_reason is FinishReason.ERROR


def ends_by_failing_step(engine: Engine) -> None:
    engine.executor = Failing(engine.executor, 2, RuntimeError("lost"))
    assert engine.generate([PROMPT], KEEP, "x")[0].finish_reason is FinishReason.ERROR


def ends_by_leaving_the_stream(engine: Engine) -> None:
    for _ in engine.stream(PROMPT, KEEP, "x"):
        break


def ends_by_leaving_a_stream_that_never_began(engine: Engine) -> None:
    engine.stream(PROMPT, KEEP, "x").close()


ENDS = [value for name, value in sorted(globals().items()) if name.startswith("ends_by_")]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("removed_first", [False, True])
def test_however_a_request_ends_its_adapter_can_be_unloaded(end: Callable[[Engine], None], removed_first: bool) -> None:
    """The count of users returns to 0 once, so unloading neither hangs nor frees what is in use."""
    engine = new_engine({"x": "x"})
    if removed_first:  # a second user that ends after the name is gone
        engine.add_request(PROMPT, KEEP, "x")
    end(engine)
    engine.check()
    assert engine.store.lookup("x").users == int(removed_first and bool(engine._live))
    engine.remove_adapter("x")
    engine.check()
    run_to_end(engine)
    assert_all_free(engine)
    with pytest.raises(UnknownAdapter):
        engine.add_request(PROMPT, KEEP, "x")


@pytest.mark.parametrize("admission", ["max_tokens", "expected"])
def test_clients_that_go_away_at_any_point_leave_nothing(admission: str) -> None:
    """200 requests, most dropped: before admission, in prefill, in decode, after the last token; streams too."""
    with without_shape_checks():
        drop_clients(new_engine(ALL, pool_pages=700, max_batched_tokens=24, admission=admission), random.Random(0))


def drop_clients(engine: Engine, rng: random.Random) -> None:
    loader, streams = delay_loads(engine), []
    for _ in range(200):
        name = rng.choice([None, *ADAPTERS])
        if name is not None:
            loader.polls[adapter_id(engine, name)] = rng.randrange(4)
        prompt, params = [1] * rng.randrange(1, 30), replace(KEEP, max_tokens=rng.randrange(1, 12))
        if rng.random() < 0.3:
            streams.append(engine.stream(prompt, params, name))
            next(streams[-1])
        else:
            engine.add_request(prompt, params, name)
        for _ in range(rng.randrange(3)):
            engine.step()
        for number in rng.sample(sorted(engine._live), len(engine._live) // 4):
            assert engine.abort(number)
        for stream in rng.sample(streams, len(streams) // 4):
            stream.close()
            streams.remove(stream)
        engine.check()
    for stream in streams:
        stream.close()
    run_to_end(engine)
    assert_all_free(engine)


def test_a_request_that_has_ended_normally_is_not_aborted_by_its_stream() -> None:
    engine, seen = new_engine(ALL), []
    engine.abort = lambda number: seen.append((number, number in engine._live))  # type: ignore[method-assign]
    list(engine.stream(PROMPT, KEEP, "y"))
    assert [alive for _, alive in seen] == [False]


def test_a_name_is_free_again_at_once_and_a_taken_one_is_refused(tmp_path: Path) -> None:
    engine = new_engine({"a": "x"})
    engine.add_request(PROMPT, KEEP, "a")
    engine.step()
    with pytest.raises(AdapterError, match="already registered"):
        engine.add_adapter("a", adapter_folder("y"))
    engine.remove_adapter("a")
    with pytest.raises(AdapterError):
        engine.add_adapter("a", tmp_path)
    assert engine.adapters == []
    engine.add_adapter("a", adapter_folder("y"))
    run_to_end(engine)
    assert_right(engine.generate([PROMPT], KEEP, "a")[0], "y", KEEP)
    assert_all_free(engine)


# --- the list ---


def test_the_list_of_faults_names_tests_that_exist() -> None:
    """tests/README.md says where each class of faults is kept out; a test that is renamed must be renamed there."""
    folder = Path(__file__).parent
    named = re.findall(r"\b(test_\w+\.py)::(\w+|\*)", (folder / "README.md").read_text("utf-8"))
    assert len(named) > 60
    for file, name in named:
        code = (folder / file).read_text("utf-8")
        assert name == "*" or f"def {name}(" in code, f"{file} has no {name}"
