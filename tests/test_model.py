"""LlamaModel over the pool: the equalities of meaning, each with the opposite that shows that the check can fail.

Batched = one by one, paged = contiguous, cached = whole, chunked = whole, merged = unmerged, preempted = undisturbed.
The other side is Reference: dense W + s B A, one text, no pages. Free pages hold NaN and pages come in random order.
"Matches" is a largest error of a logit below 1e-4; and the logits of an adapter differ from the base model's by 0.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config

from slora_ref.adapter import Adapter, AdapterHeader
from slora_ref.batch import Batch, arrange
from slora_ref.checkpoint import ModelWeights, random_weights
from slora_ref.checkpoint.fingerprint import Fingerprint
from slora_ref.config import TARGETS, ModelConfig, RopeConfig
from slora_ref.model import LlamaModel
from slora_ref.ops import NumpyOps
from slora_ref.pager import AdapterShape, PageLayout, PagePool
from slora_ref.reference import Reference
from slora_ref.request import BASE_MODEL, Request, SamplingParams, Sequence
from slora_ref.step import Work
from slora_ref.store.pack import pack

TOLERANCE = 1e-4
DIFFERENT = 0.1
Ranks = Mapping[tuple[int, str], int]


# --- adapters and the model under test ---


def every(rank: int, targets: Iterable[str] = TARGETS, layers: int = 2) -> dict[tuple[int, str], int]:
    """One rank at these targets of every layer."""
    return {(layer, target): rank for layer in range(layers) for target in targets}


def make_adapter(config: ModelConfig, ranks: Ranks, seed: int, scale: float = 1.0, sd: float = 0.3) -> Adapter:
    """Random A and B, both non-zero; the scale differs by module, so that a wrong one shows."""
    rng = np.random.default_rng((seed, 77))
    table = np.zeros((config.num_layers, len(TARGETS)), np.int32)
    scales, a, b = np.zeros(table.shape, np.float32), {}, {}
    for (layer, target), rank in ranks.items():
        module, (d_in, d_out) = (layer, TARGETS.index(target)), config.target_shape(target)
        table[module], scales[module] = rank, scale * (1 + 0.25 * module[1] + 0.1 * layer)
        a[module] = (rng.standard_normal((rank, d_in)) * sd / rank**0.5).astype(np.float32)
        b[module] = (rng.standard_normal((d_out, rank)) * sd).astype(np.float32)
    fingerprint = Fingerprint(0, 0, b"", 0, 0)
    header = AdapterHeader(Path(f"adapter-{seed}"), table, scales, len(a), len(a), "float32", fingerprint)
    return Adapter(header, a, b)


class Served:
    """The model over a pool, driven by hand: no scheduler, no engine."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        adapters: Mapping[int, Adapter] | None = None,
        page_order: int = 0,
        slots: int = 4,
        pages: int = 6000,
        max_positions: int = 600,
    ) -> None:
        layout = PageLayout(config)
        self.pool = PagePool(layout, pages, 12, max_positions, slots, poison=True, shuffle_seed=page_order)
        self.model = LlamaModel(config, weights, NumpyOps(np.float32), self.pool, max_positions)
        for adapter_id, adapter in (adapters or {}).items():
            self.load(adapter_id, adapter)

    def load(self, adapter_id: int, adapter: Adapter) -> None:
        self.pool.open_adapter(adapter_id, AdapterShape(adapter.header.ranks, adapter.header.scales))
        self.pool.write_adapter(adapter_id, pack(adapter, self.pool.layout, np.float32))

    def open(self, ids: list[int], adapter_id: int = BASE_MODEL) -> Sequence:
        """A sequence whose logits are all kept."""
        request = Request(prompt_ids=tuple(ids), params=SamplingParams(keep_logits=True))
        return Sequence(0, request, adapter_id, seed=0, slot=self.pool.open_sequence())

    def step(self, *parts: tuple[Sequence, int]) -> None:
        """Computes the next `count` tokens of each sequence, all in one batch."""
        work = arrange([Work(sequence, sequence.computed, count) for sequence, count in parts if count])
        logits = self.model.forward(Batch.build(work, self.pool))
        for item in work:
            part, logits = logits[: item.count], logits[item.count :]
            item.sequence.logits += list(part)
            item.sequence.computed += item.count
        self.pool.check()

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's pages and slot away; its tokens will be computed anew, in another slot."""
        self.pool.close_sequence(sequence.slot)
        sequence.slot, sequence.computed, sequence.logits = self.pool.open_sequence(), 0, []

    def whole(self, ids: list[int], adapter_id: int = BASE_MODEL) -> np.ndarray:
        """The logits of one text, alone, in one step."""
        sequence = self.open(ids, adapter_id)
        self.step((sequence, len(ids)))
        self.pool.close_sequence(sequence.slot)
        return np.array(sequence.logits)


