"""Array annotations that carry the names of the dimensions, and the glossary of those names.

`Float[Array, "rows rank"]` says: floating point, two dimensions; within one call every `rows` is the same number. A
single name begins with a space, `Int32[Array, " rows"]`, or linters take it for a forward reference. To a type checker
it is an array; at run time it is checked only in the test run (tests/conftest.py, jaxtyping with beartype). Without
jaxtyping it is `Any`, so users never need that package. The test run evaluates annotations: import their names for
real, not under `TYPE_CHECKING`.

Glossary. One name, one meaning, everywhere:

    layers     decoder layers of the model
    pages      rows of the pool, in each layer; a page id counts from 0 to pages - 1
    width      numbers in a page: head_dim * max(1, kv_heads / shards)
    slots      entries of a table that stays in place: sequences or resident adapters
    tokens     tokens of one sequence, in order
    rows       tokens of one step, of all its sequences: one row of hidden states each
    sequences  requests in one step; `segments`: runs of neighbouring rows of one adapter
    adapters   adapters in one step or one table
    rank       rank of an adapter (never of a process; that is a shard)
    targets    projections an adapter can change: 7, in the order of config.TARGETS
    d_in d_out input and output width of a projection
    vocab      entries of the vocabulary; `vocab_rows`: rows of the embedding, possibly more
    hidden     width of the residual stream; `ffn`: width inside the feed-forward block
    heads kv_heads head_dim   query heads, key-value heads, width of one head
    q_width kv_width          heads * head_dim, kv_heads * head_dim
    half       head_dim / 2, the pairs that the rotary embedding turns
    positions  places in a sequence, from 0
    shards     tensor-parallel workers

Knows nothing of what the arrays hold. `Array` is a NumPy or a CuPy array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Array", "Bool", "Float", "Float32", "Int", "Int32", "Int64", "Num", "Shaped"]

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Float32
    from typing import Annotated as Int
    from typing import Annotated as Int32
    from typing import Annotated as Int64
    from typing import Annotated as Num
    from typing import Annotated as Shaped

    from numpy.typing import NDArray

    Array = NDArray[Any]
else:
    Array = Any  # jaxtyping then asks for a shape and a dtype, which NumPy and CuPy arrays both have
    try:
        from jaxtyping import Bool, Float, Float32, Int, Int32, Int64, Num, Shaped
    except ImportError:

        class Shaped:
            """`Shaped[Array, "rows"]` is Any: no check, no cost."""

            def __class_getitem__(cls, item: object) -> Any:
                """Return Any, whatever the array type and the names."""
                return Any

        Bool = Float = Float32 = Int = Int32 = Int64 = Num = Shaped
