"""`slora-ref generate`: one prompt, one adapter or none, text as it comes."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from slora_ref.cli.folders import TOY, model_folder
from slora_ref.cli.output import Subparsers, print_json
from slora_ref.cli.shards import add_shard_options, run_sharded
from slora_ref.config import EngineConfig
from slora_ref.config.engine import DTYPES
from slora_ref.config.fields import show
from slora_ref.engine import Completion, Engine
from slora_ref.errors import RequestError, UnknownAdapter
from slora_ref.request import FinishReason, SamplingParams
from slora_ref.toy import ADAPTERS_FOLDER, TASKS

SHOWN_NAMES = 20


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    parser = commands.add_parser(
        "generate",
        help="generate text with one adapter or the base model",
        description="Generates from one prompt. "
        "Example: slora-ref generate --model toy --use reverse-word --prompt hello=",
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="checkpoint folder, or `toy` for the model inside slora_ref"
    )
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="register a PEFT folder (repeatable)"
    )
    parser.add_argument("--use", metavar="NAME", help="adapter to use; default: the only one given, or the base model")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="the prompt as text")
    what.add_argument("--prompt-ids", metavar="1,17,4", help="the prompt as token ids")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep tokens this likely beside the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends the answer (repeatable)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    parser.add_argument("--device", choices=list(DTYPES), default="cpu", help="where the model runs (default: cpu)")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: launch kernels one by one")
    add_shard_options(parser)
    parser.add_argument(
        "--save-logits", type=Path, metavar="FILE.npz", help="save `logits`, float32 [prompt positions, vocab]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=lambda args: run_sharded(args, run))


def run(args: argparse.Namespace) -> int:
    """Generates.

    Raises:
        RequestError: the request ended by an error, since its input or its adapter is bad.
    """
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        keep_logits=args.save_logits is not None,
    )
    prompt = args.prompt if args.prompt is not None else _ids(args.prompt_ids)
    if args.save_logits is not None and not args.save_logits.parent.is_dir():
        raise RequestError(f"--save-logits {args.save_logits}: there is no folder {args.save_logits.parent}")
    if args.enforce_eager and args.device == "cpu":
        raise RequestError("--enforce-eager needs --device cuda: on the CPU nothing is captured")
    where = {name: getattr(args, name) for name in ("device", "shards", "communicator", "enforce_eager")}
    how = EngineConfig(max_running=1, **where)
    engine = Engine.from_pretrained(model_folder(args.model), how)
    adapter = _register(engine, args)
    done = _stream(engine, prompt, params, adapter, quiet=args.json)
    if args.save_logits is not None and done.logits:
        _save_logits(args.save_logits, done)
    if args.json:
        print_json(
            {
                "text": done.text,
                "token_ids": list(done.token_ids),
                "finish_reason": done.finish_reason.value,
                "adapter": adapter,
                "error": done.error,
            }
        )
    if done.finish_reason is FinishReason.ERROR:
        raise RequestError(done.error or "the request ended by an error")
    return 0


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(
            f"--prompt-ids {text[:80]!r} must be whole numbers with commas between, such as 1,17,4"
        ) from error


def _register(engine: Engine, args: argparse.Namespace) -> str | None:
    """Registers the adapters that were named and returns the one to use.

    Raises:
        RequestError: it is not clear which to use. UnknownAdapter: there is none of that name; says which there are.
    """
    if args.model == TOY:
        for task in TASKS:
            engine.add_adapter(task, ADAPTERS_FOLDER / task)
    given: list[str] = []
    for pair in args.adapter:
        name, equals, path = pair.partition("=")
        if not equals or not path:
            raise RequestError(f"--adapter {pair!r} must be NAME=DIR")
        engine.add_adapter(name, path)
        given.append(name)
    if args.use is None and len(given) > 1:
        raise RequestError(f"{len(given)} adapters given ({', '.join(given)}): say which with --use NAME")
    if args.use is None:
        return given[0] if given else None
    if args.use not in engine.adapters:
        raise UnknownAdapter(f"no adapter is registered as {show(args.use)}; {_known(engine.adapters)}")
    return str(args.use)


def _known(names: list[str]) -> str:
    if not names:
        return "none is registered: add it with --adapter NAME=DIR"
    more = ", ..." if len(names) > SHOWN_NAMES else ""
    return f"known: {', '.join(names[:SHOWN_NAMES])}{more}"


def _stream(
    engine: Engine, prompt: str | list[int], params: SamplingParams, adapter: str | None, quiet: bool
) -> Completion:
    done: Completion | None = None
    for news in engine.stream(prompt, params, adapter):
        if not quiet:
            print(news.text, end="" if news.completion is None else "\n", flush=True)
        done = news.completion
    assert done is not None, "the stream ended without a completion"
    if engine.tokenizer is None and not quiet:
        print(f"no tokenizer.json, so no text; token ids: {','.join(map(str, done.token_ids))}")
    return done


def _save_logits(path: Path, done: Completion) -> None:
    """Raises RequestError when the file cannot be written."""
    try:
        with path.open("wb") as file:
            np.savez(file, logits=np.stack(done.logits[: len(done.prompt_ids)]).astype(np.float32))
    except OSError as error:
        raise RequestError(f"--save-logits {path}: {error.strerror or error}") from error
