"""Part f: the same token ids under every policy, in fp32, on a seeded random model."""

from __future__ import annotations

from hybridattn.core.params import SamplingParams
from hybridattn.llm import LLM
from scripts.gpucheck.report import Budget, Report

CASES = (
    ("gpu_only", None), ("sync_offload", 0.5), ("sync_offload", 1.0), ("async_overlap", 0.5), ("async_overlap", 1.0),
)  # fmt: skip


def run(report: Report, budget: Budget, dry_run: bool) -> int:
    model = "dummy:tiny" if dry_run else "dummy:smollm2-135m"
    device = "host" if dry_run else "cuda"
    count, tokens = (4, 4) if dry_run else (12, 24)
    vocab = 512 if dry_run else 49152
    # odd lengths; the last is longer than a step takes, so that it is prefilled in chunks
    lengths = [1, 17, 54, 97, 33, 16, 5, 80, 2, 64, 31, 300][-count:]
    prompts = [[(31 * i + 17 * j * j + j) % vocab for j in range(n)] for i, n in enumerate(lengths)]
    want: list[tuple[int, ...]] | None = None
    ok = True
    for policy, fraction in CASES:
        if budget.left < 5:
            report.put(cut_short=f"no time for {policy} {fraction}")
            return report.done(False)
        with LLM(model, device, policy, cpu_fraction=fraction, gpu_kv_blocks=80, cpu_kv_blocks=80, max_num_seqs=16,
                 max_num_batched_tokens=128, record=False) as llm:  # fmt: skip
            got = [o.token_ids for o in llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))]
        want = got if want is None else want
        same = sum(a == b for a, b in zip(got, want, strict=True))
        ok = ok and same == len(prompts)
        row = {"policy": policy, "cpu_fraction": fraction, "requests": len(prompts), "equal_to_gpu_only": same}
        report.add("rows", {**row, "distinct_tokens": len({t for ids in got for t in ids})})
    return report.done(ok)
