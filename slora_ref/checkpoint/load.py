"""A Hugging Face folder -> ModelWeights, exactly, or a refusal that names the tensor.

All names and shapes are checked before the first byte of data is read, and merged buffers are filled piece by piece, so
the peak is the size of the weights. Which file holds a tensor is the business of files.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_ref.checkpoint.files import TensorFiles
from slora_ref.checkpoint.shard import cut_head, cut_layer, cut_vocabulary, tied_head
from slora_ref.checkpoint.tensors import float_dtype
from slora_ref.checkpoint.weights import LayerWeights, ModelWeights
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.config.fields import show
from slora_ref.errors import CheckpointError, UnsupportedModel
from slora_ref.shapes import Array
from slora_ref.tp import WHOLE, Shard

HEAD = "lm_head.weight"
OWN = ("model.", "lm_head.", "layers.", "embed_tokens.", "norm.")  # other names are strays
WRAPPED = ".base_layer."  # where PEFT puts a weight beside its adapters
UNUSED = ("rotary_emb.inv_freq",)  # stored by old versions, computed from the config by all


def expected_shapes(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor that the model must have, but for embedding and head."""
    yield f"{prefix}norm.weight", (config.hidden_size,)
    for layer in range(config.num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}layers.{layer}.{norm}.weight", (config.hidden_size,)
        for target in TARGETS:
            d_in, d_out = config.target_shape(target)
            module = f"{prefix}layers.{layer}.{block_name(target)}"
            yield f"{module}.weight", (d_out, d_in)
            if config.attention_bias if target in TARGETS[:4] else config.mlp_bias:
                yield f"{module}.bias", (d_out,)


def block_name(target: str) -> str:
    """A projection's name within its layer: q, k, v, o belong to self_attn, the others to mlp."""
    return f"{'self_attn' if target in TARGETS[:4] else 'mlp'}.{target}"


def check_tensors(files: TensorFiles, config: ModelConfig, prefix: str) -> None:
    """Every needed tensor is there with the right shape, and none that would change the model is left over."""
    if any(WRAPPED in name for name in files):
        raise UnsupportedModel("the model was saved inside PEFT: call merge_and_unload() or unload(), then save it")
    for name, shape in expected_shapes(config, prefix):
        if files.shape(name) != shape:
            raise CheckpointError(f"tensor {show(name)} is {show(files.shape(name))}; config.json asks {shape}")
    for name in vocabulary_names(files, config, prefix):
        rows, hidden = config.vocab_size, config.hidden_size
        shape = files.shape(name)
        if len(shape) != 2 or shape[0] < rows or shape[1] != hidden:
            raise CheckpointError(f"tensor {name} is {show(shape)}; config.json asks ({rows} or more, {hidden})")
    needed = {name for name, _ in expected_shapes(config, prefix)} | {f"{prefix}embed_tokens.weight", HEAD}
    extra = [name for name in files if name not in needed and name.startswith(OWN) and not name.endswith(UNUSED)]
    if extra:
        raise UnsupportedModel(f"tensor {show(extra[0])} (of {len(extra)}) has no place in the model of config.json")


def checked_prefix(files: TensorFiles, config: ModelConfig) -> str:
    """What the names of this folder's tensors begin with, after all of them have been checked."""
    prefix = "model." if any(name.startswith("model.") for name in files) else ""
    check_tensors(files, config, prefix)
    return prefix


def vocabulary_names(files: TensorFiles, config: ModelConfig, prefix: str) -> list[str]:
    """Embedding and head; of a tied model those of the two that are there, unless both are missing."""
    names = [f"{prefix}embed_tokens.weight", HEAD]
    present = [name for name in names if name in files]
    return present if config.tie_word_embeddings and present else names


def _here(array: Array) -> Array:
    return array


def load_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    dtype: npt.DTypeLike = np.float32,
    place: Callable[[Array], Array] = _here,
    shard: Shard = WHOLE,
) -> ModelWeights:
    """The weights of `folder` in `dtype`, or a shard's part of them; peak memory is the result and 8 MB.

    With `place`, which copies an array to where it is wanted, and for a shard, one whole layer at a time, or embedding
    and head, is in host memory.

    Raises CheckpointError for damage and contradictions, UnsupportedModel for a tensor that the model has no place for.
    """
    chosen = float_dtype(dtype)
    with TensorFiles(Path(folder)) as files:
        prefix = checked_prefix(files, config)
        embed, head = _embed_and_head(files, config, prefix, chosen)
        placed = place(cut_vocabulary(embed, config, shard))
        head = tied_head(placed, shard) if head is embed else place(cut_head(head, config, shard))
        names = [f"{prefix}layers.{i}" for i in range(config.num_layers)]
        layers = (cut_layer(_layer(files, config, name, chosen), config, shard).placed(place) for name in names)
        return ModelWeights(placed, tuple(layers), place(files.merged([f"{prefix}norm.weight"], chosen)), head)


def check_checkpoint(folder: str | Path, config: ModelConfig) -> tuple[int, list[str]]:
    """Checks names and shapes as load_checkpoint does, from headers alone.

    Returns the number of parameters that the model uses, and the types in which they are stored.
    """
    with TensorFiles(Path(folder)) as files:
        prefix = checked_prefix(files, config)
        used = dict(expected_shapes(config, prefix))
        used |= {name: files.shape(name) for name in vocabulary_names(files, config, prefix)}
        return sum(math.prod(shape) for shape in used.values()), sorted({files.dtype(name) for name in used})


def _embed_and_head(files: TensorFiles, config: ModelConfig, prefix: str, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Embedding and head. Tied, one may be missing; with both there, they are one only if equal (transformers 5)."""
    matrices = [files.merged([name], dtype) for name in vocabulary_names(files, config, prefix)]
    embed, head = matrices[0], matrices[-1]
    same = config.tie_word_embeddings and embed.shape == head.shape and _equal(embed, head)
    return embed, embed if same else head


def _equal(left: Array, right: Array) -> bool:
    """Whether two matrices are equal, compared in strips so that no third one is made."""
    return all(np.array_equal(left[i : i + 1024], right[i : i + 1024]) for i in range(0, len(left), 1024))


def _layer(files: TensorFiles, config: ModelConfig, layer: str, dtype: np.dtype[Any]) -> LayerWeights:
    """The layer whose tensors begin with the name `layer`, its projections merged."""

    def projections(targets: Sequence[str], kind: str = "weight") -> Array:
        return files.merged([f"{layer}.{block_name(target)}.{kind}" for target in targets], dtype)

    def biases(targets: Sequence[str], present: bool) -> Array | None:
        return projections(targets, "bias") if present else None

    return LayerWeights(
        input_norm=files.merged([f"{layer}.input_layernorm.weight"], dtype),
        qkv=projections(TARGETS[:3]),
        qkv_bias=biases(TARGETS[:3], config.attention_bias),
        o=projections(TARGETS[3:4]),
        o_bias=biases(TARGETS[3:4], config.attention_bias),
        post_norm=files.merged([f"{layer}.post_attention_layernorm.weight"], dtype),
        gate_up=projections(TARGETS[4:6]),
        gate_up_bias=biases(TARGETS[4:6], config.mlp_bias),
        down=projections(TARGETS[6:]),
        down_bias=biases(TARGETS[6:], config.mlp_bias),
    )
