"""Tensor parallelism without a model: what is split adds up to the whole, and collectives move what they say."""

from __future__ import annotations

import importlib
import math
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import DEADLINE, on_all_shards
from tiny import tiny_config, write_model_folder

from slora_ref.checkpoint import LayerWeights, ModelWeights, cut_weights, load_checkpoint, random_weights
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.errors import ConfigError, ShardLost
from slora_ref.pager import PageLayout
from slora_ref.tp import Shard, check_split, local_config
from slora_ref.tp.communicator import Alone
from slora_ref.tp.split import (
    BY_ROWS,
    a_ranks,
    adapter_target_shape,
    all_reduce_elements,
    cut_a,
    cut_b,
    hidden_slice,
    kv_slice,
    lora_elements,
    vocab_rows,
)
from slora_ref.tp.threads import thread_communicators

SHARDS = st.integers(1, 8)
HEADS = 24
KV_HEADS = (1, 2, 4, 8, 24)


def config_of(kv_heads: int, **others: int | bool) -> ModelConfig:
    """24 query heads, so that 1, 2, 3, 4 and 8 shards divide them."""
    return tiny_config(num_heads=HEADS, num_kv_heads=kv_heads, head_dim=4, **others)


# --- collectives ---


@given(shards=SHARDS, size=st.integers(0, 40), dtype=st.sampled_from([np.float32, np.float64, np.float16]))
def test_collectives_are_sums_and_copies_with_the_same_bits_everywhere(shards: int, size: int, dtype: type) -> None:
    own = np.random.default_rng(size).standard_normal((shards, size)).astype(dtype)
    communicators = thread_communicators(shards)
    sums = on_all_shards(communicators, lambda c: c.all_reduce(own[c.shard.index].copy()))
    whole = on_all_shards(communicators, lambda c: c.all_gather(own[c.shard.index]))
    told = on_all_shards(communicators, lambda c: c.broadcast(bytes(range(size)) if c.shard.index == 0 else None))
    tolerance = 8 * shards * np.finfo(dtype).eps
    for total, parts, message in zip(sums, whole, told, strict=True):
        np.testing.assert_allclose(total, own.astype(np.float64).sum(axis=0), rtol=0, atol=tolerance)
        assert total.tobytes() == sums[0].tobytes()
        assert (parts == own).all() and parts.shape == own.shape
        assert message == bytes(range(size))


@given(shards=SHARDS, each=st.integers(1, 9))
def test_the_bytes_of_collectives_are_those_of_a_ring(shards: int, each: int) -> None:
    communicators, size = thread_communicators(shards), each * shards

    def work(c: object) -> None:
        c.all_reduce(np.ones((2, size), np.float32))
        c.all_gather(np.ones((3, size), np.float64))
        c.broadcast(b"12345" if c.shard.index == 0 else None)

    on_all_shards(communicators, work)
    called = int(shards > 1)
    for c in communicators:
        assert c.counts.calls == {"all_reduce": called, "all_gather": called, "broadcast": called}
        assert c.counts.nbytes["all_reduce"] == 4 * all_reduce_elements(2 * size, shards)
        assert c.counts.nbytes["all_gather"] == 8 * 3 * size * (shards - 1)
        assert c.counts.nbytes["broadcast"] == (5 if c.shard.index < shards - 1 else 0)


@given(shards=SHARDS, size=st.integers(1, 60))
def test_an_array_that_does_not_divide_costs_the_same_in_all(shards: int, size: int) -> None:
    communicators = thread_communicators(shards)
    on_all_shards(communicators, lambda c: c.all_reduce(np.ones(size, np.float32)))
    assert sum(c.counts.nbytes["all_reduce"] for c in communicators) == 4 * 2 * (shards - 1) * size


def test_a_single_shard_sends_nothing() -> None:
    alone, x = Alone(), np.ones(3, np.float32)
    assert alone.all_reduce(x) is x and np.shares_memory(alone.all_gather(x), x)
    assert alone.broadcast(b"word") == b"word"
    assert not any(alone.counts.calls.values()) and not any(alone.counts.nbytes.values())


