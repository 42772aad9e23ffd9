"""The linear stages against transformers, and the independence of rows."""

from __future__ import annotations

import copy

import pytest
import torch

from hybridattn.core.errors import InputError
from hybridattn.models.config import read_config
from hybridattn.models.decoder import Decoder
from hybridattn.models.load import load
from hybridattn.models.weights import load_weights

HANDFUL = ("one_token_the", "capital", "russian", "python_class", "emoji", "recipe")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama with head_dim": ("llama", {"head_dim": 16}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 window above layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "phi3": ("phi3", {"sliding_window": 9}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_architecture_equal_transformers(variant, tiny_model, full_forward):
    architecture, settings = VARIANTS[variant]
    model, folder = tiny_model(architecture, **settings)
    config = read_config(folder)
    decoder = Decoder(config, load_weights(folder, config))
    ids = torch.randint(3, 97, (41,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    assert expected.std() > 0.1  # the comparison below says something
    torch.testing.assert_close(full_forward(decoder, ids), expected, rtol=1e-4, atol=1e-4)


def test_bf16_stages_stay_within_a_stated_bound_of_fp32(tiny_model, full_forward):
    """The bound: 4 % of the logits' standard deviation on average over a 41-token text."""
    _, folder = tiny_model("llama")
    config = read_config(folder)
    ids = torch.randint(3, 97, (41,), generator=torch.Generator().manual_seed(1))
    exact = full_forward(Decoder(config, load_weights(folder, config, "fp32")), ids)
    rounded = full_forward(Decoder(config, load_weights(folder, config, "bf16")), ids)
    assert rounded.dtype == torch.float32
    error = (rounded - exact).abs().mean() / exact.std()
    assert 1e-4 < error < 0.04


@pytest.mark.parametrize("name", HANDFUL)
def test_teacher_forced_logits_equal_transformers(name, real_model, reference, prompts, full_forward):
    """Over the prompt and its 16 greedy tokens; the greedy tokens follow from the same logits."""
    prompt = prompts[name]
    ids = torch.tensor(real_model.tokenizer.encode(prompt["text"]) + prompt["token_ids"])
    ours = full_forward(Decoder(real_model.config, real_model.weights), ids)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    steps = ours[prompt["num_tokens"] - 1 : -1]
    assert steps.argmax(-1).tolist() == prompt["token_ids"]
    best = expected[prompt["num_tokens"] - 1 : -1].topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    assert gap > 1e-2
    assert gap == pytest.approx(prompt["min_gap"], abs=2e-4)


@pytest.mark.slow
def test_every_committed_prompt_is_what_transformers_generates(real_model, reference, prompts):
    assert len(prompts) >= 24
    for name, prompt in prompts.items():
        ids = torch.tensor([real_model.tokenizer.encode(prompt["text"])])
        assert ids.shape[1] == prompt["num_tokens"], name
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert out.sequences[0, ids.shape[1] :].tolist() == prompt["token_ids"], name
        best = torch.cat(out.logits).topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-2, name


@pytest.mark.slow
def test_logits_are_as_close_to_float64_as_those_of_transformers(real_model, reference, prompts, full_forward):
    """Over every committed prompt. Logits reach 40 here; two float32 programs part by up to 1.2e-4."""
    decoder = Decoder(real_model.config, real_model.weights)
    exact = copy.deepcopy(reference).double()
    worst = torch.zeros(3)
    for prompt in prompts.values():
        ids = torch.tensor(real_model.tokenizer.encode(prompt["text"]) + prompt["token_ids"])
        ours = full_forward(decoder, ids)
        with torch.no_grad():
            theirs, truth = reference(ids[None]).logits[0], exact(ids[None]).logits[0]
        errors = [(a - b).abs().max() for a, b in ((ours, theirs), (ours, truth), (theirs, truth))]
        worst = torch.maximum(worst, torch.tensor(errors))
    between, own, reference_error = worst.tolist()
    assert between < 2e-4
    assert own < 2 * reference_error


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_a_row_parts_by_rounding_alone_from_itself_among_700(dtype, bound, threads, real_model, one_torch_thread):
    """The sizes of the real model; the row counts where BLAS libraries change their kernel or their split between
    threads. Which of them round alike is the library's business; a row of zeros beside it, or another row, is ours."""
    s = real_model.config.shape
    decoder = Decoder(real_model.config, load("smollm2-135m", dtype).weights)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(700, s.hidden_size, generator=generator).to(decoder.weights.dtype)
    attention = torch.randn(700, s.num_q_heads, s.head_dim, generator=generator).to(x.dtype)
    positions = torch.randint(0, s.max_model_len, (700,), generator=generator)

    def stages(n: int) -> tuple[torch.Tensor, ...]:
        after = decoder.post_attention(11, attention[:n], x[:n])
        return (*decoder.pre_attention(12, x[:n], positions[:n]), after, decoder.head(x[: min(n, 13)]))

    torch.set_num_threads(threads)
    whole = stages(700)
    for n in [*range(1, 14), 17, 31, 64, 97, 257, 577, 699]:
        for alone, among in zip(stages(n), whole, strict=True):
            among = among[: len(alone)].float()
            assert (alone.float() - among).abs().max() <= bound * among.abs().max(), f"{n} rows"


def test_rows_are_padded_to_a_multiple_of_four_and_the_padding_does_not_show(real_model):
    decoder = Decoder(real_model.config, real_model.weights)
    x, positions = torch.randn(5, 576), torch.arange(5)
    alone = decoder.pre_attention(0, x, positions)
    for got, want in zip(
        decoder.pre_attention(0, torch.cat([x, torch.zeros(3, 576)]), torch.arange(8)), alone, strict=True
    ):
        assert torch.equal(got[:5], want)


def test_stages_leave_their_inputs_alone(real_model):
    decoder = Decoder(real_model.config, real_model.weights)
    x = torch.randn(5, 576)
    kept, attention = x.clone(), torch.randn(5, 9, 64)
    decoder.pre_attention(0, x, torch.arange(5))
    decoder.post_attention(0, attention, x)
    decoder.head(x)
    assert torch.equal(x, kept)


def test_layers_of_config_and_weights_must_agree(real_model):
    other = load("dummy:tiny")
    with pytest.raises(InputError, match="weights have 3 layers, config 30"):
        Decoder(real_model.config, other.weights)
