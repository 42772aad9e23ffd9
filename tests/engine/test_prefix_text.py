"""Text of a real model whose requests share the pages of a common prefix: on either tier, and over both."""

from __future__ import annotations

import pytest

from cpu_kernels import native
from hybridattn import LLM, SamplingParams

STORY = (
    "The old lighthouse keeper climbed the stairs every evening, with a lamp in his left hand and a book in his "
    "right. He read to the sea, he said, because the sea had never learnt how to read. In winter he read long novels; "
    "in summer, when the nights were short, he read poems about ships that came home. The people in the harbour "
    "laughed at him, but on foggy nights they steered by his voice as much as by the light. When he grew old he "
    "taught the children of the village to read aloud, each of them one page, and so the sea never missed a night. "
    "Years later there was a storm, the lamp went out, and forty voices read from the cliff until the morning. "
)
PROMPTS = [STORY + end for end in ("What did he read in summer?", "What did he have in his hand?", "The fishermen")]


@pytest.fixture(scope="module")
def expected(real_model):
    with LLM(real_model, policy="gpu_only", page_size=16, record=False) as llm:
        return [o.token_ids for o in llm.generate(PROMPTS, SamplingParams(max_tokens=5))]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("sync_offload", {"cpu_fraction": 1.0}),  # a cold prefix, read once for all its rows
        ("split", {"policy_options": {"cold_share": 0.95, "even_if_it_fits": True}}),
    ],
)
def test_ids_hold_where_pages_are_shared(real_model, expected, policy, options, monkeypatch):
    together = []
    look = native.common_beginnings
    monkeypatch.setattr(native, "common_beginnings", lambda inputs: together.append(look(inputs)) or together[-1])
    with LLM(real_model, policy=policy, page_size=16, share_prefixes=True, record=False, **options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=5))
        assert [o.token_ids for o in outputs] == expected
        assert sum(o.metrics["reused_tokens"] for o in outputs) >= 2 * 128
        again = llm.generate(PROMPTS[0], SamplingParams(max_tokens=5))[0]
        assert again.token_ids == expected[0] and again.metrics["reused_tokens"] >= 128
        assert any(len(c.rows) == 3 for found in together for c in found)
