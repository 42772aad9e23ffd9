"""The registry, torch arrays, the torch back end, the doctor."""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck
from cpu_kernels import backends, doctor


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "fp8"])
def test_torch_back_end_follows_the_contract(problem: Any, dtype: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    p = problem([5, 0, 97], dtype=dtype)
    options: dict[str, Any] = {
        "window_left": 50, "logits_soft_cap": 2.0, "alibi_slopes": np.full(4, 0.1), "sinks": np.zeros(4),
    }  # fmt: skip
    for chosen in ({}, options):
        out, lse = p.run(backend="torch", **chosen)
        want, sums = p.want(**chosen)
        assert np.abs(out - want).max() < 1e-5
        assert np.array_equal(np.isneginf(lse), np.isneginf(sums))
        assert np.abs(lse[[0, 2]] - sums[[0, 2]]).max() < 1e-4


def test_torch_tensors_go_in_and_out(problem: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    p = problem([40, 97], poison=False)
    q = torch.from_numpy(p.q).bfloat16()
    out, lse = torch.full(q.shape, torch.nan, dtype=torch.bfloat16), torch.empty(2, 4)
    plan = ck.plan_decode(p.pages, torch.from_numpy(p.table), torch.from_numpy(p.lens), 4)
    plan.run(q, out, lse)
    assert np.abs(out.float().numpy() - p.want()[0]).max() < 2e-2
    k = torch.randn(3, 2, 64, dtype=torch.float16)
    ck.append_kv(p.pages, 0, k, k, torch.tensor([0, 1, 2]))
    got = torch.empty(3, 2, 64)
    ck.gather_kv(p.pages, 0, [0], 3, got, torch.empty(3, 2, 64))
    assert (got - k.float()).abs().max() < 0.02
    with pytest.raises(ValueError, match="q lives on meta; the CPU kernels take host memory only"):
        plan.run(q.to("meta"), out)


def test_k_new_goes_through_the_torch_back_end(problem: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    p = problem([33], poison=False, dtype="fp32")
    new = np.random.default_rng(0).standard_normal((1, 2, 64)).astype(np.float32)
    p.plan(backend="torch").run(p.q, p.out, k_new=new, v_new=new)
    k, v = ck.unpack(p.pages, 0, np.arange(p.pages.num_pages))
    assert np.abs(p.out - ck.reference.decode_reference(p.q, k, v, p.table, p.lens)[0]).max() < 1e-5
    assert np.array_equal(k[p.table[0, 1], :, 0], new[0])


@pytest.mark.skipif(find_spec("intel_extension_for_pytorch") is not None, reason="IPEX is installed here")
def test_an_absent_back_end_says_why(problem: Any) -> None:
    reason = "backend 'ipex' needs .*intel_extension_for_pytorch, which this environment does not have .*make ipex"
    with pytest.raises(ValueError, match=reason):
        problem([5]).plan(backend="ipex")
    assert any("backend ipex: backend 'ipex' needs" in line for line in doctor.lines())


def test_the_doctor_names_level_override_and_cache() -> None:
    text = "\n".join(doctor.lines())
    assert f"ISA level: {ck.isa.detect().level}" in text and "CPU_KERNELS_ISA" in text
    assert "backend native: available" in text and "compiled code:" in text


def test_isa_has_no_meaning_for_torch(problem: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ValueError, match="isa='avx2' has no meaning for backend 'torch'"):
        problem([5]).plan(backend="torch", isa="avx2")


def test_registry_names_are_modules() -> None:
    assert set(backends.REGISTRY) == {"native", "torch", "ipex", "numba", "numba_topk_approx"}
    assert all(find_spec(module) for module in backends.REGISTRY.values())


@pytest.mark.peers
def test_ipex_follows_the_contract_where_it_can(problem: Any) -> None:
    """Run by `make ipex`, in the environment that holds IPEX."""
    if find_spec("intel_extension_for_pytorch") is None:
        pytest.skip("intel_extension_for_pytorch is not installed; `make ipex` makes its environment")
    for group, page in ((1, 32), (4, 16), (7, 32)):
        p = problem([5, 97, 300], group=group, page=page, poison=False, layout="plain")
        p.plan(backend="ipex").run(p.q, p.out)
        assert np.abs(p.out - p.want()[0]).max() < 3e-2
    with pytest.raises(ValueError, match="backend 'ipex' cannot do window_left, sinks"):
        problem([5], layout="plain").plan(backend="ipex", window_left=3, sinks=np.zeros(4))
    with pytest.raises(ValueError, match="backend 'ipex' gives no lse"):
        problem([5], layout="plain").run(backend="ipex")


def test_ipex_reads_plain_pages_where_they_lie(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator is played by plain torch here: what is shown is what it is given. `make ipex` runs the real one."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if find_spec("intel_extension_for_pytorch") is not None:
        pytest.skip("the real one is installed here; the test above runs it")
    seen = []

    def operator(out, q, k, v, head_map, scale, table, lens, size, longest, *rest):  # type: ignore[no-untyped-def]
        seen.append((k.data_ptr(), v.data_ptr()))
        assert longest == int(lens.max()) and k.shape[2] == size and rest == (None, -1, 1.0, 1.0, -1.0)
        for i, n in enumerate(lens.tolist()):
            if n:
                rows = [x[table[i, : -(-n // size)].long()].float().transpose(1, 2).flatten(0, 1)[:n] for x in (k, v)]
                keys, values = (x[:, head_map.long()] for x in rows)
                weights = torch.einsum("hd,nhd->hn", q[i].float(), keys).mul(scale).softmax(-1)
                out[i] = torch.einsum("hn,nhd->hd", weights, values).to(out.dtype)

    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", types.ModuleType("intel_extension_for_pytorch"))
    monkeypatch.setattr(backends, "find_spec", lambda name: True)
    monkeypatch.setattr(torch, "ops", types.SimpleNamespace(
        torch_ipex=types.SimpleNamespace(single_query_cached_kv_attention=operator)
    ))  # fmt: skip
    p = problem([5, 0, 97], poison=False, layout="plain")
    new = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    p.plan(backend="ipex").run(p.q, p.out, k_new=new, v_new=new)
    k, v = ck.unpack(p.pages, 0, np.arange(p.pages.num_pages))
    assert np.abs(p.out - ck.reference.decode_reference(p.q, k, v, p.table, p.lens)[0]).max() < 3e-2
    assert seen == [tuple(x.ctypes.data for x in p.pages.plain(0))]  # the pages themselves, nothing unpacked
    with pytest.raises(ValueError, match="backend 'ipex' cannot do pages of layout 'tiles'"):
        problem([5]).plan(backend="ipex")


@pytest.mark.parametrize("name", [0, None, ["native"], "fast"])
def test_a_back_end_of_another_name_or_kind_is_refused(name: Any) -> None:
    pages = ck.KVPages(num_pages=1, num_kv_heads=1, head_dim=64, page_size=16)
    with pytest.raises(ValueError, match="backend .* is unknown; known: native"):
        ck.plan_decode(pages, [[0]], [1], 1, backend=name)
