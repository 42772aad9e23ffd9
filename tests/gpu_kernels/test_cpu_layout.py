"""Pages in the CPU's layout, byte for byte what the CPU package itself makes. Moves of bits, so bf16 works anywhere."""

import numpy as np
import pytest
import torch

import cpu_kernels
from cpu_kernels.layout import Layout, pack_k, pack_v
from gpu_kernels import append_kv, block_shape, cache_shape, copy_down, copy_up, pack_for_cpu, unpack_from_cpu

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
DTYPES["fp8"] = torch.float8_e4m3fn
BITS = {"fp32": torch.int32, "fp16": torch.int16, "bf16": torch.int16, "int8": torch.int8, "fp8": torch.uint8}


def pages(name: str, page: int, dim: int, device: torch.device) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(2)
    shape = (5, 3, page, dim)
    if name in ("int8", "fp8"):
        codes = [torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8) for _ in range(2)]
        caches = [x.view(DTYPES[name]).to(device) for x in codes]
        names = ("k_scale", "v_scale")
        return caches, {name: torch.randn(shape[:3], generator=draw).to(device) for name in names}
    return [torch.randn(shape, generator=draw).to(DTYPES[name]).to(device) for _ in range(2)], {}


@pytest.mark.parametrize(("page", "dim"), [(16, 80), (32, 64), (128, 16)])
@pytest.mark.parametrize("name", DTYPES)
def test_bytes_equal_the_cpu_packages_own(device: torch.device, name: str, page: int, dim: int) -> None:
    (k, v), scales = pages(name, page, dim, device)
    ids = torch.tensor([4, 0, 2], device=device)
    blocks = pack_for_cpu(k, v, ids, **scales)
    layout = Layout(name, dim, page)
    assert blocks.shape == (3, 3, layout.head_bytes)
    assert block_shape(cache_shape(k, v)).page_bytes == 3 * layout.head_bytes
    chosen = [x[ids].view(BITS[name]).cpu().numpy().view(layout.numpy_dtype) for x in (k, v)]
    want = [pack_k(chosen[0], layout), pack_v(chosen[1], layout)]
    want += [scales[key][ids].cpu().numpy() for key in scales]
    assert np.array_equal(np.concatenate([part.view(np.uint8) for part in want], -1), blocks.cpu().numpy())


@pytest.mark.parametrize("name", DTYPES)
def test_unpacking_gives_the_pages_back_and_touches_no_other(device: torch.device, name: str) -> None:
    (k, v), scales = pages(name, 32, 48, device)
    source = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    target = torch.tensor([1, 3, 0], dtype=torch.int32, device=device)
    blocks = pack_for_cpu(k, v, source, **scales)
    copies = [torch.zeros_like(x) for x in (k, v)]
    copied = {key: torch.zeros_like(x) for key, x in scales.items()}
    unpack_from_cpu(blocks, *copies, target, **copied)
    for got, want in (*zip(copies, (k, v), strict=True), *zip(copied.values(), scales.values(), strict=True)):
        raw = torch.int32 if got.dtype is torch.float32 else BITS[name]
        assert torch.equal(got[target.long()].view(raw), want[source.long()].view(raw))
        assert torch.all(got.view(raw)[[2, 4]] == 0)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "fp8"])
def test_pages_of_all_layers_go_down_and_up_in_one_launch(device: torch.device, name: str) -> None:
    """Scattered pages land in scattered blocks of a page-locked pool, with the bytes of `pack_for_cpu`; no other block
    and no other page is touched."""
    made = [pages(name, 32, 48, device) for _ in range(2)]  # two layers
    layers = [torch.stack([m[0][i] for m in made]) for i in range(2)]
    layers[0].view(BITS[name])[1] += 1  # unlike
    scales = {key: torch.stack([m[1][key] for m in made]) for key in made[0][1]}
    source, target = (torch.tensor(ids, device=device) for ids in ([4, 0, 2], [6, 1, 3]))
    shape = (2, 7, 3, block_shape(cache_shape(layers[0][0], layers[1][0])).head_bytes)
    pool = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copy_down(*layers, source, pool, target, **scales)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for layer in range(2):
        want = pack_for_cpu(layers[0][layer], layers[1][layer], source, **{k: s[layer] for k, s in scales.items()})
        assert torch.equal(pool[layer, [6, 1, 3]], want.cpu()) and not pool[layer, [0, 2, 4, 5]].any()
    copies, copied = [torch.zeros_like(x) for x in layers], {key: torch.zeros_like(x) for key, x in scales.items()}
    copy_up(*copies, source, pool, target, **copied)
    for got, want in (*zip(copies, layers, strict=True), *zip(copied.values(), scales.values(), strict=True)):
        raw = torch.int32 if got.dtype is torch.float32 else BITS[name]
        assert torch.equal(got[:, source].view(raw), want[:, source].view(raw))
        assert torch.all(got.view(raw)[:, [1, 3]] == 0)


