"""The IPEX back end: the paged decode kernel of intel-extension-for-pytorch, on plain pages where they lie.

Its kernel reads bf16 pages ``[num_pages, kv_heads, page_size, head_dim]`` by their strides, which is what
``KVPages(layout="plain")`` holds. It has no LSE, no sinks and no soft cap; what it cannot do is refused when the plan
is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cpu_kernels import handed
from cpu_kernels.pages import append_kv
from cpu_kernels.plan import DecodeInputs
from cpu_kernels.torch_backend import as_torch

ORDER = "plain"  # layout of the pages that it reads


class IpexDecode:
    """Decode attention by ``torch.ops.torch_ipex.single_query_cached_kv_attention``."""

    def __init__(self, inputs: DecodeInputs) -> None:
        self.inputs = inputs
        heads = torch.arange(inputs.pages.num_kv_heads, dtype=torch.int32)
        self._head_map = heads.repeat_interleave(inputs.group)
        self._table = torch.from_numpy(np.where(inputs.block_table < 0, 0, inputs.block_table))
        self._lens = torch.from_numpy(inputs.seq_lens)

    def workspace(self) -> None:
        return None

    def run(self, q: Any, out: Any, lse: Any, layer: int, k_new: Any, v_new: Any, workspace: Any) -> None:
        if lse is not None:
            raise ValueError("backend 'ipex' gives no lse")
        handed.take(self.inputs, q, out, lse, k_new, v_new)
        inputs, pages = self.inputs, self.inputs.pages
        if k_new is not None:
            append_kv(pages, layer, k_new, v_new, inputs.slots)
        k, v = (as_torch(x) for x in pages.plain(layer))
        queries, results = as_torch(q).bfloat16(), torch.empty(as_torch(out).shape, dtype=torch.bfloat16)
        longest = int(inputs.seq_lens.max(initial=0))
        torch.ops.torch_ipex.single_query_cached_kv_attention(
            results, queries, k, v, self._head_map, inputs.sm_scale, self._table, self._lens, pages.page_size, longest,
            None, -1, 1.0, 1.0, -1.0,
        )  # fmt: skip
        results[self._lens == 0] = 0
        as_torch(out).copy_(results)


def make(inputs: DecodeInputs, isa: str | None) -> IpexDecode:
    """Build the IPEX back end.

    Raises
    ------
    ValueError
        For what its kernel has not: other dtypes than bf16, pages that are not plain, keys that are left out (windows,
        positions), caps, ALiBi, sinks, a chosen ISA level.
    """
    import intel_extension_for_pytorch  # noqa: F401  registers the operator; loading it elsewhere would fail

    asked = {
        "isa": isa is not None,
        "window_left": inputs.windowed,
        "logits_soft_cap": inputs.logits_soft_cap > 0,
        "alibi_slopes": inputs.alibi_slopes is not None,
        "sinks": inputs.sinks is not None,
        f"pages of {inputs.pages.dtype}": inputs.pages.dtype != "bf16",
        f"pages of layout {inputs.pages.layout.order!r}": inputs.pages.layout.order == "tiles",
    }
    refused = [name for name, used in asked.items() if used]
    if refused:
        raise ValueError(f"backend 'ipex' cannot do {', '.join(refused)}")
    return IpexDecode(inputs)
