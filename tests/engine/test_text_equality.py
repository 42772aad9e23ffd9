"""The central promise on the host device: same text under every policy, tier, batch and preemption."""

from __future__ import annotations

import functools

import pytest
import torch

from hybridattn import LLM, SamplingParams
from hybridattn.core.op import CPU, GPU
from hybridattn.core.trace import overlap_ns, violations
from hybridattn.models import host_tier
from hybridattn.models.load import LoadedModel, load
from hybridattn.policies.split import Split

GREEDY = SamplingParams(max_tokens=16, ignore_eos=False)
HANDFUL = [
    "one_token_hello",
    "capital",
    "german_umlauts",
    "chinese",
    "emoji",
    "python_class",
    "recipe_and_report",
    "long_600",
]
POLICIES = ["gpu_only", "sync_offload", "async_overlap"]
ROOMY = {"gpu_kv_blocks": 120, "cpu_kv_blocks": 120, "page_size": 16}


def cases(fractions=(0.0, 0.5, 1.0)):
    """(policy, fraction): gpu_only has no CPU tier."""
    return [("gpu_only", None)] + [(p, f) for p in POLICIES[1:] for f in fractions]


def answers(model, chosen, policy, fraction, **options):
    """Token ids per prompt, after checking trace, tiers and blocks."""
    with LLM(model, policy=policy, cpu_fraction=fraction, **{**ROOMY, **options}) as llm:
        outputs = llm.generate([p["text"] for p in chosen], GREEDY)
        spans, records = llm.trace().spans, llm.take_records()
        assert violations(spans) == []
        assert llm.free_blocks() == {"gpu": llm.config.gpu_kv_blocks, "cpu": llm.config.cpu_kv_blocks}
        if fraction is not None:
            assert sum(o.tier == "cpu" for o in outputs) == int(len(chosen) * fraction + 1e-9)
        return [list(o.token_ids) for o in outputs], spans, records


@pytest.mark.parametrize(("policy", "fraction"), cases())
def test_token_ids_equal_transformers(real_model, prompts, policy, fraction):
    chosen = [prompts[name] for name in HANDFUL]
    assert all(p["min_gap"] > 1e-2 for p in chosen)
    got, spans, _ = answers(real_model, chosen, policy, fraction)
    assert got == [p["token_ids"] for p in chosen]
    if fraction == 0.5 and policy == "async_overlap":
        lanes = [[s for s in spans if s.lane == lane] for lane in (CPU, GPU)]
        assert overlap_ns(*lanes) > 0  # the two lanes really work at the same time


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [
        pytest.param(Split(cold_share=0.25, even_if_it_fits=True), 120, id="quarter", marks=pytest.mark.slow),
        pytest.param(Split(cold_share=0.75, even_if_it_fits=True), 120, id="three_quarters", marks=pytest.mark.slow),
        pytest.param(Split(cold_share=1.0, even_if_it_fits=True), 120, id="all_but_last_page", marks=pytest.mark.slow),
        pytest.param(Split(), 6, id="pages_that_move"),
    ],
)
def test_token_ids_equal_transformers_over_both_tiers(real_model, prompts, policy, blocks):
    chosen = [prompts[name] for name in ("capital", "python_class", "recipe_and_report")]
    got, spans, _ = answers(real_model, chosen, policy, None, gpu_kv_blocks=blocks)
    assert got == [p["token_ids"] for p in chosen]
    assert any(s.name == "cold attention" for s in spans)


@pytest.mark.parametrize(
    ("policy", "fraction", "blocks"), [("gpu_only", None, 7), ("async_overlap", 1.0, 7), ("sync_offload", 0.5, 4)]
)
def test_token_ids_survive_forced_preemption(real_model, prompts, policy, fraction, blocks):
    names = ["sql", "months", "days", "water", "alphabet", "python_loop"]  # each crosses a page boundary while decoding
    chosen = [prompts[name] for name in names]
    got, _, records = answers(real_model, chosen, policy, fraction, gpu_kv_blocks=blocks, cpu_kv_blocks=blocks)
    assert sum(r.preemptions for r in records.requests) > 0
    assert got == [p["token_ids"] for p in chosen]


def test_one_gpu_tier_too_small_for_all_spills_to_the_cpu(real_model, prompts):
    chosen = [prompts[name] for name in HANDFUL]
    got, _, records = answers(real_model, chosen, "async_overlap", None, gpu_kv_blocks=45)
    assert got == [p["token_ids"] for p in chosen]
    assert {r.tier for r in records.requests} == {"gpu", "cpu"}


def test_chunked_prefill_changes_nothing(real_model, prompts):
    chosen = [prompts[name] for name in ("recipe_and_report", "python_class", "long_600")]
    for fraction in (0.0, 1.0):
        got, _, _ = answers(real_model, chosen, "sync_offload", fraction, max_num_batched_tokens=100)
        assert got == [p["token_ids"] for p in chosen]


