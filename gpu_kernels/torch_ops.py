"""Calls of this package as torch operators, so that ``torch.compile`` passes over them; importing it registers them.

Each has the arguments of the function of its name. Integers of a batch are tensors here as everywhere; those of
`paged_decode_attention` and `prefill_attention` are best given on the host, since a plan is made at each call. A step
with many layers keeps its plan outside of compiled code.
"""

from collections.abc import Callable
from typing import Any

import torch

from gpu_kernels import decode, kv_cache, merge, prefill

CACHES = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table"
SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"
SCORES = (
    "float? sm_scale=None, SymInt window_left=-1, float logits_soft_cap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None"
)
RESULTS = "(Tensor out, Tensor lse)"


def operator(
    function: Callable[..., Any], first: str, named: str, results: str = RESULTS, written: tuple[str, ...] = ()
) -> Any:
    """Register a function whose arguments `named` go by keyword, which those of an operator cannot."""
    count, names = len(first.split(", ")), [part.split("=")[0].split()[-1] for part in named.split(", ")]

    def call(*given: Any) -> Any:  # without what has its default
        return function(*given[:count], **dict(zip(names, given[count:], strict=False)))

    schema = f"({first}, {named}) -> {results}"
    return torch.library.custom_op(f"gpu_kernels::{function.__name__}", call, mutates_args=written, schema=schema)


paged_decode_attention = operator(decode.paged_decode_attention, f"{CACHES}, Tensor seq_lens", f"{SCALES}, {SCORES}")
prefill_attention = operator(
    prefill.prefill_attention,
    f"{CACHES}, Tensor query_start_loc, Tensor seq_lens",
    f"{SCALES}, bool causal=True, {SCORES}",
)
append_kv = operator(
    kv_cache.append_kv,
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping",
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, bool check_ids=True",
    "()",
    ("k_cache", "v_cache", "k_scale", "v_scale"),
)
merge_state = operator(
    merge.merge_state, "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b", "Tensor? mask=None, bool base2=False"
)


@paged_decode_attention.register_fake
@prefill_attention.register_fake
def _(q, *rest, **options):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@append_kv.register_fake
def _(*rest, **options):
    return None


@merge_state.register_fake
def _(out_a, lse_a, *rest, **options):
    return torch.empty_like(out_a), torch.empty_like(lse_a)
