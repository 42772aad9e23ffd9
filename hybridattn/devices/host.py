"""The host device: this machine's CPU plays both roles, with real math.

    core 0   driver thread: decides, submits, polls
             gpu.compute, gpu.d2h, gpu.h2d: one worker thread each (torch, one thread)
    core 1.. cpu.attention: the native pool, fed through a ring, polled by number

The GPU tier is host memory capped to a configured budget. A Python thread hop costs about 20 us, so what is measured
here should be made of ops well above that.
"""

from __future__ import annotations

import os
import time

import psutil
import torch

from cpu_kernels import WorkerPool
from hybridattn.core.device import Future, Span, check_after
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op
from hybridattn.devices.cores import CorePlan, plan_cores
from hybridattn.devices.cpu_lane import CpuLane
from hybridattn.devices.fingerprint import fingerprint
from hybridattn.devices.lane import HostFuture, LaneWorker
from hybridattn.devices.live import LiveDevice
from hybridattn.devices.torch_threads import torch_threads


class HostDevice(LiveDevice):
    """Lanes on this machine. While it is open, torch computes with the GPU lane's number of threads in this process.

    Parameters
    ----------
    gpu_memory_bytes : int, optional
        Budget of the GPU tier. Default: half of the memory that is free now.
    cores : CorePlan, optional
        Which cpus the GPU lane and the pool use; default :func:`hybridattn.devices.cores.plan_cores`.
    spin_us : int
        How long pool workers spin before they sleep.
    record : bool or int
        Keep spans for ``drain``: all, none, or about so many of the latest.
    """

    name = "host"
    kind = "measured"

    def __init__(
        self,
        *,
        gpu_memory_bytes: int | None = None,
        cores: CorePlan | None = None,
        spin_us: int = 50,
        record: bool | int = True,
        close_timeout_s: float = 5.0,
    ) -> None:
        self.profile = fingerprint()
        self.cores = cores or plan_cores()
        free = psutil.virtual_memory().available
        total = {"gpu": free // 2 if gpu_memory_bytes is None else gpu_memory_bytes, "cpu": free}
        if total["gpu"] > free:
            raise InputError(f"gpu_memory_bytes {total['gpu']} exceeds the {free} bytes that are free on this machine")
        torch_threads.hold(self.cores.gpu_threads)
        try:
            self.pool = WorkerPool(num_workers=len(self.cores.pool), cpus=list(self.cores.pool), spin_us=spin_us)
            self._cpu = CpuLane(self.pool, self.cores.pool)
            self._workers = {lane: self._worker(lane) for lane in (GPU, D2H, H2D)}
        except BaseException:
            torch_threads.release()
            raise
        self._holds_threads = True
        super().__init__(total, record, close_timeout_s)

    def _worker(self, lane: str) -> LaneWorker:
        cpu_lane = self._cpu
        threads = self.cores.gpu_threads  # on all lanes: some of torch's libraries have one count for the whole process
        return LaneWorker(
            f"hybridattn {lane}",
            self.cores.gpu,
            lambda: torch.set_num_threads(threads),
            lambda future: cpu_lane.pump(),
        )

    # -- the contract ------------------------------------------------------------------------------------------------

    def submit(self, op: Op, after: tuple[Future, ...] = ()) -> HostFuture:
        self._refuse_if_closed(op)
        if os.getpid() != self._process:  # its threads did not come along
            raise DeviceError(f"{op.describe()} was submitted after a fork: open a device in the new process")
        check_after(op, after)
        future = HostFuture(op, after)
        self._keep(future)
        if op.lane == CPU:
            self._cpu.push(future)
        else:
            self._workers[op.lane].push(future)
        return future

    def sleep_until_ns(self, when_ns: int) -> None:
        time.sleep(max(0, when_ns - time.perf_counter_ns()) / 1e9)

    def _spans(self, futures: list[HostFuture]) -> list[Span]:
        """Spans by start. Workers go on to the next job while the last chunks of the one before are still running, so a
        cpu.attention span begins where the one before ended: its time is what the lane gave to it alone."""
        spans = []
        cpu_free = 0
        for t in sorted(futures, key=lambda t: t.end_ns):
            start, end = t.start_ns, t.end_ns
            if t.op.lane == CPU:
                start = min(max(start, cpu_free), end)
                cpu_free = end
            work = t.op.work
            spans.append(Span(t.op.lane, t.op.name, start, end, t.op.layer, work.rows, work.num_bytes, t.ready_ns))
        return sorted(spans, key=lambda s: s.start_ns)

    def _stop(self) -> None:
        deadline = time.perf_counter() + self._close_timeout_s
        if self._holds_threads:
            self._holds_threads = False
            torch_threads.release()
        for worker in self._workers.values():
            worker.stop()
        self._cpu.stop()
        try:
            self.pool.close(timeout_s=self._close_timeout_s)
        finally:
            for worker in self._workers.values():
                worker.join(max(0.0, deadline - time.perf_counter()))
            self._cpu.join(max(0.0, deadline - time.perf_counter()))
