"""``python -m cpu_kernels.bench``: one line per case, JSON or a table row."""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cpu_kernels as ck
from cpu_kernels.bench.cases import EACH, REFERENCE, SETS, Case, ragged
from cpu_kernels.bench.measure import Prepared, measure, measure_beside_neighbour

COLUMNS = ("case", "dtype", "group", "head_dim", "page_size", "threads", "gbs_median", "spread", "read_gbs",
           "share_of_read_bandwidth", "gbs_ratio", "tokens_ratio", "vs_vllm", "vs_torch", "vs_ipex",
           "slowdown_median", "rel_err")  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cpu_kernels.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, all samples kept")
    parser.add_argument("--peers", type=Path, help="folder with the environments of vLLM (vllm/) and IPEX (ipex/)")
    parser.add_argument("--sets", default=",".join(SETS), help=f"of {', '.join(SETS)}")
    parser.add_argument("--trace", type=Path, help="Azure conversation trace (CSV), for ragged lengths")
    parser.add_argument("--page-size", type=int, help="tokens of a page in all cases; default: each case's own")
    parser.add_argument("--rounds", type=int, default=40, help="paired rounds a case")
    parser.add_argument("--threads", type=int, help="workers; default: one a usable core")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[Case]:
    unknown = [name for name in args.sets.split(",") if name not in SETS]
    if unknown:
        raise SystemExit(f"--sets: unknown {', '.join(unknown)}; known: {', '.join(SETS)}")
    cases = [case for name in args.sets.split(",") for case in SETS[name]]
    if args.trace is not None:
        cases.append(ragged(args.trace))
    return cases if args.page_size is None else [replace(case, page=args.page_size) for case in cases]


def stamp() -> dict[str, Any]:
    here = ck.topology.read()
    return {"cpu": here.cpu_model, "cores": here.num_cores, "date": datetime.date.today().isoformat()}


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    prepared: dict[str, Prepared] = {}
    if not args.json:
        print(" | ".join(COLUMNS))
    with ck.WorkerPool(args.threads) as pool:
        for case in chosen(args):
            if case.neighbour:
                row = measure_beside_neighbour(case, pool, args.rounds)
            else:
                row = measure(case, pool, args.rounds, _against(case, prepared, args.page_size), args.peers)
            row |= stamp()
            print(json.dumps(row) if args.json else " | ".join(str(row.get(c, "-")) for c in COLUMNS), flush=True)


def _against(case: Case, prepared: dict[str, Prepared], page_size: int | None = None) -> Prepared | None:
    """The case to compare with, on pages of `page_size` if given; only one is kept in memory."""
    if not case.against:
        return None
    if case.against not in prepared:
        prepared.clear()
        other = next(c for c in (*REFERENCE, *EACH) if c.name == case.against)
        prepared[case.against] = Prepared(other if page_size is None else replace(other, page=page_size))
    return prepared[case.against]


if __name__ == "__main__":
    main()
