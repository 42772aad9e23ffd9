"""The same token ids under every policy and share of the CPU tier, chunked prompts included: here, and on a card."""

from __future__ import annotations

import pytest

from hybridattn import LLM, SamplingParams
from hybridattn.devices.cuda_presence import why_no_cuda

CASES = (
    ("gpu_only", None),
    ("sync_offload", 0.5),
    ("sync_offload", 1.0),
    ("async_overlap", 0.5),
    ("async_overlap", 1.0),
)
LENGTHS = (1, 17, 54, 97, 33, 16, 5, 80, 2, 64, 31, 300)  # the last is longer than a step takes


@pytest.mark.parametrize(
    ("device", "model", "count", "tokens"),
    [
        ("host", "dummy:tiny", 4, 4),
        pytest.param("cuda", "dummy:smollm2-135m", 12, 24, marks=pytest.mark.gpu),
    ],
)
def test_tokens_are_the_same_under_every_policy(device, model, count, tokens):
    if device == "cuda" and why_no_cuda() is not None:
        pytest.skip(f"needs a CUDA device: {why_no_cuda()}")
    want = None
    for policy, fraction in CASES:
        with LLM(model, device, policy, cpu_fraction=fraction, gpu_kv_blocks=80, cpu_kv_blocks=80, page_size=32,
                 max_num_seqs=16, max_num_batched_tokens=128, record=False) as llm:  # fmt: skip
            vocab = llm.model.config.shape.vocab_size
            prompts = [[(31 * i + 17 * j * j + j) % vocab for j in range(n)] for i, n in enumerate(LENGTHS[-count:])]
            got = [o.token_ids for o in llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))]
        want = got if want is None else want
        assert got == want, (policy, fraction)
    assert len({t for ids in want for t in ids}) > 1
