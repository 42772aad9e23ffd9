"""Runs in another library's environment: sets up one case, then times one call for each line on standard input.

    PYTHON peer_server.py vllm|torch|ipex '{"group": 4, "heads": 8, "dim": 128, "page": 32, "lens": [9], "threads": 2}'

Prints one JSON line when ready (with the relative error of sequence 0 against float64), then the nanoseconds of each
call. Imports nothing of this package, so that it runs wherever the library does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], torch.Tensor]


class Paged:
    """Random plain pages, a shuffled table, queries."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.lens, self.page, self.heads, self.dim = case["lens"], case["page"], case["heads"], case["dim"]
        self.group = case["group"]
        width = max(-(-n // self.page) for n in self.lens)
        count = len(self.lens) * width
        self.k, self.v = (torch.randn(count, self.heads, self.page, self.dim).bfloat16() for _ in range(2))
        self.table = torch.randperm(count).int().view(len(self.lens), width)
        self.q = torch.randn(len(self.lens), self.heads * self.group, self.dim).bfloat16()
        self.scale = self.dim**-0.5
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32)

    def of_first(self, pages: torch.Tensor) -> torch.Tensor:
        """K or V of sequence 0 as [kv heads, tokens, dim]."""
        return pages[self.table[0].long()].transpose(0, 1).flatten(1, 2)[:, : self.lens[0]]


def vllm(p: Paged) -> Call:
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]  # type: ignore[union-attr,index]
    torch.ops.load_library(os.path.join(folder, "_C.abi3.so"))
    ops, out = torch.ops._C, torch.empty_like(p.q)
    isa = "amx" if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx() else "vec"  # asks the kernel for tiles
    k, v = torch.empty_like(p.k), torch.empty_like(p.v)
    flat = [x.transpose(1, 2).reshape(-1, p.heads, p.dim) for x in (p.k, p.v)]
    slots = torch.arange(len(flat[0]))
    ops.cpu_attn_reshape_and_cache(flat[0], flat[1], k, v, slots, isa, 1.0, 1.0, "auto")
    starts, n = torch.arange(len(p.lens) + 1, dtype=torch.int32), len(p.lens)
    heads = p.heads * p.group
    meta = ops.get_scheduler_metadata(
        n, heads, p.heads, p.dim, p.seq_lens, torch.bfloat16, starts, True, -1, isa, True, None, "auto"
    )

    def call() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            p.q,
            k,
            v,
            out,
            starts,
            p.seq_lens,
            p.scale,
            True,
            None,
            -1,
            p.table,
            0.0,
            meta,
            None,
            None,
            1.0,
            1.0,
            "auto",
        )
        return out[0]

    return call


def ipex(p: Paged) -> Call:
    import intel_extension_for_pytorch  # noqa: F401

    out = torch.empty_like(p.q)
    owner = torch.arange(p.heads, dtype=torch.int32).repeat_interleave(p.group)

    def call() -> torch.Tensor:
        torch.ops.torch_ipex.single_query_cached_kv_attention(
            out, p.q, p.k, p.v, owner, p.scale, p.table, p.seq_lens, p.page, max(p.lens), None, -1, 1.0, 1.0, -1.0
        )
        return out[0]

    return call


def sdpa(p: Paged) -> Call:
    """Contiguous K and V (no paging), the group folded into the query length: the best case of plain torch."""
    if len(set(p.lens)) > 1:
        raise ValueError("torch SDPA is measured on equal lengths only")
    k, v = (
        x[p.table.long()].transpose(1, 2).reshape(len(p.lens), p.heads, -1, p.dim)[:, :, : p.lens[0]].contiguous()
        for x in (p.k, p.v)
    )
    q = p.q.view(len(p.lens), p.heads, p.group, p.dim)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=p.scale)[0].flatten(0, 1)


def relative_error(p: Paged, got: torch.Tensor) -> float:
    k, v = (p.of_first(x).double().repeat_interleave(p.group, 0) for x in (p.k, p.v))
    weights = (torch.einsum("hd,hnd->hn", p.q[0].double(), k) * p.scale).softmax(-1)
    want = torch.einsum("hn,hnd->hd", weights, v)
    return float((got.double() - want).norm() / want.norm())


def main() -> None:
    name, case = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    p = Paged(case)
    call = {"vllm": vllm, "ipex": ipex, "torch": sdpa}[name](p)
    print(json.dumps({"rel_err": relative_error(p, call()), "torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter_ns()
        call()
        print(time.perf_counter_ns() - start, flush=True)


if __name__ == "__main__":
    main()
