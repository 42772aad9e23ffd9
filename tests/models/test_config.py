"""What config.json says, against transformers' own reading of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape
from hybridattn.models.config import DecoderConfig, RopeConfig, UnusedSettingWarning, parse_config, read_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("settings", [{}, {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 5e5}])
def test_a_config_with_missing_keys_means_what_transformers_takes_it_to_mean(architecture, settings):
    from transformers import AutoConfig

    sizes = {**LLAMA, "num_attention_heads": 32, "hidden_size": 256, **settings}
    raw = {**sizes, "model_type": architecture}
    theirs = AutoConfig.for_model(**raw)
    ours = parse_config(raw)
    assert ours.shape.num_kv_heads == theirs.num_key_value_heads
    assert ours.shape.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
    assert ours.shape.max_model_len == theirs.max_position_embeddings
    assert ours.shape.tied_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    assert ours.layer_windows == (None if architecture in ("llama", "qwen2", "qwen3") else theirs.sliding_window,) * 3
    assert ours.eos_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.bos_id == theirs.bos_token_id


@pytest.mark.parametrize("settings", [{"max_window_layers": 1}, {"layer_types": ["sliding_attention"] * 3}])
def test_windows_by_layer(settings):
    raw = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5}
    windows = parse_config({**raw, **settings}).layer_windows
    assert windows == ((None, 5, 5) if "max_window_layers" in settings else (5, 5, 5))


def test_S07_end_ids_are_the_union_of_all_sources():
    config = parse_config({**LLAMA, "eos_token_id": [1]}, {"eos_token_id": [1, 2]}, tokenizer_eos=7)
    assert config.eos_ids == (1, 2, 7)
    assert parse_config({**LLAMA, "eos_token_id": 1}, {}, tokenizer_eos=2).eos_ids == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported; known: llama, mistral"),
        ({"model_type": None}, "architecture 'None' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"quantization_config": "gptq"}, "quantization_config must be an object, got 'gptq'"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an id or a list of ids, got '</s>'"),
        ({"eos_token_id": [[2]]}, r"eos_token_id must be an id or a list of ids, got \[\[2\]\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported; known types"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs a number low_freq_factor, got None"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "rope factor must be a positive number, got -1.0"),
        ({"vocab_size": None}, "integer vocab_size, got None"),
        ({"hidden_size": "48"}, "integer hidden_size, got '48'"),
        ({"hidden_size": 50}, "hidden_size 50 is not a multiple of num_attention_heads 6"),
        ({"num_key_value_heads": 4}, "num_q_heads 6 is not a multiple of num_kv_heads 4"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"num_local_experts": 8}, "num_local_experts 8 is not supported"),
        ({"rope_scaling": {"factor": 4.0}}, "the rope settings have factor 4.0, but no rope_type that reads it"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4.0}},
            "'llama3' and type 'linear' differ",
        ),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "needs a number factor, got True"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "finetuned": 1}}, "'linear' has no setting 'finetuned'"),
        (
            {"rope_parameters": {"rope_type": "default", "factor": 4.0}},
            r"'default' has no setting 'factor' \(got 4.0\)",
        ),
        ({"rope_scaling_factor": 4.0}, "the key 'rope_scaling_factor' of config.json is not understood"),
        ({"rotary_pct": 0.25}, "the key 'rotary_pct' of config.json is not understood"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_parameters 500000.0 and rope_theta 10000.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
            "rope_parameters .* and rope_scaling .* differ",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "layer 0 a sliding one, but it has no sliding window"),
        ({"layer_types": ["chunked_attention"] * 2}, "2 entries for 3 layers, unknown: chunked_attention"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        parse_config({**LLAMA, **change})


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_L04_both_spellings_of_the_rope_type_are_read(key):
    scaling = {key: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 4096
    expected = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 4096)
    assert parse_config({**LLAMA, "rope_theta": 500000.0, "rope_scaling": scaling}).rope == expected
    assert parse_config({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 500000.0}}).rope == expected


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(InputError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="must hold a JSON object, got a list"):
        read_config(tmp_path)


def test_read_config_takes_generation_config_along(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    config = read_config(tmp_path, tokenizer_eos=9, name="small")
    assert config.eos_ids == (2, 5, 9)
    assert config.shape.name == "small"


def test_a_config_that_contradicts_itself_is_refused():
    shape = ModelShape("m", 2, 8, 8, 2, 1, 4, 10, 16)
    with pytest.raises(InputError, match="layer_windows has 1 entries for 2 layers"):
        DecoderConfig("llama", shape, 1e-6, RopeConfig(), (None,))
    with pytest.raises(InputError, match="sliding window of layer 1 must be at least 1, got 0"):
        DecoderConfig("llama", shape, 1e-6, RopeConfig(), (None, 0))


@given(
    spelling=st.sampled_from(["rope_scaling", "rope_parameters"]),
    kind=st.sampled_from([None, "default", "linear", "llama3"]),
    key=st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=3, max_size=12),
    value=st.floats(0.1, 100) | st.integers(1, 9) | st.booleans(),
)
def test_L04_any_rope_key_that_is_not_read_is_refused_by_name(spelling, kind, key, value):
    read = {
        None: {},
        "default": {},
        "linear": {"factor": 2.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }[kind]
    assume(key not in (*read, "type"))
    entries = {**read, key: value} if kind is None else {"rope_type": kind, **read, key: value}
    with pytest.raises(InputError, match=f"{key}"):
        parse_config({**LLAMA, spelling: entries})
    with pytest.raises(InputError, match=f"'rope_{key}' of config.json is not understood"):
        parse_config({**LLAMA, f"rope_{key}": value or 2})


def test_keys_of_public_checkpoints_that_change_nothing_are_taken():
    raw = {**LLAMA, "rope_interleaved": False, "is_llama_config": True, "pretraining_tp": 1, "num_experts": None}
    assert parse_config({**raw, "rope_scaling": None, "logit_scale": 1.0}) == parse_config(LLAMA)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 5},
        {"model_type": "qwen2", "sliding_window": 5, "num_key_value_heads": 2},
        {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True, "num_key_value_heads": 2},
    ],
    ids=["llama has none", "not switched on", "too few layers"],
)
def test_a_declared_window_that_no_layer_uses_is_said(change):
    with pytest.warns(UnusedSettingWarning, match="declares sliding_window 5, which no layer uses"):
        config = parse_config({**LLAMA, **change})
    assert config.layer_windows == (None, None, None)
    parse_config({**LLAMA, **change, "use_sliding_window": False})  # the file itself switches it off: nothing is said


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"rope_theta": 1e4, "rope_theta": 5e5}')
    with pytest.raises(InputError, match=r"config\.json is not valid JSON: the key 'rope_theta' is there twice"):
        read_config(tmp_path)
