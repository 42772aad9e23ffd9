"""The bench: real stages on the `host` device, with chosen numbers of rows and keys.

A real model runs real steps: no prompts are read, the pages hold zeros, which take as long to attend to as anything
else. Every op says what work it was (the same works that the simulator prices), so each becomes a sample of the
profile's tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from hybridattn.calibration.samples import Timed
from hybridattn.core.config import EngineConfig
from hybridattn.core.op import CPU, H2D, Op
from hybridattn.core.params import SamplingParams
from hybridattn.core.request import Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch, CpuRow, Segment
from hybridattn.executor.executor import Executor
from hybridattn.kv.storage import best_page_size
from hybridattn.policies.base import Policy
from hybridattn.policies.fixed import SyncOffload

ROWS, CONTEXTS, CHUNKS = (1, 2, 4, 8, 16), (64, 256, 512), (32, 128, 256)
WARM = 1
MODEL, DTYPE = "smollm2-135m", "fp32"
TIMEOUT_NS = 60_000_000_000
Seen = tuple[Op, Any, tuple[Any, ...], int]  # op, its future, what it came after, when it was submitted


class Bench:
    """Real stages on the host device, driven by the executor with rows of a stated number of keys."""

    def __init__(self, model: str = MODEL, dtype: str = DTYPE, most_rows: int = 2 * max(ROWS)) -> None:
        self.device = importlib.import_module("hybridattn.devices.host").HostDevice(record=False)
        loaded = importlib.import_module("hybridattn.models.load").load(model, dtype=dtype)
        page = best_page_size()
        blocks = most_rows * (max(CONTEXTS) // page + 1)
        self.config = EngineConfig(
            blocks, blocks, page, max_model_len=1024, max_num_seqs=2 * most_rows, max_num_batched_tokens=1024
        )
        stages = importlib.import_module("hybridattn.models.torch_stages").TorchStages
        self.stages = stages(loaded, self.device, self.config, dtype, "native")
        self.shape, self.dtype = loaded.config.shape, dtype
        self._submit = self.device.submit
        self._seen: list[Seen] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *args: object) -> None:
        self.device.close()

    def executor(self, policy: Policy) -> Executor:
        return Executor(
            self.stages, self.device, policy, max_rows=self.config.max_num_seqs, run_ahead=1, op_timeout_ns=TIMEOUT_NS,
            on_release=lambda request: None, any_leaving=lambda: False,
        )  # fmt: skip

    def rows(self, tier: str, count: int, context: int) -> list[Request]:
        """Requests that attend to ``context`` keys each, with pages of their own."""
        pages = -(-context // self.config.page_size)
        made = []
        for i in range(count):
            request = Request(f"{tier}{i}", i, [1] * context, 1 << 20, SamplingParams(max_tokens=1 << 20), 0)
            request.tier, request.state = tier, State.DECODE
            request.pages.append(tier, list(range(i * pages, (i + 1) * pages)))
            made.append(request)
        return made

    def batch(self, count: int, context: int) -> Batch | None:
        rows = self.rows(GPU_TIER, count, context)
        segments = tuple(Segment(r, GPU_TIER, context - 1, 1, samples=True, prefill=False) for r in rows)
        return Batch(segments) if segments else None

    def steps(
        self, gpu_rows: int, cpu_rows: int, context: int, count: int, policy: Policy | None = None
    ) -> list[Timed]:
        """The ops of ``count`` steps of blocking offload or of another policy, after a warm-up; of GPU rows alone with
        no CPU rows."""
        batch = self.batch(gpu_rows, context)
        rows = self.rows(CPU_TIER, cpu_rows, context)

        def run(executor: Executor) -> None:
            executor.run(batch, tuple([CpuRow(r, context - 1) for r in rows if not r.in_flight]))

        return self._timed(run, count, policy)

    def prompts(self, chunk: int, count: int) -> list[Timed]:
        """The ops of ``count`` steps that prefill a chunk of a prompt."""
        (request,) = self.rows(GPU_TIER, 1, chunk)
        batch = Batch((Segment(request, GPU_TIER, 0, chunk, samples=True, prefill=True),))
        return self._timed(lambda executor: executor.run(batch, ()), count)

    def _timed(self, run: Callable[[Executor], Any], count: int, policy: Policy | None = None) -> list[Timed]:
        executor = self.executor(policy or SyncOffload())
        for _ in range(WARM):
            run(executor)
        self._seen = []
        self.device.submit = self._spy
        try:
            for _ in range(count):
                run(executor)
            self.device.drain(TIMEOUT_NS)
        finally:
            self.device.submit = self._submit
        return timed_of(self._seen)

    def _spy(self, op: Op, after: tuple[Any, ...] = ()) -> Any:
        submitted_ns = self.device.now_ns()
        future = self._submit(op, after)
        self._seen.append((op, future, after, submitted_ns))
        return future


def timed_of(seen: Sequence[Seen]) -> list[Timed]:
    """What ran, in order of submission, with how late each op began after it could have."""
    lane_free: dict[str, int] = {}
    woke: dict[int, int] = {}
    for op, _, after, submitted_ns in seen:
        if op.lane == H2D and len(after) == 1 and after[0].op.lane == CPU:  # the driver waited for this attention
            woke[id(after[0])] = submitted_ns - after[0].end_ns
    timed = []
    for op, future, after, submitted_ns in seen:
        ready_ns = max([submitted_ns, lane_free.get(op.lane, 0), *(t.end_ns for t in after)])
        took_ns = max(1, future.end_ns - future.start_ns)
        timed.append(Timed(op.lane, op.layer, op.work, took_ns, future.start_ns - ready_ns, woke.get(id(future))))
        lane_free[op.lane] = future.end_ns
    return timed
