"""Damaged and unusual checkpoints."""

from __future__ import annotations

import json
import pickle
import re
import struct

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hybridattn.core.errors import InputError
from hybridattn.models.checkpoint import INDEX, SINGLE, Checkpoint
from hybridattn.models.config import read_config
from hybridattn.models.expected import EMBED, HEAD, expected_tensors
from hybridattn.models.locate import DUMMY_SHAPES
from hybridattn.models.rope import inverse_frequencies
from hybridattn.models.weights import load_weights, random_weights


def raw_file(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int) -> dict:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def test_L07_bf16_values_are_exact(tmp_path):
    bits = torch.tensor([0x3F80, 0x4049, 0x0001, -0x8000, 0x7F7F, 0x3E8A], dtype=torch.int16)
    save_file({"t": bits.view(torch.bfloat16)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        read = checkpoint.read("t", (6,))
    assert read.dtype == torch.bfloat16
    assert torch.equal(read.view(torch.int16), bits)
    assert read.float()[1] == 3.140625


DAMAGED = {
    "pickle": pickle.dumps({"t": [1.0, 2.0]}) * 4,
    "trailing bytes": raw_file({"t": entry(0, 8)}, bytes(8 + 5)),
    "truncated data": raw_file({"t": entry(0, 8)}, bytes(3)),
    "truncated header": raw_file({"t": entry(0, 8)}, bytes(8))[:20],
    "overlapping offsets": raw_file({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "empty": b"",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_L07_a_damaged_file_is_refused_by_name(kind, tmp_path):
    (tmp_path / SINGLE).write_bytes(DAMAGED[kind])
    with pytest.raises(InputError, match=rf"{SINGLE} is not a readable safetensors file"):
        Checkpoint(tmp_path)


def test_L07_one_file_needs_no_index_and_may_have_any_name(tmp_path):
    save_file({"t": torch.ones(3)}, tmp_path / "weights.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == {"t"}
    save_file({"u": torch.ones(3)}, tmp_path / "more.safetensors")
    with pytest.raises(InputError, match="holds 2 safetensors files and no model.safetensors.index.json"):
        Checkpoint(tmp_path)


def test_L07_an_index_must_name_shards_that_exist(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(InputError, match=r"names the shard two\.safetensors, which is missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../one.safetensors", "/etc/passwd", 3, None])
def test_L07_an_index_must_name_files_beside_it(shard, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard, "b": "b.safetensors"}}))
    with pytest.raises(InputError, match=f"places tensor 'a' in {shard!r}, which is no name of a file beside it"):
        Checkpoint(tmp_path)


def test_L07_a_tensor_in_two_shards_is_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "two.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(InputError, match=r"tensor 'a' is in two shards: one\.safetensors and two\.safetensors"):
        Checkpoint(tmp_path)


def test_an_index_that_misplaces_a_tensor_is_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(InputError, match="places tensor 'a' in two.safetensors, but it is in one.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}))
    with pytest.raises(InputError, match="places tensor 'c' in two.safetensors, but no shard has it"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(InputError, match="has no weight_map"):
        Checkpoint(tmp_path)


def test_absent_misshapen_and_integer_tensors_are_named(tmp_path):
    save_file({"a": torch.ones(3), "n": torch.ones(3, dtype=torch.int32)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(InputError, match="has no tensor 'b'"):
            checkpoint.read("b", (3,))
        with pytest.raises(InputError, match=r"tensor 'a' .* has shape \(3,\), expected \(4,\)"):
            checkpoint.read("a", (4,))
        with pytest.raises(InputError, match=r"tensor 'n' .* is torch.int32, expected a float dtype"):
            checkpoint.read("n", (3,))
    with pytest.raises(InputError, match="holds 0 safetensors files"):
        Checkpoint(tmp_path.parent)


def test_shards_and_one_file_give_the_same_weights(tiny_model):
    model, folder = tiny_model("llama", shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    config = read_config(folder)
    sharded = load_weights(folder, config)
    model.save_pretrained(folder / "whole")
    whole = load_weights(folder / "whole", config)
    assert torch.equal(sharded.head, whole.head)
    for a, b in zip(sharded.layers, whole.layers, strict=True):
        assert torch.equal(a.qkv, b.qkv) and torch.equal(a.gate_up, b.gate_up) and torch.equal(a.down, b.down)


ACTIONS = ("remove", "rename", "add", "truncate", "turn")


@pytest.fixture(scope="module")
def tiny_tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in expected_tensors(DUMMY_SHAPES["tiny"]).items()}


@given(data=st.data(), action=st.sampled_from(ACTIONS))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_L07_no_tensor_may_lack_be_renamed_added_or_misshapen(data, action, tiny_tensors, tmp_path):
    name = data.draw(st.sampled_from(sorted(tiny_tensors)))
    tensors = dict(tiny_tensors)
    value = tensors.pop(name)
    other = data.draw(st.sampled_from([name + "s", "x." + name, name.replace(".", "_", 1)]))
    if action == "add":
        tensors[name] = value
    if action in ("rename", "add"):
        tensors[other] = value.clone()
    if action == "truncate":
        tensors[name] = value[:-1].clone()
    if action == "turn":
        assume(value.ndim == 2 and value.shape[0] != value.shape[1])
        tensors[name] = value.T.contiguous()
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(InputError, match=re.escape(f"'{other if action == 'add' else name}'")):
        load_weights(tmp_path, DUMMY_SHAPES["tiny"])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_the_expected_tensors_are_those_that_transformers_saves(architecture, tiny_model):
    _, folder = tiny_model(architecture, **({"sliding_window": None} if architecture == "mistral" else {}))
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.shapes == expected_tensors(read_config(folder))


def test_a_bias_that_the_config_does_not_know_is_refused(tiny_model):
    _, folder = tiny_model("llama", attention_bias=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(InputError, match=r"holds the tensors 'model\.layers\.0\.self_attn.*_proj\.bias'.* and 9 more"):
        load_weights(folder, read_config(folder))


def test_a_tied_head_may_be_stored_again_but_not_differ(tiny_tensors, tmp_path):
    config, embed = DUMMY_SHAPES["tiny"], tiny_tensors[EMBED]
    save_file({**tiny_tensors, HEAD: embed.clone()}, tmp_path / SINGLE)
    weights = load_weights(tmp_path, config)
    assert weights.head is weights.embed
    save_file({**tiny_tensors, HEAD: embed + 1}, tmp_path / SINGLE)
    with pytest.raises(
        InputError, match="says tie_word_embeddings, but 'lm_head.weight' differs from 'model.embed_tok"
    ):
        load_weights(tmp_path, config)


def test_rotary_frequencies_of_old_files_are_compared(tiny_tensors, tmp_path):
    config, name = DUMMY_SHAPES["tiny"], "model.layers.1.self_attn.rotary_emb.inv_freq"
    good = inverse_frequencies(config.rope, config.shape.head_dim)
    save_file({**tiny_tensors, name: good.bfloat16()}, tmp_path / SINGLE)
    load_weights(tmp_path, config)
    save_file({**tiny_tensors, name: good / 4}, tmp_path / SINGLE)
    with pytest.raises(InputError, match="'model.layers.1.self_attn.rotary_emb.inv_freq' is not what rope theta 10000"):
        load_weights(tmp_path, config)


def test_L07_a_name_twice_in_one_header_is_refused(tmp_path):
    one, two = json.dumps({"t": entry(0, 8)})[1:-1], json.dumps({"t": entry(0, 8)})[1:-1]
    text = f"{{{one}, {two}}}".encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(InputError, match="not a readable safetensors file: .*"):
        Checkpoint(tmp_path)


def test_weights_outlive_their_files_and_report_their_size(tiny_model):
    _, folder = tiny_model("llama", tie_word_embeddings=True)
    config = read_config(folder)
    weights = load_weights(folder, config, "bf16")
    norms = (2 * config.shape.num_layers + 1) * config.shape.hidden_size
    assert weights.num_bytes() == 2 * (config.shape.num_params + norms)
    assert weights.head is weights.embed
    before = weights.embed.clone()
    for file in folder.glob("*.safetensors"):  # not a view into a mapped file
        with file.open("r+b") as opened:
            opened.truncate(0)
    assert torch.equal(weights.embed, before)
    assert weights.dtype == torch.bfloat16


def test_an_unsupported_weight_dtype_is_refused(tiny_model):
    _, folder = tiny_model("llama")
    with pytest.raises(InputError, match="dtype 'fp8' is not supported for weights; choose one of fp32, bf16, fp16"):
        load_weights(folder, read_config(folder), "fp8")


def test_random_weights_depend_on_the_seed_alone(tiny_model):
    config = read_config(tiny_model("qwen3", head_dim=16)[1])
    one, same, other = (random_weights(config, seed) for seed in (1, 1, 2))
    assert torch.equal(one.layers[2].down, same.layers[2].down)
    assert not torch.equal(one.layers[2].down, other.layers[2].down)
    assert one.layers[0].q_norm is not None and one.layers[0].q_norm.shape == (16,)
