"""What tensor parallelism splits, as pure functions (paper section 6, figure 4; the base model as Megatron-LM does).

Blocks of a matrix: W = [W_0 | W_1 | ...] by columns, or one below the other by rows (";"); a matrix is [d_in, d_out]
here, as in the paper, and checkpoints store the transpose. N shards, s is one of them, x is whole on every shard.

Base model
    q, k, v, gate, up by columns:   [x W_0 | x W_1 | ...] = x W, each shard its own heads or FFN columns: no message
    o, down by rows:                z = [z_0 | z_1 | ...] lies split, and sum over s of (z_s W_s) = z W: one all-reduce
    embedding, head by vocabulary:  a row that another shard holds counts as 0, all-reduce; logits are gathered

LoRA of a projection split by columns: A by columns along its rank, B by columns
    [x A_0 | x A_1 | ...] = x A      one all-gather of the small intermediate
    (x A) B_s                        is added to x W_s, where it belongs: no message
LoRA of a projection split by rows: A by rows, B by columns
    sum over s of (z_s A_s) = z A    one all-reduce of the small intermediate
    (z A) B_s                        are columns s of z A B, added into the same columns of the partial sum z_s W_s:
                                     the base model's all-reduce puts them together with the others', no further message

Rules: query heads and FFN divide by N; KV heads divide by N, or N divides by them and each is held by N / KV heads
shards (the only replication); the vocabulary is padded with zero rows. A rank need not divide: a shard holds ceil(r/N)
columns of A, zeros past r, so that page tables are equal on all shards. Nor need the hidden size: see `hidden_slice`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slora_ref.config import TARGETS, ModelConfig
from slora_ref.errors import ConfigError
from slora_ref.shapes import Array, Float, Int
from slora_ref.tp.shard import Shard

BY_ROWS = (TARGETS.index("o_proj"), TARGETS.index("down_proj"))
"""Targets whose W is split by rows; the others are split by columns."""
OVER_RANK = np.array([target not in BY_ROWS for target in range(len(TARGETS))])
"""[targets] whether A is split along its rank."""


def check_split(config: ModelConfig, shards: int, multiple: int = 1) -> None:
    """Raises ConfigError, with the rule, for a model that cannot be split over so many shards.

    Args:
        multiple: of numbers at which a shard's columns must start: 16 bytes of them for a GPU's vector loads.
    """
    for name, size in (("query heads", config.num_heads), ("intermediate_size", config.intermediate_size)):
        if size % shards:
            raise ConfigError(f"{shards} shards: {name} is {size}, which must be a multiple of the shards")
    kv_heads = config.num_kv_heads
    if kv_heads % shards and shards % kv_heads:
        raise ConfigError(
            f"{shards} shards: the model has {kv_heads} KV heads, which must be a multiple of the shards, or divide "
            "them (then each is held by several shards)"
        )
    if shards > 1 and (config.hidden_size % multiple or -(-config.hidden_size // shards) % multiple):
        raise ConfigError(
            f"{shards} shards: hidden_size is {config.hidden_size}; on a GPU it and a shard's part of it must be "
            f"multiples of {multiple}"
        )


def local_config(config: ModelConfig, shards: int) -> ModelConfig:
    """The model that one shard runs: the same, with its share of heads and FFN. The vocabulary is that of the tokens.

    Raises:
        ConfigError: see check_split.
    """
    check_split(config, shards)
    return replace(
        config,
        num_heads=config.num_heads // shards,
        num_kv_heads=max(1, config.num_kv_heads // shards),
        intermediate_size=config.intermediate_size // shards,
    )


def kv_slice(config: ModelConfig, shard: Shard) -> slice:
    """This shard's columns of k or v: its own KV heads, or the one that its query heads share."""
    heads = config.num_kv_heads
    if heads % shard.count == 0:
        return shard.part(config.kv_width)
    head = shard.index * heads // shard.count
    return slice(head * config.head_dim, (head + 1) * config.head_dim)


def hidden_slice(hidden: int, shard: Shard) -> tuple[slice, int]:
    """This shard's columns of a product that is added up over shards, and how many of them are another's.

    Equally many, c = ceil(hidden / N), on every shard. Where they do not divide, the last shards' columns start
    earlier, so that they end with the row, and B is zero in those that a shard before already owns.
    """
    each = -(-hidden // shard.count)
    owned, start = shard.index * each, min(shard.index * each, hidden - each)
    return slice(start, start + each), min(owned - start, each)


def vocab_rows(vocab: int, shard: Shard) -> slice:
    """This shard's rows of embedding and head; rows past `vocab` are zeros."""
    return shard.part(padded_vocab(vocab, shard.count))


def padded_vocab(vocab: int, shards: int) -> int:
    """The vocabulary, rounded up to a multiple of the shards."""
    return -(-vocab // shards) * shards


# --- adapters ---


def adapter_target_shape(config: ModelConfig, target: str, shards: int) -> tuple[int, int]:
    """(d_in, d_out) of a shard's A and B: the length of a column of A, and of a row of B."""
    d_in, d_out = local_config(config, shards).target_shape(target)
    return d_in, -(-d_out // shards) if TARGETS.index(target) in BY_ROWS else d_out


def a_ranks(page_ranks: Int[Array, "*some targets"], shards: int) -> Int[Array, "*some targets"]:
    """[..., targets] the columns of each A that a shard has pages for: ceil(r / N), or r where A is split by rows."""
    split: Int[Array, "*some targets"] = np.where(OVER_RANK, -(-page_ranks // shards), page_ranks)
    return split


def cut_a(
    a: Float[Array, "rank d_in"], target: int, page_rank: int, shard: Shard
) -> Float[Array, "a_rank part"]:
    """A shard's part of A, whose columns are the rows of PEFT's lora_A; a view.

    Args:
        page_rank: the rank that is split, the largest of any layer; in this layer the last shards may hold nothing.
    """
    if target not in BY_ROWS:
        each = -(-page_rank // shard.count)
        return a[shard.index * each : (shard.index + 1) * each]
    return a[:, shard.part(a.shape[1])]


def cut_b(
    b: Float[Array, "d_out rank"], target: int, config: ModelConfig, shard: Shard
) -> Float[Array, "part rank"]:
    """A shard's columns of B, which are the rows of PEFT's lora_B; a view, unless some of them must be zeros."""
    if target not in BY_ROWS:
        return b[output_slice(config, target, shard)]
    columns, foreign = hidden_slice(len(b), shard)
    part = b[columns]
    if foreign:
        part = part.copy()
        part[:foreign] = 0
    return part


def output_slice(config: ModelConfig, target: int, shard: Shard) -> slice:
    """This shard's columns of a projection that is split by columns: of W and of B."""
    name = TARGETS[target]
    if name in ("k_proj", "v_proj"):
        return kv_slice(config, shard)
    return shard.part(config.target_shape(name)[1])


# --- what the collectives move ---


def lora_elements(rows: int, rank: int, shards: int) -> int:
    """Numbers that each shard sends for LoRA in one attention block, all rows at one rank.

    3 (N-1) B ceil(r/N) for the gather of q, k and v, and 2 (N-1) B r / N for o's all-reduce: 5 (N-1) B r / N where N
    divides r, as in the paper (section 6).
    """
    return (shards - 1) * rows * 3 * -(-rank // shards) + all_reduce_elements(rows * rank, shards)


def all_reduce_elements(size: int, shards: int) -> int:
    """Numbers that a shard sends in an all-reduce of `size`, where they divide: 2 (N-1) / N of them (a ring's)."""
    return 2 * (shards - 1) * size // shards
