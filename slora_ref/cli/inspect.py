"""`slora-ref inspect`: what a checkpoint or adapter folder is, what it takes in the pool, or why it is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from slora_ref.adapter import AdapterHeader, read_header
from slora_ref.checkpoint import check_checkpoint
from slora_ref.cli.output import Subparsers, print_json
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.errors import AdapterError, CheckpointError
from slora_ref.pager import AdapterShape, PageLayout

ITEMSIZE = 4  # of the float32 pool of this version


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint or adapter folder is, or why it is refused",
        description="Reads configuration and headers, no weights. An adapter is checked against its base model.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint folder or a PEFT adapter folder")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="base model of the adapter; default: base_model_name_or_path if it is a folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what the folder is."""
    if (args.folder / "adapter_config.json").exists():
        facts = _adapter_facts(args.folder, args.model)
    elif (args.folder / "config.json").exists():
        facts = _model_facts(args.folder)
    else:
        raise CheckpointError(f"{args.folder} has neither config.json nor adapter_config.json")
    if args.json:
        print_json(facts)
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):<{width}}  {_text(value)}")
    return 0


def _text(value: Any) -> str:
    """A value for the eye: one line, or a line for each entry."""
    if isinstance(value, dict):
        return "".join(f"\n    {key:<12} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _model_facts(folder: Path) -> dict[str, Any]:
    """The facts of a checkpoint; raises as loading it would, but reads headers only."""
    config = ModelConfig.from_folder(folder)
    parameters = check_checkpoint(folder, config)
    layout = PageLayout(config)
    page_bytes = layout.num_layers * layout.row_stride(ITEMSIZE) * ITEMSIZE
    return {
        "kind": "checkpoint",
        "parameters": parameters,
        "dtype": config.dtype,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": f"{config.num_heads} query, {config.num_kv_heads} key-value, {config.head_dim} wide",
        "vocabulary": config.vocab_size,
        "longest_sequence": config.max_position_embeddings,
        "rope": config.rope.kind,
        "tied_head": config.tie_word_embeddings,
        "end_tokens": list(config.eos_token_ids),
        "page": f"{layout.width} numbers in each of {layout.num_layers} layers, {page_bytes:,} bytes in float32",
        "pages_per_token": layout.token_pages(1),
        "has_tokenizer": (folder / "tokenizer.json").exists(),
    }


def _adapter_facts(folder: Path, model: Path | None) -> dict[str, Any]:
    """The facts of an adapter; raises as registering it would."""
    base = model if model is not None else _base_folder(folder)
    config = ModelConfig.from_folder(base)
    header = read_header(folder, config)
    layout = PageLayout(config)
    return {
        "kind": "adapter",
        "base_model": str(base),
        "matched": f"{header.matched} of {header.total} modules",
        "dtype": header.dtype,
        "targets": _targets(header),
        "pages": layout.adapter_pages(AdapterShape(header.ranks, header.scales).page_ranks),
        "as_many_pages_as_tokens": layout.adapter_pages(header.ranks.max(axis=0)) // layout.token_pages(1),
        "warnings": list(header.warnings),
    }


def _targets(header: AdapterHeader) -> dict[str, Any]:
    """For each target its ranks and scales over the layers, and in how many layers it is."""
    facts = {}
    for index, target in enumerate(TARGETS):
        ranks, scales = header.ranks[:, index], header.scales[:, index]
        present = ranks > 0
        if present.any():
            distinct = sorted(
                {(int(r), round(float(s), 6)) for r, s in zip(ranks[present], scales[present], strict=True)}
            )
            pairs = ", ".join(f"rank {rank} scale {scale:g}" for rank, scale in distinct)
            facts[target] = f"{pairs}; {int(present.sum())} of {len(ranks)} layers"
    return facts


def _base_folder(folder: Path) -> Path:
    """The base model that the adapter's own config names, if it is a folder here."""
    try:
        named = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise AdapterError(f"{folder / 'adapter_config.json'} cannot be read: {error}") from error
    if isinstance(named, str) and (Path(named) / "config.json").exists():
        return Path(named)
    raise AdapterError(f"the adapter's base model, {named!r}, is no folder here: name it with --model DIR")
