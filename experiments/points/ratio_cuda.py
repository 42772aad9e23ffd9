"""Decode on a card over the ratio of CPU-held to GPU-held requests: the point of ``ratio_cuda``.

    add the requests | steps until each has a token | window_s of decoding, which is what counts | abort the rest

Model, dtype and budget follow from the card where the settings leave them open. Beside every figure stands what it is
worth: who handed CPU attention over, what could not be page-locked, and how long the driver worked for each layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import gpu_kernels
from experiments.build import policy_of
from experiments.points.measured import checked_trace, loaded
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown
from hybridattn import LLM, SamplingParams
from hybridattn.core.device import Span
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU
from hybridattn.core.records import StepRecord
from hybridattn.core.stages import CPU_TIER
from hybridattn.cost.catalog import shape
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.cuda_presence import why_no_cuda
from hybridattn.metrics.overlap import summarize_overlap

SHAPES = ("llama3.1-8b", "llama3.2-3b", "smollm2-135m")  # the first that fits is taken
GIB = 1 << 30
MIN_STEPS = 12
MAX_FILLING_STEPS = 100_000
ROOM_AHEAD = 128  # output tokens that a request's pages of the CPU tier hold before others must give way


@dataclass
class CardSettings:
    """``settings`` of ``ratio_cuda``.

    gpu_requests : requests that the GPU tier holds at their full length
    ratio : CPU-held requests for each of them
    most_gb : budget of the GPU tier in 10^9 bytes, weights included, where the card has more (a small card is emulated)
    model : random weights of this shape; empty: the largest of ``SHAPES`` that fits
    dtype : empty: bf16, or fp16 on a card without it
    window_s : how long decoding is measured
    """

    gpu_requests: int = 8
    ratio: float = 1.0
    prompt_tokens: int = 512
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    page_size: int = 32
    most_gb: float = 24.0
    model: str = ""
    dtype: str = ""
    window_s: float = 2.0

    def __post_init__(self) -> None:
        if self.prompt_tokens >= self.max_model_len:
            raise InputError(
                f"settings.prompt_tokens {self.prompt_tokens} leaves no room in max_model_len {self.max_model_len}"
            )
        if self.gpu_requests < 1 or not self.ratio > 0 or not self.window_s > 0:
            raise InputError(
                f"settings: gpu_requests {self.gpu_requests}, ratio {self.ratio} and window_s {self.window_s} must be "
                "positive"
            )

    @property
    def pages(self) -> int:
        """Pages of one request at its full length."""
        return -(-self.max_model_len // self.page_size)

    @property
    def cpu_requests(self) -> int:
        return max(1, round(self.gpu_requests * self.ratio))


@dataclass(frozen=True, slots=True)
class Chosen:
    """What runs on a card: ``budget_bytes`` of the GPU tier (None: not limited), and a model that fits into it."""

    shape: str
    dtype: str
    budget_bytes: int | None


def chosen(free_bytes: int, bf16: bool, s: CardSettings) -> Chosen:
    """Settings for a card of which so much is free.

    Kept back are 1 GiB or 3 %, whichever is more (context, modules, work space of the libraries), and within the budget
    an eighth and 256 MiB beside weights and K,V, for activations and buffers.

    Raises
    ------
    InputError
        No shape fits, or not the one that the settings name.
    """
    budget = min(round(s.most_gb * 1e9), free_bytes - max(GIB, round(0.03 * free_bytes)))
    dtype = s.dtype or ("bf16" if bf16 else "fp16")
    for name in (s.model,) if s.model else SHAPES:
        cost = ModelCost(shape(name), dtype)
        kv_bytes = s.gpu_requests * s.max_model_len * cost.kv_token_layer_bytes * cost.shape.num_layers
        if cost.weight_bytes + kv_bytes + (GIB >> 2) <= budget * 7 // 8:
            return Chosen(name, dtype, budget)
    raise InputError(
        f"a budget of {budget} bytes holds no {s.model or SHAPES[-1]} in {dtype} with {s.gpu_requests} requests of "
        f"{s.max_model_len} tokens: set settings.gpu_requests, settings.max_model_len or settings.most_gb"
    )


def chosen_here(device: str, s: CardSettings) -> Chosen:
    """The same for the card of this machine; on ``host`` a tiny model, to try the way."""
    if device == "host":
        return Chosen(s.model or "tiny", s.dtype or "fp32", None)
    if device != "cuda":
        raise InputError(f"ratio_cuda measures on cuda (or, to try the way, on host), not on {device}")
    if (reason := why_no_cuda()) is not None:
        raise InputError(f"device 'cuda' cannot be used: {reason}")
    return chosen(*_card(), s)


@lru_cache(maxsize=1)
def _card() -> tuple[int, bool]:
    """Bytes free on the card and whether it has bf16; once in a process: afterwards the weights of the first point lie
    there."""
    return torch.cuda.mem_get_info()[0], gpu_kernels.capability_of(torch.device("cuda")).bf16


@lru_cache(maxsize=1)
def _kernels_ready(device: str, found: Chosen) -> set[str]:
    """Policies under which kernels were compiled and caches filled in this process."""
    return set()


_alone_ns: dict[tuple[str, Chosen], int] = {}  # the latest step of GPU rows alone in this process


@experiment(CardSettings)
def point(app: App, settings: CardSettings) -> dict[str, Any]:
    """One row: tokens per second of both tiers while decoding, overlap, and what the figures are worth."""
    s, name = settings, app.device.name
    found = chosen_here(name, s)
    cpu_requests = s.cpu_requests if CPU_TIER in policy_of(app).tiers else 0
    with _open(app, s, found, cpu_requests) as llm:
        ready = _kernels_ready(name, found)
        if app.policy.label not in ready:
            decode(llm, s, s.gpu_requests + cpu_requests, s.window_s / 4)
            ready.add(app.policy.label)
        window = decode(llm, s, s.gpu_requests + cpu_requests, s.window_s)
        layers = llm.stages.num_layers
        if not cpu_requests and window.step_ns is not None:
            _alone_ns[name, found] = window.step_ns
        return {
            "kind": llm.device.kind, "device": name, "profile": llm.device.profile,
            "model": found.shape, "dtype": found.dtype, "gpu_budget_bytes": found.budget_bytes,
            "gpu_requests": s.gpu_requests, "cpu_requests": cpu_requests, "num_layers": layers,
            **window.row(_alone_ns.get((name, found)), layers),
            "handover": getattr(llm.device, "handover", None),
            "why_handover": getattr(llm.device, "why_handover", None),
            "pageable": ", ".join(getattr(llm.device, "pageable", ())),
            "eager_because": getattr(llm.stages.gpu_tier, "why_eager", None),
            "clock_spread_ns": getattr(llm.device, "clock_spread_ns", 0),
        }  # fmt: skip


def _open(app: App, s: CardSettings, found: Chosen, cpu_requests: int) -> LLM:
    """An engine whose tiers hold the requests: those of the GPU at full length, the others for the window."""
    at_start = -(-(s.prompt_tokens + ROOM_AHEAD) // s.page_size)
    seqs = s.gpu_requests + cpu_requests
    share = {"cpu_fraction": cpu_requests / seqs} if cpu_requests else {}
    policy = policy_of(replace(app, policy=replace(app.policy, options={**app.policy.options, **share})))
    options = {"gpu_memory_bytes": found.budget_bytes} if found.budget_bytes is not None else {}
    return LLM(
        model=loaded(f"dummy:{found.shape}", found.dtype, "cpu" if app.device.name == "host" else "cuda:0"),
        device=app.device.name,
        policy=policy,
        dtype=found.dtype,
        gpu_kv_blocks=s.gpu_requests * s.pages,
        cpu_kv_blocks=max(cpu_requests * at_start, 2 * s.pages),
        page_size=s.page_size,
        max_model_len=s.max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(s.max_num_batched_tokens, seqs),
        op_timeout_s=60.0,
        device_options=options,
        backend=app.device.backend,
    )


@dataclass(frozen=True, slots=True)
class Window:
    """What happened while decoding was measured; ``driver_ns``: how long the driver did not wait (None: unknown)."""

    seconds: float
    gpu_tokens: int
    cpu_tokens: int
    steps: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    driver_ns: int | None

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.steps:
            raise InputError(f"a window of {self.seconds} s and {len(self.steps)} steps measures nothing")

    def row(self, alone_ns: int | None, num_layers: int) -> dict[str, Any]:
        """Rates and overlap; ``alone_ns``: a step of the same GPU rows without micro-batches."""
        o = summarize_overlap(self.steps, self.spans, alone_ns)
        per_layer = None if self.driver_ns is None else self.driver_ns / len(self.steps) / num_layers / 1e3
        return {
            "tokens_per_s": (self.gpu_tokens + self.cpu_tokens) / self.seconds,
            "gpu_tokens_per_s": self.gpu_tokens / self.seconds,
            "cpu_tokens_per_s": self.cpu_tokens / self.seconds,
            "driver_us_per_layer": per_layer,
            "layers_per_step": o.layers_per_step,
            "stretch": o.stretch,
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


def decode(llm: LLM, s: CardSettings, count: int, seconds: float) -> Window:
    """Fill with ``count`` requests that end only at the length limit, measure, abort.

    Raises
    ------
    DeviceError
        The trace breaks an invariant.
    """
    engine, vocab = llm.engine, llm.model.config.shape.vocab_size
    params = SamplingParams(max_tokens=s.max_model_len, ignore_eos=True, seed=0)
    for i in range(count):
        engine.add([(7 * i + 13 * j) % vocab for j in range(s.prompt_tokens)], None, params)
    _fill(llm)
    llm.trace(), llm.take_records()
    gpu, cpu, steps, waited = 0, 0, 0, getattr(llm.device, "waited_ns", None)
    began = time.perf_counter()
    while (time.perf_counter() - began < seconds or steps < MIN_STEPS) and engine.unfinished:
        steps += 1
        for event in engine.step():
            on_cpu = event.request.tier == CPU_TIER
            cpu, gpu = cpu + on_cpu, gpu + (not on_cpu)
    took = time.perf_counter() - began
    worked = None if waited is None else round(took * 1e9) - (llm.device.waited_ns - waited)
    trace, records = checked_trace(llm), llm.take_records()
    _empty(llm)
    return Window(took, gpu, cpu, tuple(records.steps), tuple(trace.spans), worked)


def _fill(llm: LLM) -> None:
    """Step until everyone who is admitted has a token and the steps hold no prompt any more."""
    engine = llm.engine
    for _ in range(MAX_FILLING_STEPS):
        engine.step()
        last = engine.executor.steps[-1] if engine.executor.steps else None
        running = engine.scheduler.queues.running
        if last is not None and not last.prefill_tokens and all(r.num_output for r in running):
            return


def _empty(llm: LLM) -> None:
    """Abort what is left and wait until nothing is in flight."""
    engine = llm.engine
    for request in [*engine.scheduler.queues.running, *engine.scheduler.queues.waiting]:
        engine.abort(request.request_id)
    while engine.unfinished:
        engine.step()
    llm.trace(), llm.take_records()


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Throughput over that of the same requests on the GPU alone, and what keeps the figures from being the card's."""
    alone = {r["ratio"]: r["tokens_per_s"] for r in rows if r["policy"] == "gpu_only"}
    shown = [{**r, "gain": r["tokens_per_s"] / alone[r["ratio"]]} for r in rows if r["ratio"] in alone]
    columns = {
        "policy": "{policy}",
        "CPU-held / GPU-held": "{ratio:g}",
        "tokens/s": "{tokens_per_s:.1f}",
        "over gpu_only": "{gain:.3f}",
        "driver [us/layer]": "{driver_us_per_layer}",
    }
    for row in shown:
        worked = row["driver_us_per_layer"]
        row["driver_us_per_layer"] = "-" if worked is None else f"{worked:.0f}"
    first = f"{rows[0]['model']}, {rows[0]['dtype']}, hand-over {rows[0]['handover']}"
    return [first, *markdown(shown, columns), *_doubts(rows)]


def _doubts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    if slow := sorted({r["pageable"] for r in rows if r["pageable"]}):
        found.append(f"not page-locked, so that copies block the driver: {'; '.join(slow)}; no measure of this card")
    if slower := sorted({f"by {r['handover']}: {r['why_handover']}" for r in rows if r["why_handover"]}):
        found.append(f"CPU attention was not handed over by a word in memory, but {'; '.join(slower)}")
    if eager := sorted({r["eager_because"] for r in rows if r["eager_because"]}):
        found.append(f"linear stages ran without CUDA graphs: {'; '.join(eager)}")
    return found
