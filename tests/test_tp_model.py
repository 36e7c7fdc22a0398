"""The model on N shards is the model on one: logits, bytes of its collectives, and numbers of its adapters.

Shards are threads with a pool each, all laid out by the same decisions; free pages hold NaN and come in random order.
"Equal" is a largest difference of 1e-5 of the largest logit, in float32; and the bits are the same on every shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import on_all_shards
from test_model import every, make_adapter, text
from tiny import tiny_config

from slora_ref.adapter import Adapter
from slora_ref.batch import Batch, arrange
from slora_ref.checkpoint import ModelWeights, cut_weights, random_weights
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.errors import ConfigError
from slora_ref.model import LlamaModel
from slora_ref.ops import NumpyOps
from slora_ref.pager import AdapterShape, PageLayout, PagePool
from slora_ref.request import BASE_MODEL, Request, SamplingParams, Sequence
from slora_ref.step import Work
from slora_ref.store.pack import pack
from slora_ref.tp import Shard
from slora_ref.tp.communicator import Alone, Communicator
from slora_ref.tp.split import all_reduce_elements, lora_elements
from slora_ref.tp.threads import thread_communicators

RANKS = (1, 2, 3, 7, 8, 16, 64)
SHARDS = (2, 3, 4, 8)
EQUAL = 1e-5
POSITIONS = 64


def config_of(kv_heads: int, **others: int | bool) -> ModelConfig:
    return tiny_config(num_heads=24, num_kv_heads=kv_heads, head_dim=4, **others)


class Group:
    """A model on so many shards, driven by hand."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, adapters: Mapping[int, Adapter], shards: int, order: int = 3
    ) -> None:
        self.communicators: list[Communicator] = [Alone()] if shards == 1 else [*thread_communicators(shards)]
        self.pools, self.models = [], []
        for communicator in self.communicators:
            layout = PageLayout(config, communicator.shard)
            needed = sum(layout.adapter_pages(adapter.header.ranks.max(axis=0)) for adapter in adapters.values())
            pool = PagePool(layout, needed + 400, 12, POSITIONS, 12, poison=True, shuffle_seed=order)
            for adapter_id, adapter in adapters.items():
                pool.open_adapter(adapter_id, AdapterShape(adapter.header.ranks, adapter.header.scales))
                pool.write_adapter(adapter_id, pack(adapter, layout, np.float32))
            part = cut_weights(weights, config, communicator.shard)
            self.pools.append(pool)
            self.models.append(LlamaModel(config, part, NumpyOps(), pool, POSITIONS, communicator))

    def run(self, asks: list[tuple[int, list[int]]]) -> np.ndarray:
        """The logits of every token of some texts (adapter, tokens), half of each in one batch, the rest in a second;
        first all rows of the first batch."""
        halves = []
        sequences = [[self._open(pool, *ask) for ask in asks] for pool in self.pools]
        for first in (True, False):
            batches = [self._batch(*pair, first) for pair in zip(self.pools, sequences, strict=True)]
            logits = on_all_shards(self.communicators, partial(self._forward, batches))
            assert all(other.tobytes() == logits[0].tobytes() for other in logits), "shards differ"
            for name in ("k_pages", "v_pages", "token_ids"):
                assert all((getattr(each, name) == getattr(batches[0], name)).all() for each in batches)
            halves.append(logits[0])
        for pool in self.pools:
            pool.check()
            assert pool.adapters.pages.tobytes() == self.pools[0].adapters.pages.tobytes(), "tables are equal"
        return np.concatenate(halves)

    def _forward(self, batches: list[Batch], communicator: Communicator) -> np.ndarray:
        index = communicator.shard.index
        with np.errstate(over="ignore", invalid="ignore"):  # as executors do: what nobody reads is added up too
            return self.models[index].forward(batches[index])

    def _open(self, pool: PagePool, adapter_id: int, ids: list[int]) -> Sequence:
        request = Request(prompt_ids=tuple(ids), params=SamplingParams(keep_logits=True))
        return Sequence(0, request, adapter_id, seed=0, slot=pool.open_sequence())

    def _batch(self, pool: PagePool, sequences: list[Sequence], first: bool) -> Batch:
        half = [len(sequence.tokens) // 2 for sequence in sequences]
        parts = [(0, cut) if first else (cut, len(s.tokens) - cut) for s, cut in zip(sequences, half, strict=True)]
        work = [Work(s, start, count) for s, (start, count) in zip(sequences, parts, strict=True) if count]
        return Batch.build(arrange(work), pool)


def assert_equal(got: np.ndarray, want: np.ndarray) -> None:
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < EQUAL, f"the largest difference is {error:.3g} of the largest logit"
    best = np.sort(want, axis=1)
    clear = best[:, -1] - best[:, -2] > 2 * EQUAL * np.abs(want).max()
    assert clear.mean() > 0.9 and (got.argmax(axis=1) == want.argmax(axis=1))[clear].all(), "greedy tokens differ"


@pytest.mark.parametrize(("kv_heads", "biased"), [(1, False), (2, True), (4, False), (8, True), (24, False)])
def test_n_shards_are_one(kv_heads: int, biased: bool) -> None:
    """All ranks side by side in one batch, on all seven targets, with rows of the base model among them."""
    config = config_of(kv_heads, attention_bias=biased, mlp_bias=biased, tie_word_embeddings=biased)
    weights = random_weights(config, seed=kv_heads)
    adapters = {i: make_adapter(config, every(rank), seed=i, scale=0.5) for i, rank in enumerate(RANKS)}
    asks = [(i, text(i, 6)) for i in adapters] + [(BASE_MODEL, text(9, 5)), (3, text(10, 1))]
    want = Group(config, weights, adapters, 1).run(asks)
    base = Group(config, weights, {}, 1).run([(BASE_MODEL, ids) for _, ids in asks])
    assert np.abs(want - base).max() > 0.1, "the adapters would not be missed"
    for shards in SHARDS:
        if kv_heads % shards and shards % kv_heads:
            with pytest.raises(ConfigError, match=f"{kv_heads} KV heads, which must be a multiple of the shards"):
                Group(config, weights, adapters, shards)
        else:
            assert_equal(Group(config, weights, adapters, shards).run(asks), want)


@st.composite
def split_models(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    """A model whose sizes divide only where they must, and a number of shards that it can be split over."""
    shards, kv_each = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    divisors = [kv for kv in range(1, shards) if shards % kv == 0]
    kv_heads = draw(st.sampled_from([*divisors, shards * kv_each]))
    heads = kv_heads * draw(st.integers(1, 2)) if kv_heads % shards == 0 else shards * draw(st.integers(1, 2))
    config = tiny_config(
        num_layers=draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 30)),
        intermediate_size=shards * draw(st.integers(1, 9)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(2, 40)),
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )
    return config, shards


