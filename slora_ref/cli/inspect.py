"""`slora-ref inspect`: what a checkpoint or adapter folder is, what it takes in the pool, or why it is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slora_ref.adapter import AdapterHeader, read_header
from slora_ref.checkpoint import check_checkpoint
from slora_ref.cli.folders import model_folder
from slora_ref.cli.output import Subparsers, print_json
from slora_ref.config import TARGETS, ModelConfig, RopeConfig
from slora_ref.config.fields import read_json, show
from slora_ref.errors import AdapterError, CheckpointError, ConfigError, TokenizerError
from slora_ref.pager import AdapterShape, PageLayout
from slora_ref.tokenizer import Tokenizer

ITEMSIZE = 4  # of the float32 pool of this version
UNREAD = "values not read: NaN in the weights is found when they are loaded"


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint or adapter folder is, or why it is refused",
        description="Reads configuration and headers, no weights. An adapter is checked against its base model.",
    )
    parser.add_argument(
        "folder", metavar="DIR", help="a checkpoint folder or a PEFT adapter folder, or `toy` for the model inside"
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="base model of the adapter, or `toy`; default: base_model_name_or_path if it is a folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what the folder is.

    Raises:
        CheckpointError, UnsupportedModel, AdapterError, UnsupportedAdapter, TokenizerError: it would be refused.
        ConfigError: --model was given for what is no adapter.
    """
    folder = model_folder(args.folder)
    refusal = None
    if _has(folder, "adapter_config.json"):
        facts = _adapter_facts(folder, args.model)
    elif _has(folder, "config.json"):
        if args.model is not None:
            raise ConfigError(f"--model is the base of an adapter; {show(str(folder))} is a model itself: leave it out")
        facts = _model_facts(folder)
        facts["tokenizer"], refusal = _tokenizer(folder, facts["vocabulary"])
    else:
        raise CheckpointError(f"{show(str(folder))} has neither config.json nor adapter_config.json")
    facts["weights"] = UNREAD
    if args.json:
        print_json(facts)
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):<{width}}  {_text(value)}")
    if refusal is not None:
        raise refusal
    return 0


def _has(folder: Path, name: str) -> bool:
    """Whether the folder has such a file; raises CheckpointError where there is no folder or it may not be read."""
    try:
        if not folder.is_dir():
            raise CheckpointError(f"there is no folder {show(str(folder))}")
        return (folder / name).exists()
    except OSError as error:
        raise CheckpointError(f"{show(str(folder))} cannot be read: {error.strerror or error}") from error


def _tokenizer(folder: Path, vocabulary: int) -> tuple[str, TokenizerError | None]:
    """What the folder's tokenizer is, and why it would be refused."""
    if not _has(folder, "tokenizer.json"):
        return "none: prompts are token ids", None
    try:
        size = Tokenizer.from_folder(folder).size
        misfit = f"; the model knows only {vocabulary:,}: prompts with others are refused" if size > vocabulary else ""
        return f"{size:,} tokens{misfit}", None
    except TokenizerError as refusal:
        return f"refused: {refusal}", refusal


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
    parameters, dtypes = check_checkpoint(folder, config)
    layout = PageLayout(config)
    return {
        "kind": "checkpoint",
        "parameters": parameters,
        "dtype": ", ".join(dtypes),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": f"{config.num_heads} query, {config.num_kv_heads} key-value, {config.head_dim} wide",
        "vocabulary": config.vocab_size,
        "longest_sequence": config.max_position_embeddings,
        "rope": _rope(config.rope),
        "tied_head": config.tie_word_embeddings,
        "end_tokens": list(config.eos_token_ids),
        "page": f"{layout.width} numbers in each of {layout.num_layers} layers, "
        f"{layout.page_bytes(ITEMSIZE):,} bytes in float32",
        "pages_per_token": layout.token_pages(1),
    }


def _rope(rope: RopeConfig) -> str:
    """Kind and numbers of a rotary embedding."""
    stretched = "" if rope.kind == "default" else f", factor {rope.factor:g} from {rope.original_positions:,} positions"
    return f"{rope.kind}, theta {rope.theta:g}{stretched}"


def _adapter_facts(folder: Path, model: str | None) -> dict[str, Any]:
    """The facts of an adapter; raises as registering it would."""
    base = model_folder(model) if model is not None else _base_folder(folder)
    config = ModelConfig.from_folder(base)
    header = read_header(folder, config)
    layout = PageLayout(config)
    pages = layout.adapter_pages(AdapterShape(header.ranks, header.scales).page_ranks)
    return {
        "kind": "adapter",
        "base_model": str(base),
        "matched": f"{header.matched} of {header.total} modules",
        "dtype": header.dtype,
        "targets": _targets(header),
        "pages": pages,
        "as_many_pages_as_tokens": pages // layout.token_pages(1),
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
    named = read_json(folder / "adapter_config.json", AdapterError).get("base_model_name_or_path")
    if isinstance(named, str) and _is_model(named):
        return Path(named)
    raise AdapterError(
        f"the adapter's base model, {show(named)}, is no folder here: name it with --model DIR, or --model toy"
    )


def _is_model(name: str) -> bool:
    """Whether the text, which a stranger wrote, names a checkpoint folder."""
    try:
        return (Path(name) / "config.json").is_file()
    except (OSError, ValueError):  # too long, or no path at all
        return False
