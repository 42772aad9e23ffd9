"""Real text under a policy, held against transformers' own, with a trace and a picture of the lanes: the point of
``demo``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.build import ROOT
from experiments.ended import say
from experiments.point import folder_here
from experiments.points.measured import PAGE, checked_trace, open_llm, warm_up
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown
from hybridattn import SamplingParams
from hybridattn.analysis.timeline import busiest_window, draw_timeline
from hybridattn.core.chrome import write_chrome
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.metrics.report import run_metrics

WINDOW_NS = 60_000_000


@dataclass
class DemoSettings:
    """``settings`` of ``configs/experiment/demo.yaml``.

    page : a text file that every prompt begins with, from here or from the project's root; empty: none
    shown : the policy whose answers are printed and whose lanes are kept
    """

    prompts: list[str] = field(default_factory=list)
    page: str = ""
    shown: str = "async_overlap"
    max_tokens: int = 24
    gpu_kv_blocks: int = 14
    cpu_kv_blocks: int = 40
    max_num_batched_tokens: int = 256

    def __post_init__(self) -> None:
        if not self.prompts:
            raise InputError("settings.prompts holds no prompt")
        if self.page:
            path = next((p for p in (Path(self.page), ROOT / self.page) if p.is_file()), None)
            if path is None:
                raise InputError(f"settings.page '{self.page}' is no file")
            self.prompts = [f"{path.read_text(encoding='utf-8')}\n\n{prompt}" for prompt in self.prompts]


@experiment(DemoSettings)
def point(app: App, settings: DemoSettings) -> dict[str, Any]:
    """One row: every metric of the run, and whether all answers are those of the reference."""
    from experiments.reference import greedy_reference  # brings transformers: wrong settings are refused without it

    s = settings
    blocks = {"gpu": s.gpu_kv_blocks, "cpu": s.cpu_kv_blocks}
    room: dict[str, Any] = {f"{tier}_tokens": count * PAGE for tier, count in blocks.items()}
    with open_llm(app, **room, max_num_batched_tokens=s.max_num_batched_tokens, record=True) as llm:
        warm_up(llm, s.prompts[:1])
        outputs = llm.generate(s.prompts, SamplingParams(max_tokens=s.max_tokens))
        trace, records, free = checked_trace(llm), llm.take_records(), llm.free_blocks()
    if free != blocks:
        raise DeviceError(f"blocks are missing after {app.policy.label}: free are {free}")
    if app.policy.label == s.shown:
        for i, output in enumerate(outputs):
            say(f"  {i} ...{(output.prompt or '')[-36:]}{output.text!r}".replace("\n", " "))
        folder = folder_here()
        write_chrome(trace, folder.path / "trace.json")
        title = f"{s.shown}: {WINDOW_NS // 10**6} ms of the demo"
        draw_timeline(trace, folder.path / "timeline.png", busiest_window(trace, WINDOW_NS), title)
    reference = greedy_reference(app.model.load, tuple(s.prompts), s.max_tokens)
    same = [list(o.token_ids) == ids for o, ids in zip(outputs, reference, strict=True)]
    if not all(same):
        raise DeviceError(f"answers {[i for i, equal in enumerate(same) if not equal]} differ from transformers' own")
    return {
        **run_metrics(records, trace).as_row(), "equal_to_reference": True, "answers": len(outputs),
        "token_ids": sum(len(o.token_ids) for o in outputs), "on_cpu_tier": sum(o.tier == "cpu" for o in outputs),
    }  # fmt: skip


ROWS = (  # title, name in the metrics, divided by, format
    ("throughput, output tokens/s", "output_tokens_per_s", 1.0, "{:.1f}"),
    ("TTFT, mean, ms", "ttft_mean_ns", 1e6, "{:.0f}"),
    ("TPOT, mean, ms", "tpot_mean_ns", 1e6, "{:.1f}"),
    ("CPU attention that is hidden", "overlap_fraction", 0.01, "{:.0f} %"),
    ("GPU lane idle (bubbles)", "gpu_bubble_fraction", 0.01, "{:.0f} %"),
    ("polls made", "polls_made", 1, "{:.0f}"),
    ("polls hit", "polls_hit", 1, "{:.0f}"),
    ("polls missed", "polls_missed", 1, "{:.0f}"),
    ("layers a micro-batch advances per step", "layers_per_step", 1, "{:.2f}"),
    ("CPU share of busy time, decode", "decode_cpu_share_busy_time_fraction", 0.01, "{:.1f} %"),
    ("CPU share of busy time, prompts too", "cpu_share_busy_time_fraction", 0.01, "{:.1f} %"),
    ("CPU share of work (bytes)", "cpu_share_work_fraction", 0.01, "{:.1f} %"),
)


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each policy answered, and its metrics beside those of the others."""
    lines = [
        f"{r['policy']}: {r['answers']} of {r['answers']} answers ({r['token_ids']} token ids) equal to transformers' "
        f"greedy decode; {r['on_cpu_tier']} requests on the CPU tier"
        for r in rows
    ]
    shown = [
        {"title": title, **{r["policy"]: "-" if r[name] is None else text.format(r[name] / unit) for r in rows}}
        for title, name, unit, text in ROWS
    ]
    return [*lines, *markdown(shown, {"": "{title}", **{r["policy"]: f"{{{r['policy']}}}" for r in rows}})]
