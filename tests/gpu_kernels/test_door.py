"""One door for arrays in both packages: the same cases, the same verdicts, nothing written where a call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cpu_kernels
import gpu_kernels
from cpu_kernels.reference import decode_reference, merge_reference

PAGES, HEADS, KV_HEADS, DIM, PAGE = 6, 4, 2, 32, 16
LENS = [20, 5]
TABLE = [[3, 1], [2, -1]]


class ByCpu:
    """The calls of `cpu_kernels` on one small pool."""

    def __init__(self) -> None:
        self.pages = cpu_kernels.KVPages(PAGES, KV_HEADS, DIM, PAGE, "fp32", huge_pages=False)
        k, v = content()
        cpu_kernels.pack(self.pages, 0, list(range(PAGES)), k.numpy(), v.numpy())

    def plain(self) -> list[np.ndarray]:
        return list(cpu_kernels.unpack(self.pages, 0, list(range(PAGES))))

    def plan(self, table: Any = TABLE, lens: Any = LENS, heads: Any = HEADS, **options: Any) -> Any:
        return cpu_kernels.plan_decode(self.pages, table, lens, heads, **options)

    def run(self, plan: Any, q: Any, out: Any, lse: Any = None) -> Any:
        return plan.run(q, out, lse)

    def append(self, k: Any, v: Any, slots: Any) -> None:
        cpu_kernels.append_kv(self.pages, 0, k, v, slots)

    merge = staticmethod(cpu_kernels.merge_state)


class ByTriton:
    """The calls of `gpu_kernels` on one small cache."""

    def __init__(self) -> None:
        self.caches = content()

    def plain(self) -> list[np.ndarray]:
        return [x.numpy().copy() for x in self.caches]

    def plan(self, table: Any = TABLE, lens: Any = LENS, heads: Any = HEADS, **options: Any) -> Any:
        return gpu_kernels.plan_decode(*self.caches, table, lens, heads, **options)

    def run(self, plan: Any, q: Any, out: Any, lse: Any = None) -> Any:
        return plan.run(q, *self.caches, out, lse)

    def append(self, k: Any, v: Any, slots: Any) -> None:
        gpu_kernels.append_kv(k, v, *self.caches, slots)

    merge = staticmethod(gpu_kernels.merge_state)


PACKAGES: dict[str, Callable[[], Any]] = {"cpu_kernels": ByCpu, "gpu_kernels": ByTriton}


def content() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    k, v = (torch.randn(PAGES, KV_HEADS, PAGE, DIM, generator=draw) for _ in range(2))
    return k, v


def rows(heads: int = HEADS, count: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, heads, DIM, generator=torch.Generator().manual_seed(seed))


def decode(p: Any, q: Any = None, out: Any = None, lse: Any = None, **options: Any) -> None:
    p.run(p.plan(**options), rows() if q is None else q, torch.zeros(2, HEADS, DIM) if out is None else out, lse)


def shifted(p: Any) -> None:
    both = torch.randn(3, HEADS, DIM)
    decode(p, both[:2], both[1:])


def in_the_other_type(p: Any) -> None:
    q = rows()
    decode(p, q, q.view(torch.float16)[..., :DIM])


def lse_in_q(p: Any) -> None:
    q = rows()
    decode(p, q, lse=q.view(-1)[: 2 * HEADS].view(2, HEADS))


def lse_in_out(p: Any) -> None:
    out = rows()
    decode(p, out=out, lse=out.view(-1)[-2 * HEADS :].view(2, HEADS))


def merged(p: Any, change: Callable[..., Any]) -> None:
    a, b, la, lb = rows(seed=1), rows(seed=2), torch.randn(2, HEADS), torch.randn(2, HEADS)
    change(p.merge, a, la, b, lb)


NEW = {"k": rows(KV_HEADS, seed=5), "v": rows(KV_HEADS, seed=6)}

REFUSED: dict[str, Callable[[Any], None]] = {
    "out expanded over rows": lambda p: decode(p, out=torch.zeros(1, HEADS, DIM).expand(2, HEADS, DIM)),
    "out expanded over heads": lambda p: decode(p, out=torch.zeros(2, 1, DIM).expand(2, HEADS, DIM)),
    "out of rows that overlap": lambda p: decode(p, out=torch.zeros(512).as_strided((2, HEADS, DIM), (DIM, DIM, 1))),
    "lse expanded": lambda p: decode(p, lse=torch.zeros(2, 1).expand(2, HEADS)),
    "out a row behind q": shifted,
    "out in q as another type": in_the_other_type,
    "lse in q": lse_in_q,
    "lse in out": lse_in_out,
    "out of another dtype": lambda p: decode(p, out=torch.zeros(2, HEADS, DIM, dtype=torch.float64)),
    "out of another shape": lambda p: decode(p, out=torch.zeros(2, HEADS, DIM + 16)),
    "q of another dtype": lambda p: decode(p, rows().double()),
    "q with a stride in its last axis": lambda p: decode(p, torch.zeros(2, HEADS, 2 * DIM)[..., ::2]),
    "q a negated view": lambda p: decode(p, torch._neg_view(rows())),
    "q sparse": lambda p: decode(p, rows().to_sparse()),
    "heads of a truth value": lambda p: p.plan(heads=True),
    "q a list": lambda p: decode(p, rows().tolist()),
    "lse of half": lambda p: decode(p, lse=torch.zeros(2, HEADS, dtype=torch.float16)),
    "one slot twice": lambda p: p.append(**NEW, slots=torch.tensor([7, 7])),
    "one slot twice in a list": lambda p: p.append(**NEW, slots=[40, 40]),
    "a slot past the end": lambda p: p.append(**NEW, slots=[3, PAGES * PAGE]),
    "a slot below -1": lambda p: p.append(**NEW, slots=[3, -2]),
    "slots of floats": lambda p: p.append(**NEW, slots=torch.tensor([1.0, 2.0])),
    "k and v of two dtypes": lambda p: p.append(NEW["k"], NEW["v"].half(), [1, 2]),
    "rows without a slot": lambda p: p.append(**NEW, slots=[1]),
    "a table of floats": lambda p: p.plan(table=torch.tensor(TABLE).float()),
    "a page that is not there": lambda p: p.plan(table=[[PAGES, 1], [2, -1]]),
    "a page of -1": lambda p: p.plan(table=[[3, -1], [2, -1]]),
    "a table too short": lambda p: p.plan(table=[[3], [2]]),
    "a ragged table": lambda p: p.plan(table=[[3, 1], [2]]),
    "a negative length": lambda p: p.plan(lens=[20, -5]),
    "a length beyond 32 bits": lambda p: p.plan(lens=[20, 2**40]),
    "heads of a float": lambda p: p.plan(heads=4.0),
    "heads that do not divide": lambda p: p.plan(heads=3),
    "a window in words": lambda p: p.plan(window_left="all"),
    "a window of a float": lambda p: p.plan(window_left=2.5),
    "both sides as one window": lambda p: p.plan(window_left=(-1, 0, 0)),
    "a window below -1": lambda p: p.plan(window_left=-2),
    "a right window of a causal row": lambda p: p.plan(window_right=3),
    "a cap in words": lambda p: p.plan(logits_soft_cap="off"),
    "a cap of -1": lambda p: p.plan(logits_soft_cap=-1),
    "a scale that is not finite": lambda p: p.plan(sm_scale=float("nan")),
    "a flag of a number": lambda p: p.plan(causal=1),
    "slopes of another count": lambda p: p.plan(alibi_slopes=[0.1]),
    "sinks that are not numbers": lambda p: p.plan(sinks=[0.0, float("nan"), 0.0, 0.0]),
    "a position below 0": lambda p: p.plan(query_pos=[19, -1]),
    "positions of other rows": lambda p: p.plan(key_start=[0]),
    "a split of no pages": lambda p: p.plan(split_tokens=100.5),
    "merge into half of a part": lambda p: merged(
        p, lambda merge, a, la, b, lb: merge(a[:1], la[:1], b[:1], lb[:1], b.view(-1)[16:144].view(1, HEADS, DIM))
    ),
    "merge into an expanded out": lambda p: merged(
        p, lambda merge, a, la, b, lb: merge(a, la, b, lb, torch.zeros(1, HEADS, DIM).expand(2, HEADS, DIM))
    ),
    "merge of two types": lambda p: merged(p, lambda merge, a, la, b, lb: merge(a, la, b.half(), lb)),
    "merge of two shapes": lambda p: merged(p, lambda merge, a, la, b, lb: merge(a, la, b[:1], lb)),
    "merge with a mask of numbers": lambda p: merged(
        p, lambda merge, a, la, b, lb: merge(a, la, b, lb, mask=torch.tensor([1, 0]))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("package", PACKAGES)
def test_refused_before_anything_is_written(package: str, name: str) -> None:
    p = PACKAGES[package]()
    before = p.plain()
    with pytest.raises((ValueError, TypeError)) as caught:
        REFUSED[name](p)
    assert len(str(caught.value)) > 20 and "\n" not in str(caught.value).strip()
    assert all(np.array_equal(a, b) for a, b in zip(before, p.plain(), strict=True))


ACCEPTED: dict[str, dict[str, Any]] = {
    "lists": {},
    "int64 tensors": {"table": torch.tensor(TABLE), "lens": torch.tensor(LENS)},
    "unsigned and small integers": {"table": np.array([[3, 1], [2, 0]], np.uint8), "lens": np.array(LENS, np.int16)},
    "numpy scalars": {"heads": np.int64(HEADS), "window_left": np.int32(7), "sm_scale": np.float32(0.25)},
    "off as None": {"window_left": None, "window_right": None, "logits_soft_cap": None, "split_tokens": None},
    "off as -1 and 0": {"window_left": -1, "window_right": -1, "logits_soft_cap": 0},
    "-1 left of the window": {"table": [[-1, 1], [2, 2**31 - 1]], "window_left": 3},
    "sinks of -inf": {"sinks": [0.5, -np.inf, 1.0, -np.inf]},
    "a window per row": {"window_left": [4, -1]},
    "not causal, a right window": {"causal": False, "window_right": 2, "query_pos": [11, 1]},
    "a flag per row": {"causal": [True, False], "query_pos": [11, 1]},
    "slopes per row": {"alibi_slopes": np.linspace(0, 0.3, 2 * HEADS).reshape(2, HEADS)},
    "slopes of bf16": {"alibi_slopes": cpu_kernels.to_bf16(np.array([0.5, 0.25, 0.125, 0.0625]))},
    "sinks in one row": {"sinks": [0.5, 1.0, 1.5, 2.0], "with_sinks": [True, False]},
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("package", PACKAGES)
def test_accepted_and_right(package: str, name: str) -> None:
    p, options = PACKAGES[package](), dict(ACCEPTED[name])
    q, out, lse = rows(), torch.full((2, HEADS, DIM), torch.nan), torch.full((2, HEADS), torch.nan)
    p.run(p.plan(**options), q, out, lse)
    options.pop("heads", None)
    k, v = p.plain()
    if name == "slopes of bf16":
        options["alibi_slopes"] = cpu_kernels.from_bf16(options["alibi_slopes"])
    table, lens = (np.asarray(options.pop(name, x)) for name, x in (("table", TABLE), ("lens", LENS)))
    options.pop("split_tokens", None)
    want, sums = decode_reference(q.double().numpy(), k, v, table, lens, **options)
    np.testing.assert_allclose(out.numpy(), want, atol=3e-6)
    np.testing.assert_allclose(lse.numpy(), sums, atol=1e-5)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_result_may_take_exactly_the_place_of_the_queries(package: str) -> None:
    p, q = PACKAGES[package](), rows()
    want = torch.zeros_like(q)
    p.run(p.plan(), q, want)
    p.run(p.plan(), q, q)
    assert torch.equal(q, want)


@pytest.mark.parametrize("package", PACKAGES)
def test_columns_of_one_matrix_do_not_overlap(package: str) -> None:
    p, fused = PACKAGES[package](), torch.zeros(2, 2 * HEADS, DIM)
    fused[:, :HEADS] = rows()
    want = torch.zeros(2, HEADS, DIM)
    p.run(p.plan(), rows(), want)
    p.run(p.plan(), fused[:, :HEADS], fused[:, HEADS:])
    assert torch.equal(fused[:, HEADS:], want) and torch.equal(fused[:, :HEADS], rows())


@pytest.mark.parametrize("off", [np.inf, -np.inf])
@pytest.mark.parametrize("package", PACKAGES)
def test_an_empty_part_may_say_plus_infinity(package: str, off: float) -> None:
    p, part, sums = PACKAGES[package](), rows(seed=1), torch.randn(2, HEADS)
    empty, none = torch.full((2, HEADS, DIM), torch.nan), torch.full((2, HEADS), off)
    for given in ((empty, none, part, sums), (part, sums, empty, none)):
        out, lse = p.merge(*given)
        assert torch.equal(out, part) and torch.equal(lse, sums)
        by_oracle, lse_by_oracle = merge_reference([given[0].numpy(), given[2].numpy()], [given[1], given[3]])
        np.testing.assert_allclose(by_oracle, part.numpy(), rtol=1e-12)
        np.testing.assert_allclose(lse_by_oracle, sums.numpy(), rtol=1e-12)
    out, lse = p.merge(empty, none, empty, none)
    assert (out == 0).all() and torch.isneginf(lse).all()


@pytest.mark.parametrize("package", PACKAGES)
def test_merge_in_place_with_a_mask_and_in_base_2(package: str) -> None:
    p, a, b, la, lb = PACKAGES[package](), rows(seed=1), rows(seed=2), torch.randn(2, HEADS), torch.randn(2, HEADS)
    want, sums = merge_reference([a.numpy(), b.numpy()], [la, lb])
    place, logs = a.clone(), la / np.log(2)
    out, lse = p.merge(place, logs, b, lb / np.log(2), place, logs, mask=torch.tensor([True, False]), base2=True)
    assert out is place and lse is logs
    np.testing.assert_allclose(out[0].numpy(), want[0], atol=1e-6)
    np.testing.assert_allclose(lse[0].numpy(), sums[0] / np.log(2), atol=1e-6)
    assert torch.equal(out[1], a[1]) and torch.equal(lse[1], la[1] / np.log(2))
