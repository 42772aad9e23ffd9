"""A measured point: the same requests on a real device under a policy, with a GPU tier that holds so many of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cpu_kernels import backends
from experiments.build import import_path, policy_options
from experiments.schema import App
from hybridattn import LLM, SamplingParams
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.stages import CPU_TIER
from hybridattn.core.trace import Trace, violations
from hybridattn.metrics.report import run_metrics
from hybridattn.models.load import load
from hybridattn.policies.base import Policy

PAGE = 32
KEPT = (
    "output_tokens_per_s", "ttft_mean_ns", "ttft_p99_ns", "tpot_mean_ns", "tpot_gpu_tier_mean_ns",
    "tpot_cpu_tier_mean_ns", "e2el_mean_ns", "overlap_fraction", "gpu_bubble_fraction", "polls_made", "polls_hit",
    "polls_missed", "joins", "skips", "waits", "detours", "layers_per_step", "cpu_share_busy_time_fraction",
    "cpu_share_work_fraction", "completed", "failed", "duration_ns",
)  # fmt: skip


@lru_cache(maxsize=1)
def loaded(name: str, dtype: str, where: str = "cpu") -> Any:
    """Weights, shared by the points of a process: loading takes longer than a small point."""
    return load(name, dtype=dtype, device=where)


def shared_model(app: App) -> Any:
    """The model of ``model``, loaded once in a process."""
    if not app.model.load:
        raise InputError(
            f"model {app.model.label} is a shape for simulations: choose model=smollm2 on {app.device.name}"
        )
    return loaded(app.model.load, app.model.dtype)


def checked_trace(llm: LLM) -> Trace:
    """The trace since the last call; DeviceError when it breaks an invariant."""
    trace = llm.trace()
    broken = violations(trace.spans)
    if broken:
        raise DeviceError(f"the trace breaks {len(broken)} invariants, the first: {broken[0]}")
    return trace


def _backend(name: str) -> str:
    """A name of the registry; any other is a module of the user's own, which is added to it."""
    module = name.partition(":")[0]  # a kernel in numba may have a number behind it
    if module not in backends.REGISTRY:
        if importlib.util.find_spec(module) is None:
            raise InputError(f"device.backend '{name}' is neither a module nor one of {', '.join(backends.REGISTRY)}")
        backends.REGISTRY[module] = module
    return name


def open_llm(app: App, *, gpu_tokens: int, cpu_tokens: int, policy: str | Policy | None = None, **options: Any) -> LLM:
    """The model of ``app`` on its device, with tiers of so many tokens (whole pages), under the policy of ``app`` or
    another one; ``options`` are those of ``LLM``."""
    if policy is None:
        policy, options["policy_options"] = import_path(app.policy._target_), policy_options(app)
    return LLM(
        model=shared_model(app),
        device=app.device.name,
        policy=policy,
        dtype=app.model.dtype,
        gpu_kv_blocks=gpu_tokens // PAGE,
        cpu_kv_blocks=cpu_tokens // PAGE,
        page_size=PAGE,
        backend=_backend(app.device.backend),
        op_timeout_s=300.0,  # beside other work a layer may take long; what stalls still ends
        **options,
    )


def whole_pages(tokens: int) -> int:
    """``tokens``, up to the end of the last page."""
    return -(-tokens // PAGE) * PAGE


def warm_up(llm: LLM, prompts: Sequence[Any]) -> None:
    """Two tokens of each, so that kernels are compiled and caches filled; nothing of it is kept."""
    llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    llm.trace(), llm.take_records()


def made_up(app: App, index: int, count: int, vocabulary: int) -> list[int]:
    """``count`` token ids, others for each request and each repeat."""
    return [(7 + 31 * (app.seed + app.repeat) + 13 * index + 3 * j) % vocabulary for j in range(count)]


def measure(app: App, gpu_rows: int, total: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Serve ``total`` requests of equal lengths, all at once, where the GPU tier holds ``gpu_rows`` of them.

    Under a policy without the CPU tier the others wait in the queue. The time counts from the first arrival to the last
    token, prefill included; a warm-up call before it is left out.
    """
    each = whole_pages(prompt_tokens + output_tokens)
    with open_llm(app, gpu_tokens=gpu_rows * each, cpu_tokens=total * each, max_num_seqs=max(64, total)) as llm:
        vocabulary = llm.model.config.shape.vocab_size
        prompts = [made_up(app, i, prompt_tokens, vocabulary) for i in range(total)]
        warm_up(llm, prompts[:2])
        outputs = llm.generate(prompts, SamplingParams(max_tokens=output_tokens, ignore_eos=True))
        trace, records, layouts = checked_trace(llm), llm.take_records(), llm.policy.steps_by_layout
    found = run_metrics(records, trace)
    on_cpu = sum(o.tier == CPU_TIER for o in outputs)
    return {
        **found.as_row(KEPT),
        "gpu_rows": gpu_rows, "cpu_rows": on_cpu, "requests": total, "context": prompt_tokens + output_tokens,
        "num_layers": records.num_layers,
        "attention_backend": app.device.backend, "attention_approximate": backends.approximate(app.device.backend),
        "steps_by_layout": ", ".join(f"{layout}: {steps}" for layout, steps in layouts.items()),
        "tokens_per_s": found["output_tokens_per_s"],
    }  # fmt: skip
