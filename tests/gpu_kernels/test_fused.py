"""Row-wise kernels against plain float64 formulas."""

import pytest
import torch

from gpu_kernels import rms_norm, rope, silu_mul

TYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def close(got: torch.Tensor, truth: torch.Tensor) -> bool:
    """Within two roundings to the result's dtype."""
    eps = torch.finfo(got.dtype).eps
    return torch.allclose(got.double(), truth, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 16), (3, 576), (2, 4096)])
def test_rms_norm(device: torch.device, dtype: torch.dtype, rows: int, hidden: int) -> None:
    x = (torch.randn(rows, hidden, device=device) * 3).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    got = rms_norm(x, weight, 1e-5)
    wide = x.double()
    base = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert close(got, base * weight.double())
    assert close(rms_norm(x, weight, 1e-5, weight_offset=1.0), base * (1 + weight.double()))


@pytest.mark.parametrize("dtype", TYPES)
def test_rms_norm_adds_the_residual_first(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(3, 96, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(96, device=device).to(dtype)
    total = x + residual
    want = rms_norm(total, weight, 1e-6)
    got = rms_norm(x, weight, 1e-6, residual=residual, out=x)
    assert torch.equal(residual, total) and torch.equal(got, want) and got is x


def test_rms_norm_of_zeros_is_zero(device: torch.device) -> None:
    assert torch.all(rms_norm(torch.zeros(2, 32, device=device), torch.ones(32, device=device), 1e-6) == 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(5, 64, 64), (1, 80, 32), (3, 16, 16)])
def test_rope(device: torch.device, dtype: torch.dtype, interleaved: bool, heads: int, dim: int, rotary: int) -> None:
    x = torch.randn(4, heads + 1, dim, device=device).to(dtype)
    angles = torch.arange(50, device=device)[:, None] * 100.0 ** (-torch.arange(rotary // 2, device=device) / rotary)
    positions = torch.tensor([0, 49, 7, 7], device=device)
    cos, sin = angles.cos().float(), angles.sin().float()
    truth = x.double().clone()
    pairs = truth[:, :heads, :rotary]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    a, b = a.clone(), b.clone()
    c, s = (table.double()[positions][:, None] for table in (cos, sin))
    turned = (a * c - b * s, b * c + a * s)
    truth[:, :heads, :rotary] = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    got = rope(x[:, :heads], cos, sin, positions, interleaved=interleaved)
    assert close(x, truth) and got.data_ptr() == x.data_ptr()
    assert torch.equal(x[0, :, rotary:], x[0, :, rotary:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 1536])
def test_silu_mul(device: torch.device, dtype: torch.dtype, width: int) -> None:
    both = (torch.randn(3, 2 * width, device=device) * 4).to(dtype)
    both[0, :3] = torch.tensor([-60000.0, 60000.0, -90.0]).to(dtype)
    both[0, width : width + 3] = 0.5
    gate, up = both.double().chunk(2, -1)
    assert close(silu_mul(both), gate * torch.sigmoid(gate) * up)


def test_refuses(device: torch.device) -> None:
    x, weight = torch.zeros(2, 32, device=device), torch.ones(32, device=device)
    cos = torch.ones(8, 16, device=device)
    heads = torch.zeros(2, 3, 32, device=device)
    at = torch.tensor([0, 8], device=device)
    for message, call in (
        ("x: shape", lambda: rms_norm(x[:, :24].contiguous(), weight[:24], 1e-6)),
        ("weight: shape", lambda: rms_norm(x, weight[:16], 1e-6)),
        ("residual: dtype", lambda: rms_norm(x, weight, 1e-6, residual=x.half())),
        ("eps: -1", lambda: rms_norm(x, weight, -1)),
        ("positions: row 1 is at position 8, the table goes from 0 to 7", lambda: rope(heads, cos, cos, at)),
        ("cos: 16 columns rotate 32 of a head's 16", lambda: rope(heads[..., :16], cos, cos, at)),
        ("sin: shape", lambda: rope(heads, cos, cos[:4], at)),
        ("gate_up: shape", lambda: silu_mul(x[:, :24].contiguous())),
        ("out: shape", lambda: silu_mul(x, out=x)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
