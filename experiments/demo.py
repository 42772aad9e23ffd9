"""The demo: real text under three policies, compared with the reference, with a table and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.build import ROOT
from experiments.ended import say
from experiments.settings import experiment
from hybridattn import LLM, Output, SamplingParams
from hybridattn.analysis.results import ResultFolder
from hybridattn.analysis.timeline import busiest_window, draw_timeline
from hybridattn.core.chrome import write_chrome
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.machine_load import OthersLoad, others_now, said
from hybridattn.core.trace import Trace, violations
from hybridattn.metrics.report import RunMetrics, run_metrics
from hybridattn.policies.registry import POLICIES

SHOWN = "async_overlap"  # whose timeline and trace are kept
WINDOW_NS = 60_000_000
PAGE = 32  # tokens


@dataclass
class DemoSettings:
    """``settings`` of ``configs/experiment/demo.yaml``.

    page : a text file that every prompt begins with, from here or from the project's root; empty: none
    """

    prompts: list[str] = field(default_factory=list)
    page: str = ""
    policies: list[str] = field(default_factory=lambda: ["gpu_only", "sync_offload", "async_overlap"])
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the policies that have some
    model: str = "smollm2-135m"
    device: str = "host"
    dtype: str = "fp32"
    max_tokens: int = 24
    gpu_kv_blocks: int = 14
    cpu_kv_blocks: int = 40
    page_size: int = 32
    max_num_batched_tokens: int = 256

    def __post_init__(self) -> None:
        if not self.prompts:
            raise InputError("settings.prompts holds no prompt")
        for name in self.options:
            if name not in (*self.policies, *POLICIES):
                raise InputError(
                    f"settings.options are those of the policy '{name}', which is unknown: policies are "
                    f"{', '.join(POLICIES)}"
                )
        if self.page:
            path = next((p for p in (Path(self.page), ROOT / self.page) if p.is_file()), None)
            if path is None:
                raise InputError(f"settings.page '{self.page}' is no file")
            self.prompts = [f"{path.read_text(encoding='utf-8')}\n\n{prompt}" for prompt in self.prompts]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What one policy did."""

    policy: str
    outputs: list[Output]
    trace: Trace
    metrics: RunMetrics


@experiment(DemoSettings)
def run(settings: DemoSettings, folder: ResultFolder) -> None:
    from experiments.reference import greedy_reference  # brings transformers: wrong settings are refused without it

    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    runs: list[PolicyRun] = []
    say(f"before it, {others_now()}")
    load = OthersLoad()
    with Progress(*columns, console=console) as progress:
        total = len(settings.prompts) * settings.max_tokens
        for policy in settings.policies:
            task = progress.add_task(f"{policy:<14}", total=total)
            runs.append(_run_policy(settings, policy, lambda task=task: progress.advance(task)))
            progress.update(task, completed=total)  # a request may end before max_tokens
        task = progress.add_task("reference     ", total=total)
        reference = greedy_reference(
            settings.model, settings.prompts, settings.max_tokens, lambda n: progress.advance(task, n)
        )
        progress.update(task, completed=total)
    say(f"meanwhile, {said(load.share())}")
    equal = _compare(runs, reference, console)
    _print_table(runs, console)
    _write(folder, runs, reference, equal)
    console.print(f"results: {folder.path}")
    if not all(equal.values()):
        raise DeviceError("token ids differ: see the comparison above")


def _run_policy(settings: DemoSettings, policy: str, advance) -> PolicyRun:
    params = SamplingParams(max_tokens=settings.max_tokens)
    with LLM(
        model=settings.model,
        device=settings.device,
        policy=policy,
        policy_options=settings.options.get(policy),
        dtype=settings.dtype,
        gpu_kv_blocks=settings.gpu_kv_blocks,
        cpu_kv_blocks=settings.cpu_kv_blocks,
        page_size=settings.page_size,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        record=True,  # every span: the trace is kept whole
    ) as llm:
        llm.generate(settings.prompts[:1], SamplingParams(max_tokens=2))  # warm up: compiled kernels, caches
        llm.trace(), llm.take_records()
        call = llm.start(settings.prompts, params)
        for _ in call.pieces():
            advance()
        trace, records = llm.trace(), llm.take_records()
        found = violations(trace.spans)
        if found:
            raise DeviceError(f"the trace of {policy} breaks {len(found)} invariants, the first: {found[0]}")
        free = llm.free_blocks()
        if free != {"gpu": settings.gpu_kv_blocks, "cpu": settings.cpu_kv_blocks}:
            raise DeviceError(f"blocks are missing after {policy}: free are {free}")
    return PolicyRun(policy, call.outputs(), trace, run_metrics(records, trace))


