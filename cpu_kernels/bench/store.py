"""``python -m cpu_kernels.bench.store``: `append_kv` of a chunk of 2,048 tokens against a copy of as many bytes.

A row per dtype of the pages, a column per dtype of the tokens: bytes of the larger side over time, as a share of what
``np.copyto`` moves. One thread, by its CPU time, best of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

import cpu_kernels as ck

TOKENS, HEADS, DIM = 2048, 8, 128


def best_ns(call: Callable[[], object], rounds: int) -> int:
    """The shortest of `rounds` calls, by the CPU time of this thread."""
    took = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        call()
        took.append(time.thread_time_ns() - start)
    return min(took)


def share(dtype: str, rows: np.ndarray, rounds: int) -> float:
    """How fast rows ``[2, tokens, heads, head_dim]`` of K and V are stored in pages of `dtype`, against a copy."""
    pages = ck.KVPages(TOKENS // 32, HEADS, DIM, 32, dtype)
    order = np.random.default_rng(1).permutation(pages.num_pages)
    slots = (order[:, None] * 32 + np.arange(32)).ravel()
    size = rows.size // 2 * max(pages.layout.element_bytes, rows.itemsize)
    source, target = (np.full((2, size), x, np.uint8) for x in (1, 0))
    k, v = rows

    def copy() -> None:
        for to, given in zip(target, source, strict=True):
            np.copyto(to, given)

    stored = best_ns(lambda: ck.append_kv(pages, 0, k, v, slots), rounds)
    return best_ns(copy, rounds) / stored


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cpu_kernels.bench.store", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args(argv).rounds
    wide = np.random.default_rng(0).standard_normal((2, TOKENS, HEADS, DIM)).astype(np.float32)
    given = {"bf16": ck.to_bf16(wide), "fp16": wide.astype(np.float16), "fp32": wide}
    print("| to |" + "|".join(f" from {name} " for name in given) + "|")
    for dtype in ("bf16", "fp16", "int8", "fp8"):
        print(f"| {dtype} |" + "|".join(f" {share(dtype, rows, rounds):.2f} " for rows in given.values()) + "|")


if __name__ == "__main__":
    main()