@pytest.mark.parametrize("wait", ["all_reduce", "all_gather", "broadcast"])
def test_a_shard_that_fails_ends_what_the_others_wait_for(wait: str) -> None:
    communicators = thread_communicators(4)
    reasons: list[str] = []

    def work(c: object) -> None:
        if c.shard.index == 0:
            time.sleep(0.05)
            raise MemoryError("no room")
        for _ in range(2):  # also what is asked for later
            with pytest.raises(ShardLost) as lost:
                c.broadcast() if wait == "broadcast" else getattr(c, wait)(np.ones(5, np.float32))
            reasons.append(str(lost.value))

    before = time.monotonic()
    with pytest.raises(MemoryError):
        on_all_shards(communicators, work)
    assert time.monotonic() - before < DEADLINE
    assert reasons == ["shard 0: MemoryError('no room')"] * 6
    assert threading.active_count() < 4


class OnGpu:
    """What NcclCommunicator asks of a CuPy array; its numbers are nowhere."""

    def __init__(self, address: int, *shape: int, dtype: str = "float16") -> None:
        self.shape, self.dtype, self.size = shape, np.dtype(dtype), math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.data, self.flags = SimpleNamespace(ptr=address), SimpleNamespace(c_contiguous=True)


@pytest.mark.parametrize("name", [bytes(range(128)), tuple(range(-64, 64))])
def test_nccl_is_told_where_how_much_and_on_which_stream(
    name: bytes | tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the calls that CuPy would get, on two shards whose orders go through threads. Its versions differ
    in the type of a group's name."""
    calls: dict[int, list[tuple[object, ...]]] = {0: [], 1: []}

    class Nccl:
        def __init__(self, count: int, told: bytes | tuple[int, ...], rank: int) -> None:
            assert (count, told) == (2, name), "all shards have shard 0's name of the group"
            self.calls = calls[rank]

        def allReduce(self, *arguments: int) -> None:
            self.calls.append(("reduce", *arguments))

        def allGather(self, *arguments: int) -> None:
            self.calls.append(("gather", *arguments))

        def abort(self) -> None:
            self.calls.append(("abort",))

    kinds = {"NCCL_FLOAT32": 7, "NCCL_FLOAT16": 6, "NCCL_BFLOAT16": 9, "NCCL_SUM": 0}
    nccl = SimpleNamespace(get_unique_id=lambda: name, NcclCommunicator=Nccl, **kinds)
    cuda = SimpleNamespace(nccl=nccl, get_current_stream=lambda: SimpleNamespace(ptr=77))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.delitem(sys.modules, "slora_ref.tp.nccl", raising=False)
    hosts = thread_communicators(2)
    both = on_all_shards(hosts, importlib.import_module("slora_ref.tp.nccl").NcclCommunicator)
    for communicator in both:
        assert communicator.reduce(OnGpu(1000, 4, 6)) == 48, "bytes, as of a ring"
        assert communicator.gather(OnGpu(2000, 3, dtype="float32"), OnGpu(3000, 2, 3, dtype="float32")) == 12
    for made in calls.values():
        assert made == [("reduce", 1000, 1000, 24, 6, 0, 77), ("gather", 2000, 3000, 3, 7, 77)]
    for wake in hosts[0].on_loss:
        wake()
    assert calls[0][-1] == ("abort",) and calls[1][-1] != ("abort",)
    with pytest.raises(AssertionError, match="arrays of a GPU"):
        both[0].reduce(np.ones(3, np.float16))
    monkeypatch.delitem(sys.modules, "slora_ref.tp.nccl")


def test_only_the_leader_speaks() -> None:
    for index, message in ((0, None), (1, b"word")):
        with pytest.raises(AssertionError, match="shard 0 speaks"):
            thread_communicators(2)[index].broadcast(message)


# --- rules ---


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_which_models_can_be_split(shards: int, kv_heads: int) -> None:
    config = config_of(kv_heads)
    if kv_heads % shards and shards % kv_heads:
        with pytest.raises(ConfigError, match=f"{shards} shards: the model has {kv_heads} KV heads, which must be"):
            check_split(config, shards)
        return
    local = local_config(config, shards)
    assert local.num_heads * shards == HEADS and local.num_kv_heads == max(1, kv_heads // shards)
    assert local.hidden_size == config.hidden_size and local.vocab_size == config.vocab_size


def test_query_heads_and_ffn_must_divide() -> None:
    with pytest.raises(ConfigError, match="5 shards: query heads is 24, which must be a multiple of the shards"):
        check_split(config_of(1), 5)
    with pytest.raises(ConfigError, match="8 shards: intermediate_size is 100, which must be a multiple"):
        PageLayout(config_of(1, intermediate_size=100), Shard(0, 8))


@pytest.mark.parametrize(("hidden", "shards", "right"), [(64, 8, True), (64, 4, True), (64, 3, False), (60, 3, False)])
def test_on_a_gpu_a_shards_columns_start_aligned(hidden: int, shards: int, right: bool) -> None:
    config = config_of(24, hidden_size=hidden)
    check_split(config, shards)
    if right:
        check_split(config, shards, multiple=8)
        return
    with pytest.raises(ConfigError, match=f"hidden_size is {hidden}; on a GPU it and a shard's part of it must be"):
        check_split(config, shards, multiple=8)


@given(shards=SHARDS, hidden=st.integers(1, 50))
def test_the_hidden_columns_are_owned_once_each(shards: int, hidden: int) -> None:
    owners = np.zeros(hidden, int)
    for index in range(shards):
        columns, foreign = hidden_slice(hidden, Shard(index, shards))
        assert 0 <= columns.start <= columns.stop <= hidden
        assert columns.stop - columns.start == -(-hidden // shards), "equally many on every shard"
        owners[columns][foreign:] += 1
    assert (owners == 1).all()


@given(shards=SHARDS, vocab=st.integers(1, 50))
def test_the_vocabulary_is_padded_to_a_multiple(shards: int, vocab: int) -> None:
    rows = [vocab_rows(vocab, Shard(index, shards)) for index in range(shards)]
    assert [row for part in rows for row in range(part.start, part.stop)] == list(range(rows[-1].stop))
    assert vocab <= rows[-1].stop < vocab + shards


# --- weights ---


def whole_from_parts(config: ModelConfig, parts: list[ModelWeights]) -> dict[str, np.ndarray]:
    """A model's first layer and vocabulary, put together again from its shards."""
    layers = [part.layers[0] for part in parts]
    shards, local = len(parts), local_config(config, len(parts))
    q, kv, ffn = local.q_width, local.kv_width, local.intermediate_size
    heads = config.num_kv_heads
    holders = range(shards) if heads >= shards else [head * shards // heads for head in range(heads)]
    return {
        "q": np.concatenate([layer.qkv[:q] for layer in layers]),
        "k": np.concatenate([layers[holder].qkv[q : q + kv] for holder in holders]),
        "v": np.concatenate([layers[holder].qkv[q + kv :] for holder in holders]),
        "o": np.concatenate([layer.o for layer in layers], axis=1),
        "gate": np.concatenate([layer.gate_up[:ffn] for layer in layers]),
        "up": np.concatenate([layer.gate_up[ffn:] for layer in layers]),
        "down": np.concatenate([layer.down for layer in layers], axis=1),
        "embed": np.concatenate([part.embed[:-1] for part in parts])[: config.vocab_size],
        "lm_head": np.concatenate([part.lm_head for part in parts])[: config.vocab_size],
    }


PAIRS = [(kv_heads, shards) for kv_heads in KV_HEADS for shards in (2, 3, 4, 8)]
CASES = [(kv_heads, shards) for kv_heads, shards in PAIRS if kv_heads % shards == 0 or shards % kv_heads == 0]


@pytest.mark.parametrize(("kv_heads", "shards"), CASES)
def test_the_parts_of_a_model_are_the_whole(kv_heads: int, shards: int) -> None:
    config = config_of(kv_heads, attention_bias=True, mlp_bias=True, num_layers=1)
    weights = random_weights(config, seed=kv_heads)
    parts = [cut_weights(weights, config, Shard(index, shards)) for index in range(shards)]
    found, layer = whole_from_parts(config, parts), weights.layers[0]
    q, kv, ffn = config.q_width, config.kv_width, config.intermediate_size
    want = {"q": layer.qkv[:q], "k": layer.qkv[q : q + kv], "v": layer.qkv[q + kv :], "o": layer.o, "down": layer.down}
    want |= {"gate": layer.gate_up[:ffn], "up": layer.gate_up[ffn:], "embed": weights.embed, "lm_head": weights.lm_head}
    for name, matrix in want.items():
        np.testing.assert_array_equal(found[name], matrix, err_msg=name)
    for index, part in enumerate(parts):
        assert len(part.layers[0].qkv_bias) == len(part.layers[0].qkv)
        assert len(part.layers[0].gate_up_bias) == len(part.layers[0].gate_up)
        assert (part.layers[0].o_bias is None) == (part.layers[0].down_bias is None) == (index > 0), "added once"
        assert not part.embed[-1].any(), "the row that tokens of other shards look up"
        past = index * len(part.lm_head) + np.arange(len(part.lm_head)) >= config.vocab_size
        assert not part.lm_head[past].any() and not part.embed[:-1][past].any(), "padding"


def test_each_shard_has_the_kv_head_of_its_queries() -> None:
    """Eight shards of 24 query heads over 4 KV heads: 6 queries share a key, so 2 shards hold each."""
    config = config_of(4)
    assert [kv_slice(config, Shard(index, 8)).start // 4 for index in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("tied", [False, True])
def test_a_shard_is_read_as_it_is_cut(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, attention_bias=True)
    folder = write_model_folder(tmp_path, config)
    for index in range(2):
        shard = Shard(index, 2)
        read, cut = (
            load_checkpoint(folder, config, shard=shard),
            cut_weights(load_checkpoint(folder, config), config, shard),
        )
        for name in ("embed", "norm", "lm_head"):
            np.testing.assert_array_equal(getattr(read, name), getattr(cut, name))
        for ours, theirs in zip(read.layers, cut.layers, strict=True):
            for field in fields(LayerWeights):
                np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))
        assert np.shares_memory(read.embed, read.lm_head) == tied


# --- adapters ---


@given(
    shards=st.sampled_from([1, 2, 3, 4, 8]),
    kv_heads=st.sampled_from(KV_HEADS),
    target=st.integers(0, 6),
    rank=st.integers(1, 20),
    below=st.integers(0, 3),
    hidden=st.integers(1, 60),
)
def test_the_parts_of_an_adapter_make_its_product(
    shards: int, kv_heads: int, target: int, rank: int, below: int, hidden: int
) -> None:
    """x A from the parts of A, then each shard's columns of (x A) B, are x A B; also for a layer of a smaller rank."""
    config = config_of(kv_heads, hidden_size=hidden)
    if kv_heads % shards and shards % kv_heads:
        return
    d_in, d_out = config.target_shape(TARGETS[target])
    rng = np.random.default_rng(rank)
    own_rank = max(1, rank - below)
    a, b, x = (rng.standard_normal(shape) for shape in ((own_rank, d_in), (d_out, own_rank), (2, d_in)))
    group = [Shard(index, shards) for index in range(shards)]
    cuts = [(cut_a(a, target, rank, shard), cut_b(b, target, config, shard)) for shard in group]
    shape = adapter_target_shape(config, TARGETS[target], shards)
    held = a_ranks(np.full(len(TARGETS), rank), shards)[target]
    assert all(len(part_a) <= held and (part_a.shape[1], len(part_b)) == shape for part_a, part_b in cuts)
    y = np.zeros((2, d_out))
    if target in BY_ROWS:
        t = sum(x[:, shard.part(d_in)] @ part_a.T for shard, (part_a, _) in zip(group, cuts, strict=True))
        for shard, (_, part_b) in zip(group, cuts, strict=True):
            y[:, hidden_slice(d_out, shard)[0]] += t @ part_b.T
    else:
        t = np.concatenate([x @ part_a.T for part_a, _ in cuts], axis=1)
        parts = [t @ part_b.T for _, part_b in cuts]
        if TARGETS[target] in ("k_proj", "v_proj") and shards > kv_heads:
            parts = parts[:: shards // kv_heads]
        y = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(y, x @ a.T @ b.T, atol=1e-9)


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
@pytest.mark.parametrize("rank", [1, 2, 3, 7, 8, 16, 64])
def test_an_adapter_takes_no_more_memory_on_all_shards_than_on_one(shards: int, rank: int) -> None:
    """Only the part that is split along a rank that does not divide grows, to ceil(r/N) N / r at most."""
    config = config_of(24, hidden_size=48)

    def numbers(count: int) -> tuple[int, int]:
        """On all shards: the numbers split along the rank, and the others."""
        along_rank = others = 0
        held = a_ranks(np.full(len(TARGETS), rank), count)
        for target, name in enumerate(TARGETS):
            d_in, d_out = adapter_target_shape(config, name, count)
            if target in BY_ROWS:
                others += count * held[target] * d_in
            else:
                along_rank += count * held[target] * d_in
            others += count * rank * d_out
        return int(along_rank), int(others)

    (one_rank, one_other), (all_rank, all_other) = numbers(1), numbers(shards)
    assert all_other == one_other
    assert all_rank * rank == one_rank * -(-rank // shards) * shards
    if rank % shards == 0:
        assert all_rank == one_rank


def test_the_formula_of_the_paper() -> None:
    assert lora_elements(rows=64, rank=16, shards=4) == 5 * 3 * 64 * 16 // 4
    assert lora_elements(rows=64, rank=3, shards=2) == 64 * 3 * 2 + 64 * 3
