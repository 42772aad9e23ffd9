"""``hybridattn plan``: what fits where on a machine, what limits, what each policy does; or which machine to take."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import DTYPE_BYTES
from hybridattn.cost.catalog import BESIDE, SHAPES, shape
from hybridattn.cost.machine import with_cores
from hybridattn.cost.profile import Profile, changed, load_profile, shipped_names
from hybridattn.cost.room import GB
from hybridattn.planning.plan import plan
from hybridattn.planning.search import Wanted, search

TEXTBOOK = ("llama3.1-70b", "fp16", 131_072)
SEARCHED = ("search", "prices", "gpu", "cpu", "dtype", "kv_dtype", "json")  # options that a search takes


def add_parser(subparsers: Any) -> None:
    """Add the ``plan`` command to the subparsers of ``hybridattn``; its ``command`` takes the parsed arguments."""
    p = subparsers.add_parser("plan", help="what fits where, what limits, what each policy does", description=__doc__)
    p.add_argument("--gpu", help=f"profile or file, default a10: {', '.join(shipped_names('gpu'))}")
    p.add_argument("--gpus", type=int, default=1, help="as many of it, tensor parallel, beside the one CPU")
    p.add_argument("--cpu", help=f"profile or file; default: what usually stands beside it ({_names('cpu')})")
    p.add_argument("--link", help=f"profile or file; default: as above ({_names('link')})")
    p.add_argument("--model", default="llama3.1-8b", help=", ".join(SHAPES))
    p.add_argument("--dtype", default="fp16", choices=sorted(DTYPE_BYTES), help="of the weights")
    p.add_argument("--kv-dtype", default="", choices=["", *sorted(DTYPE_BYTES)], help="of K and V; default as --dtype")
    p.add_argument("--context", type=int, default=4096, help="tokens per request, prompt and output together")
    p.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    for part in ("gpu", "cpu"):
        p.add_argument(f"--{part}-memory", type=float, metavar="GB", help="other than its profile says")
        p.add_argument(f"--{part}-bandwidth", type=float, metavar="GB/s", help="other than its profile says")
    p.add_argument("--cores", type=int, help="of the CPU; its attention grows with them, up to 0.7 of the bandwidth")
    p.add_argument("--search", metavar="LOAD", help="the cheapest machine for 'llama3.1-8b 8192 x 64, tpot <= 80ms'")
    p.add_argument("--prices", type=Path, metavar="FILE", help="JSON, name to price, for --search; default: watts")
    p.add_argument("--json", action="store_true", help="print the plan as JSON")
    p.add_argument("--check", action="store_true", help="print the textbook check: a 70B model, one 128K-token request")
    p.set_defaults(command=run, defaults=vars(p.parse_args([])))


def _names(role: str) -> str:
    return ", ".join(shipped_names(role))


def run(args: argparse.Namespace) -> int:
    """Print the plan, what a search found, or the check. InputError for what makes no sense or does not fit."""
    if args.check:
        _refuse_others(args, "--check prints one fixed setting and", ("check",))
        print(textbook_check())
        return 0
    if args.search is not None:
        _refuse_others(args, "--search says model, context and requests itself and", SEARCHED)
        return _search(args)
    if args.prices:
        raise InputError("--prices rank the machines of --search, without which they have no effect")
    gpu, cpu, link = machine_of(args)
    found = plan(
        gpu, cpu, link, shape(args.model), args.dtype, args.context, args.concurrency, args.kv_dtype, args.gpus
    )
    print(json.dumps(asdict(found), indent=2) if args.json else found.describe())
    return 0


def machine_of(args: argparse.Namespace) -> tuple[Profile, Profile, Profile]:
    """GPU, CPU and link as named, with what they are said to have instead."""
    gpu = load_profile(args.gpu or "a10", "gpu")
    cpu, link = BESIDE.get(gpu.name, (None, None))
    cpu, link = args.cpu or cpu, args.link or link
    if cpu is None or link is None:
        raise InputError(f"nothing is known to stand beside GPU '{args.gpu}': give --cpu and --link")
    host = load_profile(cpu, "cpu")
    if args.cores is not None:
        host = with_cores(host, args.cores)
    return _changed(args, "gpu", gpu), _changed(args, "cpu", host), load_profile(link, "link")


def _changed(args: argparse.Namespace, part: str, profile: Profile) -> Profile:
    values = {name: getattr(args, f"{part}_{name}") for name in ("memory", "bandwidth")}
    for name, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{part}-{name} must be positive, got {value:g}")
    given = {name: value * GB for name, value in values.items() if value is not None}
    return changed(profile, **given) if given else profile


def _search(args: argparse.Namespace) -> int:
    wanted, prices = Wanted.parse(args.search), None
    if args.prices:
        prices = _prices(args.prices)
    found = search(wanted, args.dtype, args.kv_dtype, args.gpu, args.cpu, prices)
    c, unit = found.candidate, "price" if prices else "W"
    if args.json:
        machine = {
            "gpu": c.gpu.name,
            "gpus": c.gpus,
            "cpu": c.cpu.name,
            "link": c.link.name,
            "cost": c.cost,
            "in": unit,
        }
        print(json.dumps({**machine, "outcome": asdict(found.outcome), "refused": found.refused}, indent=2))
        return 0
    print(found.describe(wanted, unit))
    return 0


def _prices(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
        prices = {load_profile(name).name: float(price) for name, price in found.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"--prices {path} is no JSON object of names and numbers: {error}") from error
    bad = [name for name, price in prices.items() if not 0 <= price < float("inf")]
    if bad:
        raise InputError(f"--prices {path}: the price of {bad[0]} is {prices[bad[0]]:g}")
    return prices


def _refuse_others(args: argparse.Namespace, what: str, taken: tuple[str, ...]) -> None:
    """What would be ignored is refused."""
    for name, value in vars(args).items():
        if name not in (*taken, "command", "defaults") and value != args.defaults[name]:
            raise InputError(f"{what} takes no --{name.replace('_', '-')}")


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
