"""``hybridattn plan``: what fits where on a machine, what limits, and which policy should win."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import DTYPE_BYTES
from hybridattn.cost.catalog import SHAPES, shape
from hybridattn.cost.planning import GB, plan
from hybridattn.cost.profile import shipped_names

# What stands beside a GPU unless asked for something else: the pairs of well-known instances.
BESIDE = {
    "t4": ("xeon-8259cl-8c", "pcie3-x16"),
    "l4": ("epyc-7r32-16c", "pcie4-x16"),
    "a10": ("epyc-7r32-16c", "pcie4-x16"),
    "a10g": ("epyc-7r32-16c", "pcie4-x16"),
    "a100-80g": ("epyc-7r32-32c", "pcie4-x16"),
    "h100": ("epyc-7r32-32c", "pcie5-x16"),
    "h200": ("epyc-7r32-32c", "pcie5-x16"),
    "gh200": ("grace-72c", "nvlink-c2c"),
}
TEXTBOOK = ("llama3.1-70b", "fp16", 131_072)


def add_parser(subparsers: Any) -> None:
    """Add the ``plan`` command to the subparsers of ``hybridattn``; its ``command`` takes the parsed arguments."""
    p = subparsers.add_parser("plan", help="what fits where, what limits, which policy should win", description=__doc__)
    p.add_argument("--gpu", default="a10", help=f"profile or file: {', '.join(shipped_names('gpu'))}")
    p.add_argument("--cpu", help=f"profile or file; default: what usually stands beside it ({_names('cpu')})")
    p.add_argument("--link", help=f"profile or file; default: as above ({_names('link')})")
    p.add_argument("--model", default="llama3.1-8b", help=", ".join(SHAPES))
    p.add_argument("--dtype", default="fp16", choices=sorted(DTYPE_BYTES), help="of the weights")
    p.add_argument("--kv-dtype", default="", choices=["", *sorted(DTYPE_BYTES)], help="of K and V; default as --dtype")
    p.add_argument("--context", type=int, default=4096, help="tokens per request, prompt and output together")
    p.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    p.add_argument("--json", action="store_true", help="print the plan as JSON")
    p.add_argument("--check", action="store_true", help="print the textbook check: a 70B model, one 128K-token request")
    p.set_defaults(command=run, defaults=vars(p.parse_args([])))


def _names(role: str) -> str:
    return ", ".join(shipped_names(role))


def run(args: argparse.Namespace) -> int:
    """Print the plan (or the check). InputError for names, shapes and numbers that make no sense."""
    if args.check:
        _refuse_others(args)
        print(textbook_check())
        return 0
    cpu, link = BESIDE.get(Path(args.gpu).stem, (None, None))
    cpu, link = args.cpu or cpu, args.link or link
    if cpu is None or link is None:
        raise InputError(f"nothing is known to stand beside GPU '{args.gpu}': give --cpu and --link")
    found = plan(args.gpu, cpu, link, shape(args.model), args.dtype, args.context, args.concurrency, args.kv_dtype)
    print(json.dumps(asdict(found), indent=2) if args.json else found.describe())
    return 0


def _refuse_others(args: argparse.Namespace) -> None:
    """The check is of one fixed setting: what would be ignored is refused."""
    others = {name: value for name, value in vars(args).items() if name not in ("check", "command", "defaults")}
    for name, value in others.items():
        if value != args.defaults[name]:
            raise InputError(f"--check prints one fixed setting and takes no --{name.replace('_', '-')}")


def textbook_check() -> str:
    """Weights and KV of a well-known size, computed from the shape alone."""
    name, dtype, tokens = TEXTBOOK
    model = shape(name)
    weights = model.num_params * DTYPE_BYTES[dtype]
    kv = model.kv_bytes_per_token(dtype)
    return (
        f"{name} in {dtype}: about {weights / GB:.0f} GB of weights; {kv:,} B of KV per token, so about "
        f"{kv * tokens / GB:.0f} GB ({kv * tokens / 2**30:.0f} GiB) for one request of {tokens:,} tokens"
    )
