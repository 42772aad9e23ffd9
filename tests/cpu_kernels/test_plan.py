"""Refusals: all at plan time, naming the argument, the sequence and the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck

PAGES_OF_16 = {"num_kv_heads": 2, "head_dim": 64, "page_size": 16, "huge_pages": False}


def refused(message: str, lens: Any, table: Any, heads: int = 4, **options: Any) -> None:
    pages = ck.KVPages(6, **PAGES_OF_16)
    with pytest.raises((ValueError, TypeError), match=message):
        ck.plan_decode(pages, table, lens, heads, **options)


def test_numbers_out_of_range() -> None:
    one = [[0, 1]]
    refused(r"seq_lens\[0\] is -1", [-1], one)
    refused("num_q_heads 5 is not a positive multiple of num_kv_heads 2", [1], one, heads=5)
    refused("window_left is -2", [1], one, window_left=-2)
    refused("logits_soft_cap is -1.0", [1], one, logits_soft_cap=-1.0)
    refused("logits_soft_cap is nan", [1], one, logits_soft_cap=float("nan"))
    refused("sm_scale is inf", [1], one, sm_scale=float("inf"))
    refused("split_tokens is 40, expected a multiple of the page size 16", [1], one, split_tokens=40)
    refused("split_tokens is 0", [1], one, split_tokens=0)


def test_wrong_shapes_and_types() -> None:
    refused("block_table has 1 rows, but seq_lens has 2", [1, 2], [[0, 1]])
    refused("seq_lens must hold integers", [1.5], [[0]])
    refused("block_table must have 2 axes", [1], [0, 1])
    refused(r"alibi_slopes has shape \[3\], expected \[4\]", [1], [[0]], alibi_slopes=[1, 2, 3])
    refused("sinks holds a value that is not finite at query head 1", [1], [[0]], sinks=[0, np.nan, 0, 0])
    refused("beyond int32", [2**40], [[0]])


def test_slot_mapping_that_contradicts_the_table() -> None:
    refused(r"slot_mapping\[0\] is 5, but position 17 of sequence 0 lies in slot 17", [18], [[0, 1]], slot_mapping=[5])
    refused("slot_mapping has 2 entries, but there are 1 sequences", [18], [[0, 1]], slot_mapping=[17, 1])


def test_unknown_backend_and_level() -> None:
    refused("backend 'cuda' is unknown; known: native, torch, ipex", [1], [[0]], backend="cuda")
    refused("isa level|isa 'sse9'|CPU_KERNELS_ISA='sse9' is unknown", [1], [[0]], isa="sse9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 100}, "head_dim 100 is not supported: multiples of 16 up to 512 are"),
        ({"head_dim": 528}, "head_dim 528 is not supported"),
        ({"page_size": 24}, "page_size 24 is not supported; supported: 16, 32, 64, 128"),
        ({"page_size": 8}, "page_size 8 is not supported"),
        ({"dtype": "fp6"}, "dtype 'fp6' of the KV pages is unknown; known: fp32, bf16, fp16, int8, fp8"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_pages_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ck.KVPages(**{"num_pages": 4, "num_kv_heads": 2, "head_dim": 64, **options})


def test_run_checks_shapes_types_and_layers(problem: Any) -> None:
    p = problem([20])
    plan = p.plan()
    with pytest.raises(ValueError, match=r"q has shape \[1, 3, 64\], expected \[1, 4, 64\]"):
        plan.run(p.q[:, :3], p.out)
    with pytest.raises(TypeError, match="out has dtype float64"):
        plan.run(p.q, p.out.astype(np.float64))
    with pytest.raises(ValueError, match="last-axis stride of 8 bytes, expected 4"):
        plan.run(np.zeros((1, 4, 128), np.float32)[..., ::2], p.out)
    with pytest.raises(TypeError, match="lse must be float32"):
        plan.run(p.q, p.out, p.lse.astype(np.float16))
    with pytest.raises(ValueError, match="layer 1 is out of range: the pool has 1 layers"):
        plan.run(p.q, p.out, layer=1)
    with pytest.raises(ValueError, match="k_new and v_new come together"):
        plan.run(p.q, p.out, k_new=np.zeros((1, 2, 64), np.float32))
    with pytest.raises(TypeError, match="must be a NumPy array or a torch tensor, got list"):
        plan.run([1.0], p.out)


def test_empty_batch_is_no_work(problem: Any) -> None:
    p = problem([20])
    plan = ck.plan_decode(p.pages, np.zeros((0, 1), np.int32), np.zeros(0, np.int32), 4)
    plan.run(p.q[:0], p.out[:0], p.lse[:0])
    with ck.WorkerPool(1) as pool:
        pool.submit(plan, p.q[:0], p.out[:0]).wait(5)


def test_kv_bytes_counts_what_a_run_reads(problem: Any) -> None:
    p = problem([20, 0, 100])
    assert p.plan().kv_bytes == 120 * 2 * 64 * 2 * 2
    assert p.plan(window_left=9).kv_bytes == 20 * 2 * 64 * 2 * 2


def test_a_group_that_would_compile_for_minutes_is_refused():
    pages = ck.KVPages(2, 1, 64, dtype="fp32")
    with pytest.raises(ValueError, match="num_q_heads 129 over num_kv_heads 1 is a group of 129, at most 128"):
        ck.plan_decode(pages, [[0]], [3], 129)