def _compare(runs: Sequence[PolicyRun], reference: Sequence[Sequence[int]], console: Console) -> dict[str, bool]:
    """Print, per policy, how many token ids equal the reference's; True where all do."""
    equal = {}
    for r in runs:
        same = sum(list(o.token_ids) == list(ids) for o, ids in zip(r.outputs, reference, strict=True))
        tokens = sum(len(o.token_ids) for o in r.outputs)
        tiers = [o.tier for o in r.outputs]
        equal[r.policy] = same == len(reference)
        verdict = "equal to" if equal[r.policy] else "DIFFERENT from"
        console.print(
            f"{r.policy:<14} {same} of {len(reference)} answers ({tokens} token ids) {verdict} transformers' greedy\n"
            f"{'':<14} decode; {tiers.count('gpu')} requests on the GPU tier, {tiers.count('cpu')} on the CPU tier",
            highlight=False,
        )
    for i, output in enumerate(runs[-1].outputs):
        start = (output.prompt or "")[-36:].replace("\n", " ")
        console.print(f"  {i} [dim]...{start}[/dim]{output.text!r}", markup=True, highlight=False)
    return equal


ROWS = (  # title, name in the metrics, divided by, format
    ("throughput, output tokens/s", "output_tokens_per_s", 1.0, "{:.1f}"),
    ("TTFT, mean, ms", "ttft_mean_ns", 1e6, "{:.0f}"),
    ("TPOT, mean, ms", "tpot_mean_ns", 1e6, "{:.1f}"),
    ("CPU attention that is hidden", "overlap_fraction", 0.01, "{:.0f} %"),
    ("GPU lane idle (bubbles)", "gpu_bubble_fraction", 0.01, "{:.0f} %"),
    ("polls made", "polls_made", 1, "{:.0f}"),
    ("polls hit", "polls_hit", 1, "{:.0f}"),
    ("polls missed", "polls_missed", 1, "{:.0f}"),
    ("layers a micro-batch advances per step", "layers_per_iteration", 1, "{:.2f}"),
    ("CPU share of busy time, decode", "decode_cpu_share_busy_time_fraction", 0.01, "{:.1f} %"),
    ("CPU share of busy time, prompts too", "cpu_share_busy_time_fraction", 0.01, "{:.1f} %"),
    ("CPU share of work (bytes)", "cpu_share_work_fraction", 0.01, "{:.1f} %"),
)


def _print_table(runs: Sequence[PolicyRun], console: Console) -> None:
    trace = runs[0].trace
    table = Table(title=f"{trace.kind} on {trace.device}, profile {trace.profile}, commit {trace.commit}")
    table.add_column("")
    for r in runs:
        table.add_column(r.policy, justify="right")
    for title, name, unit, text in ROWS:
        values = [r.metrics[name] for r in runs]
        table.add_row(title, *("-" if v is None else text.format(v / unit) for v in values))
    console.print(table)
    console.print("[dim]formulas: docs/metrics.md[/dim]")


def _write(
    folder: ResultFolder, runs: Sequence[PolicyRun], reference: Sequence[Sequence[int]], equal: dict[str, bool]
) -> None:
    for r in runs:
        folder.add_row(
            {"experiment": "demo", "policy": r.policy, "equal_to_reference": equal[r.policy], **r.metrics.as_row()}
        )
    shown = next((r for r in runs if r.policy == SHOWN), runs[-1])
    folder.write_json(
        "summary.json",
        {
            "experiment": "demo",
            "source": shown.trace.kind,
            "device": shown.trace.device,
            "profile": shown.trace.profile,
            "commit": shown.trace.commit,
            "prompts": len(reference),
            "equal_to_reference": equal,
            "output_tokens_per_s": {r.policy: r.metrics["output_tokens_per_s"] for r in runs},
            "timeline_of": shown.policy,
        },
    )
    write_chrome(shown.trace, folder.path / "trace.json")
    window = busiest_window(shown.trace, WINDOW_NS)
    draw_timeline(
        shown.trace, folder.path / "timeline.png", window, f"{shown.policy}: {WINDOW_NS // 10**6} ms of the demo"
    )
