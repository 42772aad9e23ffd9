"""An engine under a fixed load: fill it with prompts, then measure a window of decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridattn.core.config import EngineConfig
from hybridattn.core.device import Span
from hybridattn.core.op import CPU
from hybridattn.core.params import SamplingParams
from hybridattn.core.records import StepRecord
from hybridattn.core.stages import CPU_TIER
from hybridattn.devices.registry import open_device
from hybridattn.engine.engine import Engine
from hybridattn.metrics.overlap import summarize_overlap
from hybridattn.models.load import load
from hybridattn.models.torch_stages import TorchStages
from hybridattn.policies.base import Policy
from scripts.gpucheck.settings import PolicyRun

SECOND = 1_000_000_000
MIN_STEPS = 12


@dataclass(frozen=True, slots=True)
class Window:
    """What happened while decoding was measured."""

    seconds: float
    gpu_tokens: int
    cpu_tokens: int
    steps: tuple[StepRecord, ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"a window of {self.seconds} s measures nothing")

    def row(self, alone_ns: int | None) -> dict[str, Any]:
        """Rates and overlap; ``alone_ns``: a step of the same GPU rows without micro-batches."""
        o = summarize_overlap(self.steps, self.spans, alone_ns)
        return {
            "tokens_per_s": (self.gpu_tokens + self.cpu_tokens) / self.seconds,
            "gpu_tokens_per_s": self.gpu_tokens / self.seconds,
            "cpu_tokens_per_s": self.cpu_tokens / self.seconds,
            "layers_per_iteration_a": o.layers_per_iteration,
            "stretch_d": o.stretch,
            "overlap_fraction": o.overlap_fraction,
            "gpu_bubble_fraction": o.gpu_bubble_fraction,
            "polls_made": o.polls_made,
            "polls_hit": o.polls_hit,
            "joins": o.joins,
            "skips": o.skips,
            "waits": o.waits,
            "detours": o.detours,
            "steps": o.steps,
            "cpu_start_after_copy_us": self.handover_us,
            "step_ms": self.step_ns / 1e6 if self.step_ns else None,
            "window_s": self.seconds,
        }

    @property
    def handover_us(self) -> float | None:
        """Lower quartile of the time from the end of a copy to the start of its CPU attention: mostly without queue."""
        gaps = sorted(s.start_ns - s.ready_ns for s in self.spans if s.lane == CPU and s.ready_ns)
        return gaps[len(gaps) // 4] / 1e3 if gaps else None

    @property
    def step_ns(self) -> int | None:
        """Median duration of steps that only decode."""
        durations = [p.end_ns - p.start_ns for p in self.steps if p.gpu_rows and not p.prefill_tokens]
        return round(statistics.median(durations)) if durations else None


class Bench:
    """One device and one model for all points; every point gets an engine of its own."""

    def __init__(self, run: PolicyRun, device: str) -> None:
        options = {"gpu_memory_bytes": run.gpu_memory_bytes} if run.gpu_memory_bytes else {}
        self.run = run
        self.device = open_device(device, **options)
        seqs = run.gpu_requests + run.most_cpu_requests
        per_request = -(-run.max_model_len // run.page_size)
        at_start = -(-(run.prompt_tokens + 128) // run.page_size)
        self.config = EngineConfig(
            gpu_kv_blocks=run.gpu_requests * per_request,
            cpu_kv_blocks=max(run.most_cpu_requests * at_start, 4 * per_request),
            page_size=run.page_size,
            max_model_len=run.max_model_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=max(run.max_num_batched_tokens, seqs),
            op_timeout_ns=20 * SECOND,
        )
        model = load(run.model, dtype=run.dtype, device=getattr(self.device, "torch_device", "cpu"))
        self.vocab = model.config.shape.vocab_size
        self.stages = TorchStages(model, self.device, self.config, run.dtype)

    def facts(self) -> dict[str, Any]:
        memory = self.device.memory("gpu")
        return {
            "model": self.run.model,
            "dtype": self.run.dtype,
            "device": self.device.name,
            "kind": self.device.kind,
            "profile": self.device.profile,
            "gpu_budget_bytes": memory.total,
            "gpu_booked_bytes": memory.total - memory.free,
            "gpu_kv_blocks": self.config.gpu_kv_blocks,
            "cpu_kv_blocks": self.config.cpu_kv_blocks,
            "page_size": self.config.page_size,
            "prompt_tokens": self.run.prompt_tokens,
            "handover": getattr(self.device, "handover", None),
            "eager_because": getattr(self.stages.tier, "why_eager", None),
            "clock_spread_ns": getattr(self.device, "clock_spread_ns", 0),
        }

    def engine(self, policy: Policy, count: int) -> Engine:
        """An engine with ``count`` requests of random prompts that end only at the length limit."""
        engine = Engine(self.stages, self.device, policy, self.config)
        params = SamplingParams(max_tokens=self.run.max_model_len, ignore_eos=True, seed=0)
        for i in range(count):
            prompt = [(7 * i + 13 * j) % self.vocab for j in range(self.run.prompt_tokens)]
            engine.add(prompt, None, params)
        return engine

    def window(self, policy: Policy, gpu_requests: int, cpu_requests: int, seconds: float) -> Window:
        """Fill, measure, abort. ``gpu_requests`` is what the GPU tier holds when all have their full length."""
        engine = self.engine(policy, gpu_requests + cpu_requests)
        try:
            self._fill(engine)
            engine.drain()
            engine.take_records()
            gpu, cpu, steps, started = 0, 0, 0, time.perf_counter()
            while (time.perf_counter() - started < seconds or steps < MIN_STEPS) and engine.unfinished:
                steps += 1
                for event in engine.step():
                    on_cpu = event.request.tier == CPU_TIER
                    cpu, gpu = cpu + on_cpu, gpu + (not on_cpu)
            took = time.perf_counter() - started
            return Window(took, gpu, cpu, tuple(engine.take_records().steps), tuple(engine.drain()))
        finally:
            self.empty(engine)

    @staticmethod
    def _fill(engine: Engine) -> None:
        """Step until everyone who is admitted has a token and the steps hold no prompt any more."""
        for _ in range(100_000):
            engine.step()
            running: Sequence[Any] = engine.scheduler.queues.running
            last = engine.executor.steps[-1] if engine.executor.steps else None
            if last is not None and not last.prefill_tokens and all(r.num_output for r in running):
                return

    @staticmethod
    def empty(engine: Engine) -> None:
        """Abort what is left and wait until nothing is in flight."""
        if engine.broken is not None:
            return
        for request in [*engine.scheduler.queues.running, *engine.scheduler.queues.waiting]:
            engine.abort(request.request_id)
        while engine.unfinished:
            engine.step()
        engine.drain()

    def close(self) -> None:
        self.device.close()
