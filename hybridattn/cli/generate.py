"""``hybridattn generate``: answer prompts with a real model, as a stream of text or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import hybridattn
from hybridattn.core.chrome import write_chrome
from hybridattn.core.errors import InputError
from hybridattn.core.params import NoEffectWarning, SamplingParams
from hybridattn.core.terminal import as_text, is_unicode
from hybridattn.engine.call import Output


def add_parser(commands: Any) -> None:
    """Add the subcommand to an ``argparse`` subparsers object."""
    p = commands.add_parser("generate", help="answer prompts", description="Answer prompts with a real model.")
    p.set_defaults(command=run)
    _add_input(p)
    _add_engine(p)
    _add_sampling(p)


def _add_input(p: argparse.ArgumentParser) -> None:
    p.add_argument("prompts", nargs="*", metavar="PROMPT")
    p.add_argument("--prompts-file", type=Path, metavar="FILE", help='JSONL, one {"prompt": "..."} a line')
    p.add_argument("--json", action="store_true", help="one JSON object per prompt instead of a stream of text")
    p.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (opens in Perfetto)")


def _add_engine(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--model", default="smollm2-135m", help="name, safetensors folder, or GGUF file (default %(default)s)"
    )
    p.add_argument("--device", default="host", help="host or cuda (default %(default)s)")
    p.add_argument(
        "--policy", default="async_overlap",
        help="gpu_only, sync_offload, async_overlap, asymmetric, adaptive, auto, or module:Class (default %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--profile", metavar="FILE", help="what `calibrate` wrote, for policies that plan (default: where it writes)"
    )
    p.add_argument("--dtype", default="fp32", help="fp32, bf16, or on cuda fp16 (default %(default)s)")
    p.add_argument("--kv-dtype", help="dtype of K and V, default as --dtype")
    p.add_argument("--cpu-fraction", type=float, metavar="F", help="force this share of requests onto the CPU tier")
    p.add_argument(
        "--gpu-kv-blocks", type=int, metavar="N", help="pages of the GPU tier (default: those of 4,096 tokens)"
    )
    p.add_argument(
        "--cpu-kv-blocks", type=int, metavar="N", help="pages of the CPU tier (default: those of 8,192 tokens)"
    )
    p.add_argument("--page-size", type=int, metavar="N", help="tokens per page (default: what `doctor` says is best)")
    p.add_argument("--max-model-len", type=int, metavar="N", help="prompt + output tokens of a request")
    p.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="requests at a time (default %(default)s)")
    p.add_argument(
        "--max-num-batched-tokens", type=int, default=512, metavar="N", help="GPU rows of a step (default %(default)s)"
    )
    p.add_argument(
        "--op-timeout", type=float, default=60.0, metavar="S", help="longest wait for one op (default %(default)s s)"
    )


def _add_sampling(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="output tokens at most (default %(default)s)"
    )
    p.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    p.add_argument("--top-k", type=int, default=-1, metavar="K")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P")
    p.add_argument("--min-p", type=float, default=0.0, metavar="P")
    p.add_argument("--seed", type=int, metavar="N", help="of each request's draws")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    p.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    p.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    p.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    p.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")


def run(args: argparse.Namespace) -> int:
    """The command; 0 when it worked."""
    prompts = [as_text(word) for word in args.prompts] + (read_prompts(args.prompts_file) if args.prompts_file else [])
    if not prompts:
        raise InputError("no prompt was given: name one or more, or a --prompts-file")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"prompt {i} is empty")
    params = _sampling(args)
    if args.trace is not None and not args.trace.parent.is_dir():
        raise InputError(f"--trace: the folder {args.trace.parent} does not exist")
    with _open(args) as llm:
        if args.json:
            failed = _print_json(llm, prompts, params)
        else:
            failed = _stream(llm, prompts, params)
        if llm.policy.steps_by_layout and not args.json:
            print(f"hybridattn: {llm.policy!r}", file=sys.stderr)
        if args.trace is not None:
            write_chrome(llm.trace(), args.trace)
    return 1 if failed else 0


def _open(args: argparse.Namespace) -> hybridattn.LLM:
    names = (
        "model", "device", "policy", "dtype", "kv_dtype", "gpu_kv_blocks", "cpu_kv_blocks", "page_size",
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "cpu_fraction", "profile",
    )  # fmt: skip
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
    return hybridattn.LLM(**given, op_timeout_s=args.op_timeout, record=args.trace is not None)


def _sampling(args: argparse.Namespace) -> SamplingParams:
    names = (
        "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "repetition_penalty",
        "presence_penalty", "frequency_penalty",
    )  # fmt: skip
    if args.seed is not None and args.temperature == 0:
        warnings.warn("--seed has no effect at --temperature 0, the default", NoEffectWarning, stacklevel=2)
    return SamplingParams(stop=tuple(map(as_text, args.stop)), **{name: getattr(args, name) for name in names})


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSONL file; InputError names the line that cannot be used."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028 may stand in a string
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts-file {path} cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"--prompts-file {path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise InputError(f'--prompts-file {path}, line {number}: expected an object with a string "prompt"')
        prompts.append(row["prompt"])
    if not prompts:
        raise InputError(f"--prompts-file {path} holds no prompt")
    return prompts


def _print_json(llm: hybridattn.LLM, prompts: list[str], params: SamplingParams) -> int:
    """One object per prompt, also of those that an interrupt leaves behind; returns how many failed."""
    escaped = not is_unicode(sys.stdout)  # as JSON does it: escapes of the stream's own would be no JSON
    outputs: list[Output] = []
    try:
        outputs = llm.generate(prompts, params, progress=sys.stderr.isatty())
    except KeyboardInterrupt:
        outputs = llm.interrupted
        raise
    finally:
        for output in outputs:
            print(json.dumps(_as_dict(output, llm), ensure_ascii=escaped), flush=True)
    return sum(output.error is not None for output in outputs)


def _stream(llm: hybridattn.LLM, prompts: list[str], params: SamplingParams) -> int:
    """Print texts in the order of the prompts: the first unfinished one live, the later ones when it is their turn.
    Returns how many failed; why goes to the error stream."""
    failed = 0
    held: list[list[str]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    turn = 0
    for piece in llm.stream(prompts, params):
        held[piece.index].append(piece.text)
        ended[piece.index] = piece.finish_reason is not None
        if piece.error is not None:
            failed += 1
            print(f"hybridattn: prompt {piece.index}: {piece.error}", file=sys.stderr)
        while turn < len(prompts):
            print("".join(held[turn]), end="", flush=True)
            held[turn].clear()
            if not ended[turn]:
                break
            print(flush=True)
            turn += 1
    return failed


def _as_dict(output: Output, llm: hybridattn.LLM) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "error": output.error,
        "tier": output.tier,
        "policy": llm.policy.name,
        "steps_by_layout": llm.policy.steps_by_layout,
        "device": llm.device.name,
        "metrics": output.metrics,
    }
