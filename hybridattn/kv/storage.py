"""The pages of both tiers as the host device holds them: the CPU tier's memory, and memory that plays the GPU's."""

from __future__ import annotations

from cpu_kernels import KVPages, tuning
from cpu_kernels.layout import Layout
from hybridattn.core.device import Device
from hybridattn.core.shapes import ModelShape
from hybridattn.core.stages import CPU_TIER, TIERS


def best_page_size() -> int:
    """Tokens of a page that an engine has unless told otherwise: what suits this processor best, as far as is known."""
    return tuning.best_page_size()


def open_pages(
    device: Device, shape: ModelShape, dtype: str, page_size: int, num_blocks: dict[str, int], cpu_order: str = "tiles"
) -> dict[str, KVPages]:
    """Allocate the pages of each tier, booked on the device before a byte is touched.

    Parameters
    ----------
    dtype : str
        KV dtype: ``fp32``, ``bf16``, ``fp16``, ``int8`` or ``fp8``.
    num_blocks : dict
        Pages per tier. A tier with 0 pages gets one that is never used, so that kernels always have an address.
    cpu_order : str
        Layout of the CPU tier's pages: what its attention back end reads (`cpu_kernels.backends.layout_of`).

    Raises
    ------
    InputError
        A tier's memory is too small; the message holds both numbers.
    """
    pages = {}
    for tier in TIERS:
        count = max(1, num_blocks[tier])
        order = cpu_order if tier == CPU_TIER else "tiles"
        layout = Layout(dtype, shape.head_dim, page_size, order)  # int8 and fp8 pages hold their scales too
        need = layout.head_bytes * shape.num_kv_heads * shape.num_layers * count
        device.reserve(tier, need, f"a KV pool of {num_blocks[tier]} blocks of {page_size} tokens")
        pages[tier] = KVPages(
            count, shape.num_kv_heads, shape.head_dim, page_size, dtype, num_layers=shape.num_layers, layout=order
        )
    return pages