def text(seed: int, length: int, vocab: int = 97) -> list[int]:
    return np.random.default_rng((seed, 5)).integers(0, vocab, length).tolist()


def assert_matches(got: object, want: np.ndarray) -> None:
    error = np.abs(np.asarray(got) - want).max()
    assert error < TOLERANCE, f"largest error of a logit {error:.3g}"


def assert_differs(got: object, other: np.ndarray) -> None:
    gap = np.abs(np.asarray(got) - other).max()
    assert gap > DIFFERENT, f"the logits differ by {gap:.3g} only: the check could not fail"


T0 = tiny_config()
WEIGHTS = random_weights(T0, seed=1)
BASE = Reference(T0, WEIGHTS)
ADAPTERS = {
    0: make_adapter(T0, every(16), seed=0, scale=0.5),
    1: make_adapter(T0, every(3, ("q_proj", "v_proj")), seed=1, scale=2.0),
    2: make_adapter(
        T0, {(0, "q_proj"): 33, (1, "o_proj"): 5, (0, "down_proj"): 8, (1, "down_proj"): 2}, seed=2, scale=2
    ),
    3: make_adapter(T0, every(1), seed=3, scale=1.0),
}
REFERENCES = {BASE_MODEL: BASE} | {i: Reference(T0, WEIGHTS, adapter) for i, adapter in ADAPTERS.items()}


# --- merged = unmerged ---

SETS: dict[str, Ranks] = {target: every(8, (target,)) for target in TARGETS} | {
    "all seven": every(16),
    "rank 1": every(1),
    "rank 64": every(64),
    "q and v": every(8, ("q_proj", "v_proj")),
    "k and up": every(7, ("k_proj", "up_proj")),
    "q in one layer, o in the other": {(0, "q_proj"): 8, (1, "o_proj"): 8},
    "one layer": {(1, target): 8 for target in TARGETS},
    "a rank for each module": {
        (layer, target): 1 + (5 * i + 11 * layer) % 17 for layer in range(2) for i, target in enumerate(TARGETS)
    },
    "ranks that fall and rise": {(0, "q_proj"): 2, (1, "q_proj"): 30, (0, "v_proj"): 30, (1, "v_proj"): 2},
}


@pytest.mark.parametrize("name", SETS)
def test_unmerged_is_merged_for_every_set_of_targets(name: str) -> None:
    adapter = make_adapter(T0, SETS[name], seed=4, scale=2.0)
    got = Served(T0, WEIGHTS, {9: adapter}).whole(text(0, 30), 9)
    assert_matches(got, Reference(T0, WEIGHTS, adapter).logits(text(0, 30)))
    assert_differs(got, BASE.logits(text(0, 30)))


@pytest.mark.parametrize("target", TARGETS)
def test_every_module_counts(target: str) -> None:
    """Without one module of one layer the logits would be others: none of the seven is lost among the rest."""
    for layer in range(2):
        ranks = {key: rank for key, rank in every(16).items() if key != (layer, target)}
        short = make_adapter(T0, ranks, seed=0, scale=0.5)
        full = ADAPTERS[0]
        for module in short.a:
            short.a[module], short.b[module] = full.a[module], full.b[module]
        without = Served(T0, WEIGHTS, {0: short}).whole(text(1, 20), 0)
        assert_matches(without, Reference(T0, WEIGHTS, short).logits(text(1, 20)))
        assert np.abs(without - REFERENCES[0].logits(text(1, 20))).max() > 100 * TOLERANCE


