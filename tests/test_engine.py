"""Engine: what a caller sees. Answers are those of the dense model, texts those of the tokens, refusals carry numbers.

Faults (files that vanish, tokenizers that raise, aborts) are in test_engine_faults.py; all of it at random, in
test_engine_machine.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import (
    ADAPTERS,
    CONFIG,
    DIFFERENT,
    adapter_folder,
    adapter_id,
    assert_all_free,
    assert_right,
    delay_loads,
    image_bytes,
    model_folder,
    new_engine,
    reference_logits,
    run_to_end,
)
from tiny import model_tensors, write_adapter_folder, write_model_folder, write_tokenizer

from slora_ref import Completion, Engine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from slora_ref.clock import SimulatedClock
from slora_ref.errors import AdapterError, AdapterWarning, ConfigError, RequestError, SloraError, UnknownAdapter
from slora_ref.policy import Ordering
from slora_ref.tokenizer import Tokenizer

ALL = {name: name for name in ADAPTERS}
KEEP = SamplingParams(max_tokens=12, keep_logits=True, ignore_eos=True)
PROMPTS = [
    list(range(start, start + length)) for start, length in ((3, 9), (40, 1), (11, 30), (60, 20), (7, 5), (2, 14))
]


def tokens_of(engine: Engine, prompt: list[int], params: SamplingParams, adapter: str | None = None) -> list[int]:
    return list(engine.generate([prompt], params, adapter)[0].token_ids)


# --- answers ---

MODES = {
    "as it comes": {},
    "chunks of a prompt": {"max_batched_tokens": 9, "max_running": 8},
    "whole prompts": {"chunked_prefill": False, "max_batched_tokens": 45},
    "the paper's separate prefill": {"separate_prefill": True},
    "separate chunks": {"separate_prefill": True, "max_batched_tokens": 9},
    "joining every third step": {"join_every": 3},
    "two at a time": {"max_running": 2},
    "one adapter at a time": {"max_adapters": 1},
    "adapters dropped at once": {"eviction": "eager"},
    "host memory for one adapter": {"host_bytes": image_bytes("x"), "max_adapters": 2},
    "double precision": {"dtype": "float64"},
    "a small pool": {"pool_pages": 590},
    "a small pool, expecting": {"pool_pages": 590, "admission": "expected"},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_the_dense_models_in_every_mode(mode: str) -> None:
    """Prefill and every decode step: base and all adapters in one batch, under names that are not those of others."""
    engine = new_engine(ALL, **MODES[mode])
    names = [*ADAPTERS, None, *reversed(ADAPTERS), None]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(names))]
    done = engine.generate(prompts, KEEP, names)
    for prompt, name, completion in zip(prompts, names, done, strict=True):
        assert (completion.adapter, completion.prompt_ids) == (name, tuple(prompt))
        assert_right(completion, name, KEEP)
        if name is not None:
            base = reference_logits(None, (*completion.prompt_ids, *completion.token_ids))[:-1]
            gaps = np.abs(np.array(completion.logits) - base).max(axis=1)
            assert gaps[:1].max() > 0  # even a prompt of one token
            assert (gaps[len(prompt) :] > DIFFERENT).all(), "a decode step without the adapter"
    assert_all_free(engine)


def test_preempted_is_undisturbed() -> None:
    """Too many admitted for the pool: the newest are computed again, and say what they would have said anyway."""
    engine = new_engine(ALL, pool_pages=150, admission="expected")
    engine.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=2))  # a low mean: the next are expected to be short
    for params in (replace(KEEP, max_tokens=20), replace(KEEP, max_tokens=20, temperature=1.0, seed=9)):
        done = engine.generate([[5, 6, 7]] * 8, params, [None, "y", "o", "qv"] * 2)
        for completion in done:
            assert_right(completion, completion.adapter, params)
        assert max(completion.preemptions for completion in done) > 0
    assert_all_free(engine)


def test_sampled_tokens_depend_on_the_requests_seed_alone() -> None:
    engine, params = new_engine(ALL), SamplingParams(max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, seed=3)
    assert_right(engine.generate([PROMPTS[0]], params, "qv")[0], "qv", params)
    crowd = [replace(params, seed=seed) for seed in (1, 2, 3, 4)]
    together = engine.generate([PROMPTS[0]] * 4, crowd, "qv")
    assert len({one.token_ids for one in together}) == 4
    for completion, how in zip(together, crowd, strict=True):
        assert_right(completion, "qv", how)


def test_without_a_seed_requests_differ_and_the_engines_seed_decides() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    first, again, other = (
        [one.token_ids for one in new_engine(seed=seed).generate([[1, 2, 3]] * 3, params)] for seed in (7, 7, 8)
    )
    assert first == again
    assert len({*first, *other}) == 6


def test_the_order_of_adapters_in_a_batch_changes_nothing() -> None:
    """A,B,A,-,C,-,A of different lengths: the batch shrinks from within, and every row keeps its adapter."""
    engine, names = new_engine(ALL), ["x", "y", "x", None, "layers", None, "x"]
    params = [replace(KEEP, max_tokens=n) for n in (9, 2, 7, 3, 1, 12, 5)]
    for completion, how in zip(engine.generate([PROMPTS[0]] * 7, params, names), params, strict=True):
        assert_right(completion, completion.adapter, how)


# --- text ---


def test_a_text_is_encoded_and_decoded_by_the_folders_tokenizer() -> None:
    engine, tokenizer = new_engine(ALL), Tokenizer.from_folder(model_folder())
    completion = engine.generate(["a word"], KEEP, "x")[0]
    assert list(completion.prompt_ids) == tokenizer.encode("a word")
    assert completion.prompt_ids[0] == CONFIG.bos_token_id
    assert completion.text == tokenizer.decode(completion.token_ids)
    assert completion.text.strip()


def test_the_pieces_of_a_stream_join_to_the_whole() -> None:
    engine = new_engine(ALL)
    whole = engine.generate(["abc"], KEEP, "qv")[0]
    pieces = list(engine.stream("abc", KEEP, "qv"))
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == whole.text == pieces[-1].completion.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    assert len(pieces) == KEEP.max_tokens + 1


@pytest.mark.parametrize("places", [(4, 5), (4, 7), (0, 1), (11, 12)])
def test_a_stop_string_ends_the_text_before_it(places: tuple[int, int]) -> None:
    engine = new_engine(ALL)
    whole = engine.generate(["abc"], KEEP, "qv")[0]
    stop = whole.text[slice(*places)]
    params = replace(KEEP, stop=("never this", stop))
    pieces = list(engine.stream("abc", params, "qv"))
    done = pieces[-1].completion
    assert done.text == whole.text[: whole.text.index(stop)] == "".join(piece.text for piece in pieces)
    assert done.finish_reason is FinishReason.STOP
    assert done.token_ids == whole.token_ids[: whole.text.index(stop) + len(stop)]


def test_end_tokens_and_stop_tokens_end_the_text_unless_ignored() -> None:
    engine = new_engine(ALL)
    whole = engine.generate([PROMPTS[0]], KEEP, "qv")[0].token_ids
    first = next(i for i in range(2, 12) if whole[i] not in whole[:i])
    params = SamplingParams(max_tokens=12, stop_token_ids=(whole[first],), ignore_eos=True)
    done = engine.generate([PROMPTS[0]], params, "qv")[0]
    assert (done.token_ids, done.finish_reason) == (whole[: first + 1], FinishReason.STOP)
    engine.model_config = replace(CONFIG, eos_token_ids=(whole[first], 96))
    done = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=12), "qv")[0]
    assert (done.token_ids, done.finish_reason) == (whole[: first + 1], FinishReason.STOP)
    done = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=12, ignore_eos=True), "qv")[0]
    assert (done.token_ids, done.finish_reason) == (whole, FinishReason.LENGTH)


def test_one_token_is_a_request() -> None:
    done = new_engine(ALL).generate([[5]], SamplingParams(max_tokens=1, keep_logits=True), "x")[0]
    assert len(done.token_ids) == len(done.logits) == 1
    assert_right(done, "x", SamplingParams(max_tokens=1, keep_logits=True))


# --- logits and log-probabilities ---


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_log_probabilities_of_each_token_are_those_before_temperature(temperature: float) -> None:
    params = SamplingParams(max_tokens=6, logprobs=3, temperature=temperature, seed=1, ignore_eos=True)
    plain = replace(params, logprobs=0)
    with_three, with_none = new_engine(ALL).generate([PROMPTS[0]] * 2, [params, plain], "qv")
    ids = (*with_three.prompt_ids, *with_three.token_ids)
    rows = reference_logits("qv", ids)[len(PROMPTS[0]) - 1 : -1].astype(np.float64)
    assert len(with_three.logprobs) == len(with_none.logprobs) == 6
    for row, token, three, none in zip(
        rows, with_three.token_ids, with_three.logprobs, with_none.logprobs, strict=True
    ):
        want = row - np.log(np.exp(row).sum())
        likeliest = np.argsort(-row)[:3].tolist()
        assert set(three) == {token, *likeliest}
        assert list(none) == [token]
        for index, value in (three | none).items():
            assert value == pytest.approx(want[index], abs=1e-4)


def test_logits_and_log_probabilities_are_kept_only_when_asked_for() -> None:
    done = new_engine().generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0]
    assert done.logits == done.logprobs == ()


def test_kept_logits_do_not_keep_those_of_others_in_memory() -> None:
    done = new_engine().generate([[1, 2, 3]] * 4, [KEEP] * 2 + [SamplingParams(max_tokens=12)] * 2)[0]
    assert all(row.base is None for row in done.logits)


def test_ids_that_no_token_has_are_never_sampled_and_unknown_to_the_tokenizer_are_no_text(tmp_path: Path) -> None:
    """A head of 128 rows that win every argmax; and ids 95 and 96, which the tokenizer does not know."""
    tensors = model_tensors(CONFIG, seed=0)
    rng = np.random.default_rng(0)
    rows = 50 * rng.standard_normal((31, CONFIG.hidden_size)).astype(np.float32)
    tensors["lm_head.weight"] = np.concatenate([tensors["lm_head.weight"], rows])
    tensors["model.embed_tokens.weight"] = np.concatenate([tensors["model.embed_tokens.weight"], rows])
    folder = write_model_folder(tmp_path, CONFIG, tensors=tensors)
    write_tokenizer(folder, replace(CONFIG, vocab_size=92))
    engine = Engine.from_pretrained(folder, EngineConfig(pool_pages=500, max_running=4))
    for temperature in (0.0, 5.0):
        params = replace(KEEP, temperature=temperature, seed=0, logprobs=97, max_tokens=15)
        for prompt in PROMPTS[:3]:
            done = engine.generate([prompt], params)[0]
            assert_right(done, None, params)
            assert max(done.token_ids) < 97
            assert all(len(each) == 97 for each in done.logprobs)
            assert len(done.text) == sum(token < 90 for token in done.token_ids)
        assert max(done.token_ids) < 97
    unknown = engine.generate([[95, 96, 1]], replace(KEEP, max_tokens=1))[0]
    assert unknown.finish_reason is FinishReason.LENGTH


# --- refusals ---


@contextmanager
def no_file_and_no_socket() -> Iterator[None]:
    """Fails if a file is opened or a connection made meanwhile."""
    seen, active = [], True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if active and event in ("open", "socket.connect", "socket.getaddrinfo", "os.listdir", "os.scandir"):
            seen.append((event, arguments))

    sys.addaudithook(hook)  # cannot be taken out again, hence `active`
    yield
    active = False
    assert not seen


NAMES_OF_NO_ADAPTER = [
    "unknown", "", "X", "x ", "base:unknown", "a/b", "gone", "../secret", "/etc/passwd", "a/../../b", "%2e%2e", "None",
    "http://169.254.169.254/", "x\0", "n" * 10_000,
]  # fmt: skip


def test_what_has_no_effect_in_an_adapter_is_told_to_the_caller(tmp_path: Path) -> None:
    """Most of its modules missing: it would answer nearly as the base model, which is what a wrong file looks like."""
    engine, ranks = new_engine(), {(0, "q_proj"): 4}
    partial = write_adapter_folder(tmp_path, CONFIG, ranks, target_modules=["q_proj", "v_proj"], rank_pattern={})
    with pytest.warns(AdapterWarning, match="1 of the [24] modules") as told:
        engine.add_adapter("partial", partial)
    assert told[0].filename == __file__
    with pytest.warns(AdapterWarning, match="1 of the [24] modules"):
        engine.replace_adapter("partial", partial)


@pytest.mark.parametrize("name", NAMES_OF_NO_ADAPTER, ids=lambda name: repr(name[:20]))
def test_an_unknown_name_is_an_error_and_never_the_base_model(name: str) -> None:
    engine = new_engine({"x": "x", "gone": "y"})
    engine.remove_adapter("gone")
    for call in (
        lambda: engine.add_request([1, 2], KEEP, name),
        lambda: engine.generate([[1, 2], [3]], KEEP, [None, name]),
        lambda: next(engine.stream([1, 2], KEEP, name)),
        lambda: engine.remove_adapter(name),
    ):
        with no_file_and_no_socket(), pytest.raises(UnknownAdapter, match=r"engine\.adapters") as error:
            call()
        assert len(str(error.value)) < 500
        assert not engine.has_work
    assert engine.adapters == ["x"]
    assert_all_free(engine)


@pytest.mark.parametrize(
    "name", ["", "a\0b", "a\nb", "n" * 257, "n" * 10_000, "\ud800", "\u202e"], ids=lambda n: repr(n[:9])
)
def test_a_malformed_name_cannot_be_registered(name: str) -> None:
    engine = new_engine()
    with pytest.raises(AdapterError, match="printable"):
        engine.add_adapter(name, adapter_folder("x"))
    assert engine.adapters == []


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "%2e%2e", "http://169.254.169.254/", "base", "x y", "名"])
def test_a_name_is_a_label_and_never_a_path(name: str) -> None:
    engine = new_engine({name: "qv"})
    assert_right(engine.generate([[4, 5]], KEEP, name)[0], "qv", KEEP)
    engine.remove_adapter(name)


def test_a_name_is_registered_once_and_a_refused_folder_changes_nothing(tmp_path: Path) -> None:
    engine = new_engine({"x": "x"})
    with pytest.raises(AdapterError, match="already registered; remove it first"):
        engine.add_adapter("x", adapter_folder("y"))
    with pytest.raises(AdapterError):
        engine.add_adapter("nothing", tmp_path)
    with pytest.raises(SloraError):
        engine.add_adapter("dora", write_adapter_folder(tmp_path / "dora", CONFIG, 2, use_dora=True))
    assert engine.adapters == ["x"]
    assert_right(engine.generate([[4, 5]], KEEP, "x")[0], "x", KEEP)


REFUSED = {
    "no tokens": ([], {}, "no tokens"),
    "a token too high": ([1, 97], {}, r"97 .* 0 \.\. 96"),
    "a negative token": ([1, -1], {}, r"-1 .* 0 \.\. 96"),
    "too long": ([1] * 50, {"max_tokens": 51}, r"50 tokens \+ max_tokens 51 .* 100"),
    "larger than the pool": (
        [1] * 30,
        {"max_tokens": 41},
        r"604 pages \(140 for 70 tokens, 464 for its adapter\).* 600",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(case: str) -> None:
    engine = new_engine({"x": "x"}, pool_pages=600, max_length=100)
    prompt, params, message = REFUSED[case]
    for call in (
        lambda: engine.add_request(prompt, SamplingParams(**params), "x"),
        lambda: engine.generate([[1, 2], prompt], SamplingParams(**params), "x"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    assert not engine.has_work
    assert engine.generate([[1] * 29], SamplingParams(max_tokens=40), "x")[0].finish_reason is FinishReason.LENGTH
    assert engine.generate([[1] * 60], SamplingParams(max_tokens=40))[0].finish_reason is FinishReason.LENGTH
    assert_all_free(engine)


def test_whole_prompts_must_fit_a_step_even_after_a_preemption() -> None:
    engine = new_engine(chunked_prefill=False, max_batched_tokens=20)
    with pytest.raises(RequestError, match=r"up to 21 tokens .* max_batched_tokens is 20"):
        engine.add_request([1] * 12, SamplingParams(max_tokens=10))
    engine.add_request([1] * 12, SamplingParams(max_tokens=9))
    run_to_end(engine)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),  # would never be reached exactly
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": "text"}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused_by_name(values: dict[str, object], name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is "):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_pages": 3}, "3 pages .* two tokens, which take 4"),
        ({"max_length": 513}, "513 .* 512"),
        ({"max_running": 64, "max_batched_tokens": 64}, "64 must be above max_running 64"),
        ({"admission": "hope"}, "'max_tokens' or 'expected'|max_tokens or expected"),
        ({"dtype": "float16"}, "float32 or float64"),
        ({"join_every": 0}, "at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_numbers(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_engine(**options)


def test_one_for_all_or_one_for_each() -> None:
    engine = new_engine(ALL)
    assert [one.adapter for one in engine.generate([[1], [2]], KEEP, "y")] == ["y", "y"]
    assert [one.adapter for one in engine.generate([[1], [2]], [KEEP, KEEP], ("y", None))] == ["y", None]
    assert engine.generate([], KEEP, "y") == []
    with pytest.raises(RequestError, match="3 adapters for 2 prompts"):
        engine.generate([[1], [2]], KEEP, ["y"] * 3)
    with pytest.raises(RequestError, match="1 params for 2 prompts"):
        engine.generate([[1], [2]], [KEEP])
    assert not engine.has_work


@pytest.mark.parametrize("prompts", ["one text", [1, 2, 3], [[1.5, 2.0]], [None], [[1, None]]])
def test_what_is_no_list_of_prompts_is_refused(prompts: Any) -> None:
    """A text is a sequence of texts, one character each, and 1.5 would be cut to 1: neither was meant."""
    engine = new_engine()
    with pytest.raises(RequestError, match=r"prompts is one text|a prompt is a text or a sequence of token ids"):
        engine.generate(prompts, KEEP)
    assert not engine.has_work


def test_ids_may_be_an_array() -> None:
    engine = new_engine()
    for done in engine.generate([np.array([3, 4]), (3, 4)], KEEP):
        assert_right(done, None, KEEP)


def test_a_model_without_a_tokenizer_serves_ids(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, CONFIG)
    (folder / "tokenizer.json").unlink()
    engine = Engine.from_pretrained(folder, EngineConfig(pool_pages=500, max_running=4))
    done = engine.generate([[1, 2, 3]], KEEP)[0]
    assert done.text == ""
    assert_right(done, None, KEEP)
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        engine.add_request("text")
    with pytest.raises(RequestError, match="stop_token_ids"):
        engine.add_request([1], SamplingParams(stop=("a",)))
    assert not engine.has_work


# --- step, streams, news ---


def collect(news: list[RequestOutput], into: dict[int, list[RequestOutput]]) -> None:
    for piece in news:
        into.setdefault(piece.request_id, []).append(piece)


def whole_story(pieces: list[RequestOutput]) -> Completion:
    """All tokens and texts of a request came once, in order, and its completion last."""
    done = pieces[-1].completion
    assert done is not None
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert tuple(token for piece in pieces for token in piece.token_ids) == done.token_ids
    assert "".join(piece.text for piece in pieces) == done.text
    return done


def test_an_idle_engine_has_no_news() -> None:
    engine = new_engine(ALL)
    assert (engine.step(), engine.has_work, engine.steps) == ([], False, 0)


def test_every_request_tells_its_whole_story_through_step() -> None:
    engine, stories = new_engine(ALL, max_running=3), {}
    ids = [engine.add_request(prompt, KEEP, name) for prompt, name in zip(PROMPTS, ADAPTERS, strict=True)]
    while engine.has_work:
        collect(engine.step(), stories)
    assert sorted(stories) == ids
    for name, request_id in zip(ADAPTERS, ids, strict=True):
        assert_right(whole_story(stories[request_id]), name, KEEP)


def test_leaving_a_stream_early_aborts_it_and_loses_no_news_of_others() -> None:
    engine, stories = new_engine(ALL), {}
    others = [engine.add_request(PROMPTS[0], replace(KEEP, max_tokens=n), "qv") for n in (1, 4, 6)]
    for count, _ in enumerate(engine.stream(PROMPTS[1], KEEP, "y")):
        if count == 2:
            break
    assert "y" in engine.adapters
    assert engine.store.lookup("y").users == 0
    while engine.has_work:
        collect(engine.step(), stories)
    assert sorted(stories) == others
    for request_id in others:
        whole_story(stories[request_id])
    assert_all_free(engine)


def test_streams_can_be_read_side_by_side() -> None:
    """Each gets all of its own pieces, whichever of them happens to turn the engine."""
    engine = new_engine(ALL)
    want = engine.generate([PROMPTS[0], PROMPTS[1]], KEEP, ["x", "qv"])
    streams = {0: engine.stream(PROMPTS[0], KEEP, "x"), 1: engine.stream(PROMPTS[1], KEEP, "qv")}
    pieces: dict[int, list[RequestOutput]] = {0: [], 1: []}
    for turn in (0, 1, 0, 1, 1, 1, 0, 0):
        pieces[turn].append(next(streams[turn]))
    for turn in (1, 0):
        pieces[turn] += list(streams[turn])
        assert whole_story(pieces[turn]).token_ids == want[turn].token_ids
    assert_all_free(engine)


def test_generate_leaves_the_news_of_others_to_step() -> None:
    engine, stories = new_engine(ALL), {}
    waiting = engine.add_request(PROMPTS[0], KEEP, "y")
    engine.generate([PROMPTS[1]], replace(KEEP, max_tokens=30))
    while engine.has_work:
        collect(engine.step(), stories)
    assert list(stories) == [waiting]
    assert_right(whole_story(stories[waiting]), "y", KEEP)


def test_abort_tells_what_there_was_and_ends_once() -> None:
    engine, stories = new_engine(ALL), {}
    request_id = engine.add_request("abc", replace(KEEP, max_tokens=50), "y")
    for _ in range(6):
        collect(engine.step(), stories)
    assert engine.abort(request_id)
    assert engine.pool.usage().kv == 0
    assert not engine.abort(request_id)
    assert not engine.abort(12345)
    collect(engine.step(), stories)
    done = whole_story(stories[request_id])
    assert done.finish_reason is FinishReason.ABORT
    assert 0 < len(done.token_ids) < 50
    assert not engine.has_work
    assert_all_free(engine)


def test_times_are_the_clocks() -> None:
    engine = new_engine(ALL)
    engine.clock = clock = SimulatedClock(5.0)
    first = engine.add_request(PROMPTS[0], KEEP, "x")
    done = {}
    while engine.has_work:
        clock.advance(1.0)
        done |= {news.request_id: news.completion for news in engine.step() if news.finished}
    assert done[first].arrival == 5.0
    assert done[first].first_token_at >= 6.0
    assert done[first].finished_at == done[first].first_token_at + KEEP.max_tokens - 1


def test_a_policy_may_drop_requests_and_they_end_as_aborted() -> None:
    class OddOnesOnly:
        def order(self, waiting: list, running: list, now: float) -> Ordering:
            return Ordering([s for s in waiting if s.number % 2], [s for s in waiting if not s.number % 2])

    engine = Engine.from_pretrained(model_folder(), EngineConfig(pool_pages=500, max_running=4), OddOnesOnly())
    engine.add_adapter("y", adapter_folder("y"))
    done = engine.generate([[1, 2]] * 4, KEEP, "y")
    assert [one.finish_reason for one in done] == [FinishReason.ABORT, FinishReason.LENGTH] * 2
    assert "dropped" in done[0].error
    assert_all_free(engine)


# --- adapters come and go ---


def test_a_name_used_again_is_another_adapter_also_while_the_old_one_runs() -> None:
    engine, stories = new_engine({"a": "x", "b": "y"}), {}
    old = engine.add_request(PROMPTS[0], KEEP, "a")
    for _ in range(4):
        collect(engine.step(), stories)
    engine.remove_adapter("a")
    with pytest.raises(UnknownAdapter):
        engine.add_request(PROMPTS[0], KEEP, "a")
    engine.add_adapter("a", adapter_folder("qv"))
    new = engine.add_request(PROMPTS[0], KEEP, "a")
    engine.check()
    while engine.has_work:
        collect(engine.step(), stories)
        engine.check()
    assert_right(whole_story(stories[old]), "x", KEEP)
    assert_right(whole_story(stories[new]), "qv", KEEP)
    assert_all_free(engine)


def test_one_long_prompt_under_every_adapter_and_version_shares_nothing() -> None:
    """What a prefix cache keyed by name, path or text would get wrong."""
    prompt, engine = list(range(10, 50)), new_engine({"a": "x", "b": "qv"})
    for name, weights in ((None, None), ("a", "x"), ("b", "qv"), ("a", "x")):
        assert_right(engine.generate([prompt], KEEP, name)[0], weights, KEEP)
    for weights in ("layers", "o"):
        engine.remove_adapter("a")
        engine.add_adapter("a", adapter_folder(weights))
        assert_right(engine.generate([prompt], KEEP, "a")[0], weights, KEEP)
    assert_right(engine.generate([prompt], KEEP)[0], None, KEEP)


def test_a_reused_slot_has_nothing_of_the_adapter_before() -> None:
    """One slot: rank 16 everywhere, rank 4 at q alone, none, then the second name with other weights; as if fresh."""
    engine = new_engine({"a": "x", "b": "y"}, max_adapters=1)
    for name, weights in (("a", "x"), ("b", "y"), (None, None), ("b", "qv"), ("a", "x")):
        if weights == "qv":
            engine.remove_adapter("b")
            engine.add_adapter("b", adapter_folder("qv"))
        got = engine.generate([PROMPTS[0]], KEEP, name)[0]
        fresh = new_engine({"other": weights} if weights else {})
        want = fresh.generate([PROMPTS[0]], KEEP, "other" if weights else None)[0]
        assert (np.array(got.logits) == np.array(want.logits)).all()
        assert_right(got, weights, KEEP)


def host_copies(engine: Engine) -> dict[Any, bytes]:
    """What is in host memory, by source."""
    return {source: entry.image.tobytes() for source, entry in engine.store.host._entries.items()}


def test_an_adapter_does_not_change_by_being_evicted_and_loaded_again() -> None:
    engine = new_engine({"a": "x", "b": "z"}, max_adapters=1)
    seen: dict[str, np.ndarray] = {}
    for name in "ababa":
        logits = np.array(engine.generate([PROMPTS[0]], KEEP, name)[0].logits)
        assert (seen.setdefault(name, logits) == logits).all()
        checksum = host_copies(engine)
    assert engine.prefetcher.counts.loads == 5
    assert engine.prefetcher.counts.evictions == 4
    assert checksum == host_copies(engine)


def test_an_idle_adapter_stays_until_its_pages_are_wanted_or_not_at_all() -> None:
    lazy, eager = new_engine(ALL), new_engine(ALL, eviction="eager")
    for engine in (lazy, eager):
        for name in ("y", "o", "y"):
            engine.generate([[1, 2]], KEEP, name)
    assert (lazy.prefetcher.counts.loads, lazy.pool.usage().adapter) == (2, 24)
    assert (eager.prefetcher.counts.loads, eager.pool.usage().adapter) == (3, 0)


def test_names_that_share_a_folder_share_the_host_copy_but_no_pages() -> None:
    engine = new_engine({f"name {i}": "qv" for i in range(20)})
    done = engine.generate([[1, 2, 3]] * 8, KEEP, [f"name {i}" for i in range(8)])
    assert len({one.token_ids for one in done}) == 1
    assert len(engine.store.host) == 1
    assert engine.pool.usage().adapter == 8 * 21


# --- admission ---


def test_slots_count_what_runs_and_what_is_on_its_way() -> None:
    """Two slots; a chunked prefill of A under way, B running, C waits; the base model needs no slot."""
    engine = new_engine(ALL, max_adapters=2, max_batched_tokens=10, max_running=8)
    loader = delay_loads(engine)
    loader.polls = {adapter_id(engine, "z"): 1}
    engine.add_request(PROMPTS[2], KEEP, "y")
    engine.add_request(PROMPTS[1], replace(KEEP, max_tokens=30), "o")
    for _ in range(3):
        engine.step()
        engine.check()
    assert engine.scheduler.running[0].uncomputed > 1, "the prefill is still under way"
    engine.add_request(PROMPTS[0], KEEP, "z")
    engine.step()
    assert [sequence.number for sequence in engine.scheduler.waiting] == [2]
    assert adapter_id(engine, "z") not in loader.started
    base = engine.add_request(PROMPTS[1], KEEP)
    done = run_to_end(engine)
    assert_right(done[2], "z", KEEP)
    assert_right(done[base], None, KEEP)


def test_nobody_starves_behind_requests_of_a_loaded_adapter() -> None:
    """One slot, a new request of A every step, one B: B starts when the requests before it have ended."""
    engine, ends = new_engine({"a": "y", "b": "o"}, max_adapters=1, max_running=4), {}
    late, started = -1, None
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for step in range(120):
        number = engine.add_request([1, 2, 3], params, "b" if step == 2 else "a")
        if step == 2:
            late = number
        for news in engine.step():
            ends |= {news.request_id: step} if news.finished else {}
            if news.request_id == late and started is None:
                started = step
        engine.check()
    before = max(ends[number] for number in range(late))
    assert started - before <= 3, (started, before)  # to evict, to load, to run
    assert ends[late] < 30


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    engine, started = new_engine(pool_pages=200, max_running=16, admission="max_tokens"), {}
    running = engine.add_request([1] * 5, SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    large = engine.add_request([1] * 88, SamplingParams(max_tokens=11, ignore_eos=True))  # does not fit beside it
    small = [engine.add_request([1] * 5, SamplingParams(max_tokens=3, ignore_eos=True)) for _ in range(20)]
    for step in range(200):
        for news in engine.step():
            started.setdefault(news.request_id, step)
        engine.check()
    assert started.keys() == {running, large, *small}
    assert started[large] <= 10
    assert started[large] <= min(started[number] for number in small)
