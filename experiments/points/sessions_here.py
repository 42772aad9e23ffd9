"""Agent sessions on this machine: real requests, real pauses, K,V really moved. The measured point of ``sessions``."""

from __future__ import annotations

from typing import Any

from experiments.build import policy_of, workload_of
from experiments.points.measured import KEPT, PAGE, checked_trace, shared_model
from experiments.points.sessions import RESTS_ON, SessionSettings, turns
from experiments.schema import App
from hybridattn import LLM, SamplingParams
from hybridattn.core.op import D2H, H2D
from hybridattn.core.trace import Trace
from hybridattn.engine.replay import Replay
from hybridattn.metrics.report import run_metrics
from hybridattn.workload.item import WorkItem


def serve(app: App, s: SessionSettings) -> dict[str, Any]:
    """Serve the workload; the time counts from the first arrival, a warm-up call before it is left out."""
    workload = workload_of(app).scaled(s.time_scale)
    workload = workload.take(s.limit) if s.limit else workload
    with LLM(
        model=shared_model(app),
        device=app.device.name,
        policy=policy_of(app),
        dtype=app.model.dtype,
        gpu_kv_blocks=s.gpu_tokens // PAGE,
        cpu_kv_blocks=s.cpu_tokens // PAGE,
        page_size=PAGE,
        max_model_len=s.max_model_len,
        max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=s.max_num_batched_tokens,
        op_timeout_s=300.0,  # beside other work a layer may take long; what stalls still ends
        pause_tier=RESTS_ON[s.context],
    ) as llm:
        vocabulary = llm.model.config.shape.vocab_size

        def tokens(index: int, item: WorkItem) -> list[int]:
            return [
                (7 + 31 * (app.seed + app.repeat) + 13 * index + 3 * j) % vocabulary for j in range(item.prompt_tokens)
            ]

        def lengths(index: int, item: WorkItem) -> SamplingParams:
            return SamplingParams(max_tokens=item.output_tokens, ignore_eos=True)

        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        llm.trace(), llm.take_records()
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
        "kind": found.kind, "device": found.device, "profile": found.profile,
        "requests": len(workload), "refused": served.refused, "num_layers": records.num_layers,
        "gpu_kv_tokens": s.gpu_tokens, "cpu_kv_tokens": s.cpu_tokens,
        **{name: found[name] for name in KEPT}, **told, **moved(trace),
    }  # fmt: skip


def moved(trace: Trace) -> dict[str, Any]:
    """Whole contexts that crossed between the tiers: how many, their bytes, and the time on the lanes."""
    spans = [span for span in trace.spans if span.name == "move k,v"]
    return {
        "moves_down": sum(span.lane == D2H for span in spans), "moves_up": sum(span.lane == H2D for span in spans),
        "moved_bytes": sum(span.num_bytes for span in spans),
        "moving_ns": sum(span.end_ns - span.start_ns for span in spans),
    }  # fmt: skip
