"""Prompt tokens per second of the `host` device's GPU lane with one thread and with two, beside transformers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from hybridattn import LLM, SamplingParams
from hybridattn.devices.cores import CorePlan
from hybridattn.models.load import load

TOKENS, RUNS = 512, 5


def rate(run: Callable[[], object]) -> float:
    """Tokens per second, median of five runs after one."""
    took = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    return TOKENS / statistics.median(took[1:])


def main() -> None:
    model, one = load("smollm2-135m"), SamplingParams(max_tokens=1)
    prompt = [[(7 + 3 * i) % model.config.shape.vocab_size for i in range(TOKENS)]]
    peer = AutoModelForCausalLM.from_pretrained(model.source.folder, dtype=torch.float32).eval()
    for threads in (1, 2):
        cores = CorePlan(tuple(range(threads)), (1,))
        with LLM(model, policy="gpu_only", cpu_kv_blocks=1, device_options={"cores": cores}) as llm:
            ours = rate(lambda llm=llm: llm.generate(prompt, one))
        torch.set_num_threads(threads)
        with torch.inference_mode():
            theirs = rate(lambda: peer(torch.tensor(prompt), logits_to_keep=1))
        print(f"{threads} threads: GPU lane {ours:.0f} prompt tokens/s, transformers {theirs:.0f}")


if __name__ == "__main__":
    main()
