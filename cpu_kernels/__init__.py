"""CPU attention for LLM decode at the memory limit: paged KV, LSE, any group size, a pool that never blocks.

Needs NumPy and llvmlite; torch tensors are accepted, torch is not required. See ``cpu_kernels/README.md``.
"""

from cpu_kernels import isa, reference, topology
from cpu_kernels.arrays import from_bf16, to_bf16
from cpu_kernels.job import Job, JobCancelled, PoolClosed, WorkerError
from cpu_kernels.merge import merge_state, merge_states
from cpu_kernels.pages import KVPages, append_kv, copy_pages, gather_kv, pack, unpack
from cpu_kernels.plan import DecodePlan, paged_decode_attention, plan_decode
from cpu_kernels.pool import WorkerPool
from cpu_kernels.prefill import prefill_attention

__all__ = [
    "DecodePlan",
    "Job",
    "JobCancelled",
    "KVPages",
    "PoolClosed",
    "WorkerError",
    "WorkerPool",
    "append_kv",
    "copy_pages",
    "from_bf16",
    "gather_kv",
    "isa",
    "merge_state",
    "merge_states",
    "pack",
    "paged_decode_attention",
    "plan_decode",
    "prefill_attention",
    "reference",
    "to_bf16",
    "topology",
    "unpack",
]
