"""What `bench kernels` measures of attention: how many sequences of which lengths, in which model. It knows no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slora_ref.bench.kernels.cases import FLOOR_BYTES_PER_S
from slora_ref.ops.tables import Spans

FLOOR_FLOP_PER_S = 989e12  # an H200's tensor cores in 16 bits, by its data sheet


@dataclass(frozen=True)
class AttentionCase:
    """One layer's attention; the defaults are Llama-7B's.

    Args:
        case: attention_decode (one query a sequence) or attention_prefill (all that is not cached).
        batch, context: sequences, and tokens of each.
        cached: tokens of each sequence that were prefilled before.
    """

    case: str
    batch: int
    context: int
    cached: int = 0
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    dtype: str = "float16"

    @property
    def length(self) -> int:
        """Queries of a sequence."""
        return 1 if self.case == "attention_decode" else self.context - self.cached

    @property
    def rows(self) -> int:
        """Queries of all sequences."""
        return self.batch * self.length

    @property
    def bytes_moved(self) -> int:
        """Keys, values, queries and results, each once; 2 bytes a number."""
        vectors = 2 * self.batch * self.context * self.kv_heads + 2 * self.rows * self.heads
        return 2 * self.head_dim * vectors

    @property
    def flops(self) -> int:
        """Two products of a query with each token that it sees, two operations a term."""
        seen = self.length * (self.context - self.length) + self.length * (self.length + 1) // 2
        return 4 * self.head_dim * self.heads * self.batch * seen

    @property
    def floor_us(self) -> float:
        """Microseconds that the bytes take, or the products if those take longer."""
        return 1e6 * max(self.bytes_moved / FLOOR_BYTES_PER_S, self.flops / FLOOR_FLOP_PER_S)

    def spans(self, first_slot: int) -> Spans:
        """The rows' spans, sequences in the slots from `first_slot`."""
        number = np.arange(self.batch)
        length, context = (np.full(self.batch, n) for n in (self.length, self.context))
        return Spans(first_slot + number, number * self.length, length, context)

    def describe(self) -> dict[str, object]:
        """The fields of a result that say what was measured."""
        return {
            "operation": "attention",
            "case": self.case,
            "batch": self.batch,
            "context": self.context,
            "cached": self.cached,
            "rows": self.rows,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "bytes": self.bytes_moved,
            "flops": self.flops,
            "floor_us": self.floor_us,
        }


def attention_cases() -> list[AttentionCase]:
    """Everything: the shapes of the tables that results are compared with, then other models' heads."""
    shapes = ((64, 512), (128, 512), (64, 2048), (128, 2048), (16, 512), (8, 2048), (4, 4096), (1, 4096))
    cases = [AttentionCase("attention_decode", *shape) for shape in shapes]
    cases += [AttentionCase("attention_decode", 64, 2048, kv_heads=kv_heads) for kv_heads in (16, 8)]
    cases += [AttentionCase("attention_decode", 64, 1024, head_dim=head_dim) for head_dim in (64, 80, 256)]
    cases += [AttentionCase("attention_prefill", *shape) for shape in ((16, 512), (4, 2048), (1, 512), (1, 8192))]
    cases += [AttentionCase("attention_prefill", 16, 1024, cached=768)]
    cases += [AttentionCase("attention_prefill", 16, 512, kv_heads=8)]
    cases += [AttentionCase("attention_prefill", 16, 512, head_dim=head_dim) for head_dim in (64, 256)]
    cases += [AttentionCase("attention_decode", 64, 512, dtype="bfloat16")]
    cases += [AttentionCase("attention_prefill", 16, 512, dtype="bfloat16")]
    return cases