@settings(max_examples=25)
@given(model=split_models(), data=st.data())
def test_n_shards_are_one_for_any_shape(model: tuple[ModelConfig, int], data: st.DataObject) -> None:
    config, shards = model
    modules = [(layer, target) for layer in range(config.num_layers) for target in TARGETS]
    ranks = st.dictionaries(st.sampled_from(modules), st.integers(1, 9), min_size=1)
    adapters = {i: make_adapter(config, data.draw(ranks), seed=i) for i in range(data.draw(st.integers(0, 3)))}
    weights = random_weights(config, seed=shards)
    asks = [(i, text(i + 1, 3 + i, config.vocab_size)) for i in [*adapters, BASE_MODEL, *adapters]]
    got, want = (Group(config, weights, adapters, n, order=n).run(asks) for n in (shards, 1))
    assert np.abs(got - want).max() <= EQUAL * max(1.0, np.abs(want).max())


# --- what it costs ---


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("rank", [8, 24, 7])
def test_the_bytes_of_a_step_are_those_of_the_paper(shards: int, rank: int) -> None:
    """LoRA adds 5 (N-1) B r / N to an attention block, beside 2 (N-1) B h / N for the base model; 24 divides by all."""
    config = config_of(24, hidden_size=48, num_layers=2, vocab_size=96)
    weights, rows = random_weights(config, seed=1), 12
    attention = make_adapter(config, every(rank, TARGETS[:4]), seed=0)
    whole = make_adapter(config, every(rank), seed=0)
    itemsize, layers = 4, config.num_layers

    def sent(adapters: dict[int, Adapter], adapter_id: int) -> np.ndarray:
        """Bytes that all shards send for all-reduces and all-gathers in one step of `rows` rows, and LoRA's of them."""
        group = Group(config, weights, adapters, shards)
        group.run([(adapter_id, text(0, 2 * rows))])
        counts = [communicator.counts for communicator in group.communicators]
        kinds = [[each.nbytes["all_reduce"], each.nbytes["all_gather"], each.lora_nbytes] for each in counts]
        return np.array(kinds).sum(axis=0) / 2

    base = sent({}, BASE_MODEL)
    reduced = (1 + 2 * layers) * all_reduce_elements(rows * config.hidden_size, shards)  # embedding, o, down
    gathered = (shards - 1) * rows * config.vocab_size // shards  # the logits, once a step
    assert base.tolist() == [itemsize * shards * reduced, itemsize * shards * gathered, 0]
    with_lora = sent({0: attention}, 0)
    added = with_lora[2]
    assert (with_lora - base)[:2].sum() == added
    if rank % shards == 0:
        assert lora_elements(rows, rank, shards) * shards == 5 * (shards - 1) * rows * rank
    gather = (shards - 1) * rows * 3 * -(-rank // shards)  # what does not divide is rounded up
    assert added == itemsize * layers * (shards * gather + 2 * (shards - 1) * rows * rank)
    feed_forward = sent({0: whole}, 0)[2] - added  # gate and up are gathered, down is reduced
    assert feed_forward == itemsize * layers * (shards * gather * 2 // 3 + 2 * (shards - 1) * rows * rank)


@pytest.mark.parametrize("kv_heads", [2, 24])
@pytest.mark.parametrize("rank", RANKS)
def test_the_numbers_of_an_adapter_are_spread_over_the_shards(kv_heads: int, rank: int) -> None:
    """All of A and B is there once; only B of k and v is there as often as their KV head is."""
    config, shards = config_of(kv_heads), 4
    adapter = make_adapter(config, every(rank), seed=0)
    images = [pack(adapter, PageLayout(config, Shard(index, shards)), np.float32) for index in range(shards)]
    numbers = sum(matrix.size for matrix in (*adapter.a.values(), *adapter.b.values()))
    copies = max(1, shards // kv_heads)
    of_kv = sum(matrix.size for (_, target), matrix in adapter.b.items() if TARGETS[target] in ("k_proj", "v_proj"))
    assert sum(map(np.count_nonzero, images)) == numbers + (copies - 1) * of_kv
    assert len({image.shape for image in images}) == 1, "equally many pages on every shard"
