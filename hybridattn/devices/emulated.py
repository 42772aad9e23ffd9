"""The emulated device: GPU and copy lanes take the time that a profile says and compute nothing; CPU attention is real.

    gpu.compute    |.... sleeps for the price ....|.... price ....|      a T4, an A10, an H200: whatever is priced
    cpu.attention       |#### this machine's kernels ####|               queries, keys and values are fixed noise

This is the CPU half of an experiment on a machine without the GPU: whether this CPU keeps up with that GPU. Output
lengths are declared and there is no text. Its rows are labelled emulated, so that they never pass for measured ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cpu_kernels import KVPages, append_kv, plan_decode
from hybridattn.core.config import EngineConfig
from hybridattn.core.device import Future
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, Op
from hybridattn.core.shapes import ModelShape
from hybridattn.core.stages import MicroBatch
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.pricing import Pricing
from hybridattn.devices.host import HostDevice
from hybridattn.devices.lane import HostFuture
from hybridattn.kv.tables import block_table, slots

_SPIN_NS = 150_000  # the last part of a wait is spun: a sleeping thread wakes up late by about 60 us
_FILL_TOKENS = 4096


class EmulatedDevice(HostDevice):
    """``HostDevice`` whose GPU and copy lanes are priced by ``pricing``; the other options are the host's."""

    name = "emulated"
    kind = "emulated"

    def __init__(self, pricing: Pricing, **options: Any) -> None:
        super().__init__(**options)
        self.pricing = pricing
        self.profile = f"{pricing.fingerprint} beside {self.profile}"

    def submit(self, op: Op, after: tuple[Future, ...] = ()) -> HostFuture:
        if op.lane == CPU:
            if op.native is None and op.run is None:
                raise InputError(f"{op.describe()} computes nothing: cpu.attention is real on the emulated device")
            return super().submit(op, after)
        lasting = Op(
            op.name, op.lane, op.work, _lasting(self.pricing.price_ns(op)), layer=op.layer, requests=op.requests
        )
        return super().submit(lasting, after)


class EmulatedStages(PricedStages):
    """Priced stages whose CPU attention runs the native kernels over pages of noise.

    All layers share the pages of one: a layer's keys and values of the requests in flight should exceed the last-level
    cache, as those of all layers would.

    Parameters
    ----------
    pages : int
        Of the CPU tier.
    """

    def __init__(self, shape: ModelShape, dtype: str, config: EngineConfig, kv_dtype: str = "", seed: int = 0) -> None:
        super().__init__(shape, dtype, kv_dtype)
        rng = np.random.default_rng(seed)
        self._heads, self._page = shape.num_q_heads, config.page_size
        count = max(1, config.cpu_kv_blocks)
        self._pages = KVPages(
            count, shape.num_kv_heads, shape.head_dim, config.page_size, kv_dtype or dtype, num_layers=1
        )
        noise = rng.standard_normal((2, _FILL_TOKENS, shape.num_kv_heads, shape.head_dim), dtype=np.float32)
        for first in range(0, count * config.page_size, _FILL_TOKENS):
            where = np.arange(first, min(first + _FILL_TOKENS, count * config.page_size), dtype=np.int64)
            append_kv(self._pages, 0, noise[0, : len(where)], noise[1, : len(where)], where)
        rows = config.max_num_seqs
        self._q = rng.standard_normal((rows, self._heads, shape.head_dim), dtype=np.float32)
        self._new = rng.standard_normal((2, rows, shape.num_kv_heads, shape.head_dim), dtype=np.float32)
        self._out = np.zeros((rows, self._heads, shape.head_dim), np.float32)
        self._decode: dict[int, Any] = {}

    def replan(self, micro_batch: MicroBatch) -> None:
        super().replan(micro_batch)
        alive = [i not in micro_batch.dead for i in range(len(micro_batch.rows))]
        pairs = list(zip(micro_batch.rows, alive, strict=True))
        self._decode[micro_batch.number] = plan_decode(
            self._pages,
            block_table([r.request.pages.cold if a else [] for r, a in pairs]),
            np.array([r.position + 1 if a else 0 for r, a in pairs], np.int32),
            self._heads,
            slot_mapping=np.array(
                [slots(r.request.pages.cold, r.position, 1, self._page)[0] if a else -1 for r, a in pairs], np.int64
            ),
        )

    def finish(self, micro_batch: MicroBatch) -> None:
        super().finish(micro_batch)
        del self._decode[micro_batch.number]

    def cpu_attention(self, micro_batch: MicroBatch, priority: int) -> Op:
        op = super().cpu_attention(micro_batch, priority)
        plan, where = (
            self._decode[micro_batch.number],
            slice(micro_batch.first_slot, micro_batch.first_slot + len(micro_batch.rows)),
        )
        new = {"layer": 0, "k_new": self._new[0, where], "v_new": self._new[1, where]}
        op.native = lambda pool: pool.submit(plan, self._q[where], self._out[where], priority=priority, **new)
        return op


def _lasting(took_ns: int) -> Callable[[], None]:
    """A closure that takes ``took_ns``."""

    def run() -> None:
        until = time.perf_counter_ns() + took_ns
        if took_ns > 2 * _SPIN_NS:
            time.sleep((took_ns - _SPIN_NS) / 1e9)
        while time.perf_counter_ns() < until:
            pass

    return run