def test_what_a_copy_of_all_layers_cannot_take_is_refused(device: torch.device) -> None:
    k = torch.zeros(2, 4, 2, 16, 32, device=device)
    pool, ids = (
        torch.zeros(2, 4, 2, 2 * 16 * 32 * 4, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    for arguments, words in (
        ((k[0], k[0], ids, pool, ids), "k_cache: shape"),
        ((k, k, ids, pool[:, :, :1].contiguous(), ids), "blocks: shape"),
        ((k, k, ids, pool.transpose(0, 1), ids), "blocks: strides"),
        ((k, k, ids, pool, ids.int()), "block_ids: dtype"),
        ((k.transpose(0, 1), k, ids, pool, ids), "k_cache: strides"),
    ):
        with pytest.raises(ValueError, match=words):
            copy_up(*arguments)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "fp8"])
def test_a_cpu_layer_takes_the_blocks_as_they_are(device: torch.device, name: str) -> None:
    """Tokens appended by the CPU package, and the same rows packed here, are the same bytes of its pages."""
    draw = torch.Generator().manual_seed(8)
    k, v = (torch.randn(48, 2, 32, generator=draw) for _ in range(2))
    own = cpu_kernels.KVPages(3, 2, 32, page_size=16, dtype=name, num_layers=2)
    cpu_kernels.append_kv(own, 1, k.numpy(), v.numpy(), np.arange(48))
    here = [torch.zeros(3, 2, 16, 32, dtype=DTYPES[name], device=device) for _ in range(2)]
    scales: dict[str, torch.Tensor] = {}
    if name in ("int8", "fp8"):
        scales = {key: torch.zeros(3, 2, 16, device=device) for key in ("k_scale", "v_scale")}
        append_kv(k.to(device), v.to(device), *here, torch.arange(48, device=device), **scales)
    else:
        for rows, cache in ((k, here[0]), (v, here[1])):
            cache.copy_(rows.view(3, 16, 2, 32).transpose(1, 2))
    blocks = pack_for_cpu(*here, torch.arange(3, device=device), **scales)
    layer = np.asarray(own.buffer).view(np.uint8).reshape(-1)[own.layer_bytes : 2 * own.layer_bytes]
    assert np.array_equal(blocks.cpu().numpy().reshape(-1), layer[: blocks.numel()])


def test_refuses(device: torch.device) -> None:
    (k, v), _ = pages("fp32", 16, 32, device)
    blocks = pack_for_cpu(k, v, torch.tensor([0, 1], device=device))
    pair = blocks.repeat(2, 1, 1)[::2]
    for message, call in (
        (
            "page_ids: row 1 names page 5, there are 5 pages",
            lambda: pack_for_cpu(k, v, torch.tensor([0, 5]).to(device)),
        ),
        ("page_ids: row 0 names page -1", lambda: pack_for_cpu(k, v, torch.tensor([-1]).to(device))),
        ("page_ids: dtype", lambda: pack_for_cpu(k, v, torch.tensor([0.0]).to(device))),
        ("page_ids: 2 ids name 1 pages", lambda: unpack_from_cpu(blocks, k, v, torch.tensor([3, 3]).to(device))),
        ("blocks: shape", lambda: unpack_from_cpu(blocks, k, v, torch.tensor([3]).to(device))),
        ("out: dtype", lambda: pack_for_cpu(k, v, torch.tensor([0, 1]).to(device), blocks.view(torch.int8))),
        ("blocks: strides", lambda: unpack_from_cpu(pair, k, v, torch.tensor([3, 2]).to(device))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
