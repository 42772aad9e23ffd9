"""Agent sessions on this machine: real requests, real pauses, K,V really moved. The measured point of ``sessions``."""

from __future__ import annotations

from typing import Any

from experiments.build import workload_of
from experiments.points.measured import KEPT, checked_trace, made_up, open_llm, warm_up
from experiments.points.sessions import RESTS_ON, SessionSettings, turns
from experiments.schema import App
from hybridattn import SamplingParams
from hybridattn.core.op import D2H, H2D
from hybridattn.core.trace import Trace
from hybridattn.engine.replay import Replay
from hybridattn.metrics.report import run_metrics
from hybridattn.workload.item import WorkItem


def serve(app: App, s: SessionSettings) -> dict[str, Any]:
    """Serve the workload; the time counts from the first arrival, a warm-up call before it is left out."""
    workload = workload_of(app).scaled(s.time_scale)
    workload = workload.take(s.limit) if s.limit else workload
    with open_llm(
        app,
        gpu_tokens=s.gpu_tokens,
        cpu_tokens=s.cpu_tokens,
        max_model_len=s.max_model_len,
        max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=s.max_num_batched_tokens,
        pause_tier=RESTS_ON[s.context],
    ) as llm:
        vocabulary = llm.model.config.shape.vocab_size

        def tokens(index: int, item: WorkItem) -> list[int]:
            return made_up(app, index, item.prompt_tokens, vocabulary)

        def lengths(index: int, item: WorkItem) -> SamplingParams:
            return SamplingParams(max_tokens=item.output_tokens, ignore_eos=True)

        warm_up(llm, [[1, 2, 3]])
        keep = s.context != "recompute"
        steps: list[Any] = []
        served = Replay(
            llm.engine, workload, prompts=tokens, params=lengths, keep_contexts=keep, on_step=steps.append
        ).run()
        trace, records = checked_trace(llm), llm.take_records()
        told = turns(app, s, workload, served.requests, llm.engine.kv.contexts)
    records.requests.extend(served.requests)
    records.steps.extend(steps)
    found = run_metrics(records, trace)
    return {
        **found.as_row(KEPT),
        "requests": len(workload), "refused": served.refused, "num_layers": records.num_layers,
        "gpu_kv_tokens": s.gpu_tokens, "cpu_kv_tokens": s.cpu_tokens,
        **told, **moved(trace),
    }  # fmt: skip


def moved(trace: Trace) -> dict[str, Any]:
    """Whole contexts that crossed between the tiers: how many, their bytes, and the time on the lanes."""
    spans = [span for span in trace.spans if span.name == "move k,v"]
    return {
        "moves_down": sum(span.lane == D2H for span in spans), "moves_up": sum(span.lane == H2D for span in spans),
        "moved_bytes": sum(span.num_bytes for span in spans),
        "moving_ns": sum(span.end_ns - span.start_ns for span in spans),
    }  # fmt: skip