def test_the_torch_back_end_gives_the_same_tokens(real_model, prompts):
    chosen = [prompts[name] for name in HANDFUL[:4]]
    got, _, _ = answers(real_model, chosen, "async_overlap", 1.0, backend="torch")
    assert got == [p["token_ids"] for p in chosen]


@pytest.fixture
def teacher(monkeypatch):
    """Record the logits of every sampled row and force the token; ``force[seed][position]`` names it."""
    force: dict[int, list[int]] = {}
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def forced(logits, rows):
        for i, row in enumerate(rows):
            seen[row.seed, row.position] = logits[i].float().clone()
        return [force[row.seed][row.position] for row in rows]

    monkeypatch.setattr(host_tier, "sample_each", forced)
    return force, seen


def forced_logits(model, chosen, teacher, policy, fraction, **options):
    """Logits ``[prompts, 16, vocab]`` with the committed answers forced."""
    force, seen = teacher
    seen.clear()
    force.update({i: p["token_ids"] for i, p in enumerate(chosen)})
    params = [SamplingParams(max_tokens=16, seed=i, ignore_eos=True) for i in range(len(chosen))]
    with LLM(model, policy=policy, cpu_fraction=fraction, **{**ROOMY, **options}) as llm:
        llm.generate([p["text"] for p in chosen], params)
    return torch.stack([torch.stack([seen[i, n] for n in range(len(p["token_ids"]))]) for i, p in enumerate(chosen)])


@pytest.fixture(scope="module")
def reference_logits(real_model, prompts):
    """transformers' own logits at the same positions, as float32."""
    from transformers import AutoModelForCausalLM

    models = {}

    @functools.cache
    def of(name, dtype=torch.float32):
        if dtype not in models:
            models[dtype] = AutoModelForCausalLM.from_pretrained(real_model.source.folder, dtype=dtype)
        model = models[dtype]
        p = prompts[name]
        ids = real_model.tokenizer.encode(p["text"])
        with torch.inference_mode():
            logits = model(torch.tensor([ids + p["token_ids"][:-1]])).logits[0].float()
        return logits[len(ids) - 1 :]

    return of


@pytest.mark.parametrize(("policy", "fraction"), [("gpu_only", None), ("sync_offload", 1.0), ("async_overlap", 0.5)])
def test_teacher_forced_logits_are_within_1e_3(real_model, prompts, teacher, reference_logits, policy, fraction):
    names = ["capital", "chinese", "python_class", "recipe_and_report"]
    got = forced_logits(real_model, [prompts[n] for n in names], teacher, policy, fraction)
    want = torch.stack([reference_logits(n) for n in names])
    assert (got - want).abs().max().item() < 1e-3


def test_bf16_logits_are_as_good_as_transformers_own(prompts, teacher, reference_logits):
    """The stated bound: against fp32, at most twice the error of transformers' own bf16 run."""
    model: LoadedModel = load("smollm2-135m", dtype="bf16")
    names = ["capital", "chinese", "python_class", "recipe_and_report"]
    want = torch.stack([reference_logits(n) for n in names])
    plain = (torch.stack([reference_logits(n, torch.bfloat16) for n in names]) - want).abs()
    split = Split(cold_share=0.5, even_if_it_fits=True)
    for policy, fraction in [("gpu_only", None), ("async_overlap", 1.0), (split, None)]:
        got = forced_logits(model, [prompts[n] for n in names], teacher, policy, fraction, dtype="bf16")
        error = (got - want).abs()
        print(f"bf16 {policy}: max {error.max():.3f} ({plain.max():.3f}), mean {error.mean():.4f} ({plain.mean():.4f})")
        assert error.max().item() < 2 * plain.max().item()
        assert error.mean().item() < 2 * plain.mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["batched", "alone", "preempted"])
@pytest.mark.parametrize(("policy", "fraction"), cases())
def test_full_cross_product(real_model, prompts, policy, fraction, how):
    """Every committed prompt; run with ``make test-slow``, result in the README."""
    chosen = list(prompts.values())
    assert len(chosen) >= 20 and all(p["min_gap"] > 1e-2 for p in chosen)
    blocks = 41 if how == "preempted" else 130
    options = {"gpu_kv_blocks": blocks, "cpu_kv_blocks": blocks}
    if how == "alone":
        with LLM(real_model, policy=policy, cpu_fraction=fraction, **{**ROOMY, **options}) as llm:
            got = [list(llm.generate(p["text"], GREEDY)[0].token_ids) for p in chosen]
            assert llm.free_blocks() == {"gpu": blocks, "cpu": blocks}
    else:
        got, _, records = answers(real_model, chosen, policy, fraction, **options)
        assert how == "batched" or sum(r.preemptions for r in records.requests) > 0
    assert got == [p["token_ids"] for p in chosen]