MODELS = {
    "heads wider than the residual": tiny_config(head_dim=32),
    "biases": tiny_config(attention_bias=True, mlp_bias=True),
    "tied head": tiny_config(tie_word_embeddings=True),
    "one key head for all": tiny_config(num_kv_heads=1),
    "a key head for each": tiny_config(num_kv_heads=4),
    "nothing divides": tiny_config(hidden_size=50, intermediate_size=70, num_heads=6, num_kv_heads=3, head_dim=10),
    "one layer": tiny_config(num_layers=1),
    "linear rope": tiny_config(rope=RopeConfig("linear", factor=4.0)),
    "llama3 rope": tiny_config(rope=RopeConfig("llama3", 5e5, 8.0, 64)),
    "yarn rope": tiny_config(rope=RopeConfig("yarn", factor=4.0, original_positions=16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_shape_of_model(name: str) -> None:
    config = MODELS[name]
    weights = random_weights(config, seed=2)
    adapter = make_adapter(config, every(9, layers=config.num_layers), seed=5, scale=0.5)
    served, reference = Served(config, weights, {0: adapter}), Reference(config, weights, adapter)
    ids = text(2, 80)
    assert_matches(served.whole(ids, 0), reference.logits(ids))
    assert_matches(served.whole(ids), Reference(config, weights).logits(ids))
    assert_differs(served.whole(ids, 0), served.whole(ids))


def test_the_base_model_merged_by_hand_is_the_adapter() -> None:
    """The same forward pass over changed weights: no difference but rounding, whatever Reference does."""
    adapter = ADAPTERS[0]
    layers = []
    for index, layer in enumerate(WEIGHTS.layers):
        delta = [
            float(adapter.header.scales[index, target]) * (adapter.b[index, target] @ adapter.a[index, target])
            for target in range(7)
        ]
        merged = {"qkv": layer.qkv + np.concatenate(delta[:3]), "o": layer.o + delta[3]}
        merged |= {"gate_up": layer.gate_up + np.concatenate(delta[4:6]), "down": layer.down + delta[6]}
        layers.append(replace(layer, **merged))
    merged_model = Served(T0, replace(WEIGHTS, layers=tuple(layers)))
    assert_matches(merged_model.whole(text(3, 40)), Served(T0, WEIGHTS, ADAPTERS).whole(text(3, 40), 0))


# --- cached = whole, chunked = whole ---


@pytest.mark.parametrize("adapter_id", REFERENCES)
def test_token_by_token_is_whole(adapter_id: int) -> None:
    """Every decode step, not the prefill alone, has the adapter and the cache."""
    ids, served = text(4, 40), Served(T0, WEIGHTS, ADAPTERS)
    sequence = served.open(ids, adapter_id)
    for _ in ids:
        served.step((sequence, 1))
    want = REFERENCES[adapter_id].logits(ids)
    assert_matches(sequence.logits, want)
    assert_differs(REFERENCES[adapter_id].logits([ids[0], *ids])[2:], want[1:])  # one place later all are others


@pytest.mark.parametrize("chunks", [(40,), (1, 39), (39, 1), (7, 7, 7, 7, 12), (16, 1, 1, 16, 1, 5), (17, 23)])
def test_chunked_is_whole(chunks: tuple[int, ...]) -> None:
    ids, served = text(5, 40), Served(T0, WEIGHTS, ADAPTERS)
    sequence = served.open(ids, 0)
    for count in chunks:
        served.step((sequence, count))
    assert_matches(sequence.logits, REFERENCES[0].logits(ids))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 400, 513])
def test_long_prompts_with_an_adapter(length: int) -> None:
    """The fault was NaN from unwritten padding of a tile, hence token 0 for ever; here all but the text is NaN."""
    ids = text(6, length)
    got = Served(T0, WEIGHTS, ADAPTERS).whole(ids, 0)
    assert np.isfinite(got).all()
    assert_matches(got, REFERENCES[0].logits(ids))
    assert_differs(got, BASE.logits(ids))


# --- batched = one by one ---

ORDERS = [(0, 1, 0, BASE_MODEL, 2, BASE_MODEL, 0), (BASE_MODEL,) * 3, (3, 2, 1, 0), (2, 2, 2)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [(1,) * 7, (5,) * 7, (17,) * 7, (17, 1, 5, 1, 17, 1, 5)])
def test_batched_is_one_by_one_in_any_order_of_adapters(order: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """Under load the wrong adapter was applied: three steps, the middle sequences gone in between."""
    served = Served(T0, WEIGHTS, ADAPTERS, page_order=3)
    texts = [text(10 + i, 60) for i in range(len(order))]
    sequences = [served.open(ids, adapter_id) for ids, adapter_id in zip(texts, order, strict=True)]
    served.step(*zip(sequences, rows, strict=False))
    middle = sequences[1 : len(order) // 2 + 1]
    for sequence in middle:
        served.pool.close_sequence(sequence.slot)
    rest = [sequence for sequence in sequences if sequence not in middle]
    served.step(*((sequence, 1) for sequence in rest))
    served.step(*((sequence, count) for sequence, count in zip(rest, (9, 1, 14, 1), strict=False)))
    for ids, sequence in zip(texts, sequences, strict=True):
        want = REFERENCES[sequence.adapter_id].logits(ids)[: len(sequence.logits)]
        assert_matches(sequence.logits, want)
        for other, reference in REFERENCES.items():
            if other != sequence.adapter_id:
                assert_differs(reference.logits(ids)[: len(sequence.logits)], want)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[list[int]], int]:
    """Sequences (adapter, length); for each step what each sequence does: so many rows, or -1, preempted."""
    sequences = draw(
        st.lists(st.tuples(st.sampled_from(sorted(REFERENCES)), st.integers(1, 30)), min_size=1, max_size=5)
    )
    action = st.one_of(st.integers(0, 12), st.sampled_from((-1, 1, 1, 30)))
    steps = draw(st.lists(st.lists(action, min_size=len(sequences), max_size=len(sequences)), max_size=6))
    return sequences, steps, draw(st.integers(0, 1000))


@given(drawn=schedules())
def test_any_schedule_is_one_by_one(drawn: tuple[list[tuple[int, int]], list[list[int]], int]) -> None:
    """Prefill, decode, chunks and preemptions of several adapters, in one batch: each sequence as if it were alone."""
    plan, steps, page_order = drawn
    served = Served(T0, WEIGHTS, ADAPTERS, page_order, pages=3000)
    texts = [text(20 + i, length) for i, (_, length) in enumerate(plan)]
    sequences = [served.open(ids, adapter) for ids, (adapter, _) in zip(texts, plan, strict=True)]
    for actions in [*steps, [30] * len(plan)]:
        for sequence, action in zip(sequences, actions, strict=True):
            if action < 0:
                served.preempt(sequence)
        parts = [(s, min(max(action, 0), s.uncomputed)) for s, action in zip(sequences, actions, strict=True)]
        if any(count for _, count in parts):
            served.step(*parts)
    for sequence, ids in zip(sequences, texts, strict=True):
        assert_matches(sequence.logits, REFERENCES[sequence.adapter_id].logits(ids))
        served.pool.close_sequence(sequence.slot)
    for adapter_id in ADAPTERS:
        served.pool.close_adapter(adapter_id)
    assert served.pool.free_pages == served.pool.num_pages


# --- paged = contiguous, preempted = undisturbed, and what a slot held before ---


def test_bits_do_not_depend_on_the_order_of_pages_or_on_slots() -> None:
    ids = text(7, 50)
    first, second = (
        Served(T0, WEIGHTS, ADAPTERS, page_order=1),
        Served(T0, WEIGHTS, dict(reversed(ADAPTERS.items())), 2),
    )
    for adapter_id in REFERENCES:
        second.open(text(8, 3))  # takes the slot that the sequence has in the first
        assert (first.whole(ids, adapter_id) == second.whole(ids, adapter_id)).all()


def test_preempted_is_undisturbed() -> None:
    """Recomputed at its own positions, while others have taken and left its pages."""
    served, ids = Served(T0, WEIGHTS, {i: ADAPTERS[i] for i in (0, 1)}, pages=800), text(9, 45)
    sequence, other = served.open(ids, 0), served.open(text(10, 60), 1)
    served.step((sequence, 30), (other, 20))
    first = list(sequence.logits)
    served.preempt(sequence)
    served.step((other, 40))
    served.pool.close_sequence(other.slot)
    served.step((sequence, 40))
    for _ in range(5):
        served.step((sequence, 1))
    assert_matches(sequence.logits, REFERENCES[0].logits(ids))
    assert_matches(sequence.logits[:30], np.array(first))
    assert_differs(sequence.logits[1:], np.array(sequence.logits)[:-1])


def test_a_reused_adapter_slot_has_nothing_of_the_adapter_before() -> None:
    """Rank 16 everywhere, then rank 4 at q alone, then none, then the first id with other weights: as if fresh."""
    small, other = make_adapter(T0, every(4, ("q_proj",)), seed=6, scale=4.0), make_adapter(T0, every(16), seed=7)
    ids, served = text(11, 25), Served(T0, WEIGHTS, slots=1)
    for adapter_id, adapter in ((5, ADAPTERS[0]), (6, small), (5, other), (6, small)):
        served.load(adapter_id, adapter)
        fresh = Served(T0, WEIGHTS, {adapter_id: adapter})
        assert (served.whole(ids, adapter_id) == fresh.whole(ids, adapter_id)).all()
        assert_matches(served.whole(ids, adapter_id), Reference(T0, WEIGHTS, adapter).logits(ids))
        assert_differs(served.whole(ids, adapter_id), BASE.logits(ids))
        served.pool.close_adapter(adapter_id)
        assert (served.whole(ids) == Served(T0, WEIGHTS).whole(ids)).all()


def test_an_adapter_does_not_change_when_it_is_loaded_again() -> None:
    """The fault was a scale folded in place into the copy that the next load started from."""
    ids, served = text(12, 20), Served(T0, WEIGHTS, slots=1)
    images = {i: pack(ADAPTERS[i], served.pool.layout, np.float32) for i in (0, 1)}
    sums, seen = {i: image.tobytes() for i, image in images.items()}, {}
    for adapter_id in (0, 1, 0, 1, 0):
        header = ADAPTERS[adapter_id].header
        served.pool.open_adapter(adapter_id, AdapterShape(header.ranks, header.scales))
        served.pool.write_adapter(adapter_id, images[adapter_id])
        logits = served.whole(ids, adapter_id)
        assert (seen.setdefault(adapter_id, logits) == logits).all()
        served.pool.close_adapter(adapter_id)
        assert images[adapter_id].tobytes() == sums[adapter_id]


def test_an_adapter_that_overflows_harms_its_own_rows_only() -> None:
    huge = make_adapter(T0, every(4), seed=8, sd=1e25)
    served = Served(T0, WEIGHTS, {0: ADAPTERS[0], 7: huge})
    texts = [text(13 + i, 12) for i in range(3)]
    sequences = [served.open(ids, adapter) for ids, adapter in zip(texts, (0, 7, BASE_MODEL), strict=True)]
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(2):
            served.step(*((sequence, 6) for sequence in sequences))
    assert not np.isfinite(sequences[1].logits).any()
    for ids, sequence in ((texts[0], sequences[0]), (texts[2], sequences[2])):
        assert_matches(sequence.logits, REFERENCES[sequence.adapter_id].logits(ids))


def test_a_read_of_a_free_page_would_show() -> None:
    """The opposite of all of the above: with a page of the text or of the adapter lost, the logits are NaN."""
    served = Served(T0, WEIGHTS, ADAPTERS)
    sequence = served.open(text(14, 12), 0)
    served.step((sequence, 10))
    for lost in (
        served.pool.sequence_pages[sequence.slot, 1, 4],
        served.pool.adapters.pages[served.pool.adapter_slot(0), 9],
    ):
        kept = served.pool.storage[:, lost].copy()
        served.pool.storage[:, lost] = np.nan
        logits = served.model.forward(Batch.build([Work(sequence, sequence.computed, 1)], served.pool))
        sequence.computed += 1
        assert np.isnan(logits).all()
        served.pool.storage[:, lost] = kept


def test_padded_rows_of_the_head_are_no_tokens() -> None:
    """97 tokens, a head of 128 rows: the rows beyond would win every argmax, and no tokenizer knows them."""
    rows = np.full((31, T0.hidden_size), 100.0, np.float32)
    padded = replace(WEIGHTS, lm_head=np.concatenate([WEIGHTS.lm_head, rows, -rows])[:128])
    got = Served(T0, padded, ADAPTERS).whole(text(15, 20), 0)
    assert got.shape == (20, 97)
    assert_matches(got, REFERENCES[0].logits(text(15, 20)))


def test_reference_in_float64_agrees() -> None:
    """Reference itself: in double precision it differs by rounding only, so TOLERANCE measures the model."""
    for adapter_id, reference in REFERENCES.items():
        exact = Reference(T0, WEIGHTS, ADAPTERS.get(adapter_id), np.float64).logits(text(16, 40))
        assert np.abs(reference.logits(text(16, 40)) - exact).max() < TOLERANCE / 2
