"""Damaged and unusual checkpoints."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

from hybridattn.core.errors import InputError
from hybridattn.models.checkpoint import INDEX, SINGLE, Checkpoint
from hybridattn.models.config import read_config
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


def test_weights_own_their_storage_and_report_its_size(tiny_model):
    _, folder = tiny_model("llama", tie_word_embeddings=True)
    config = read_config(folder)
    weights = load_weights(folder, config, "bf16")
    norms = (2 * config.shape.num_layers + 1) * config.shape.hidden_size
    assert weights.num_bytes() == 2 * (config.shape.num_params + norms)
    assert weights.head is weights.embed
    assert weights.embed.untyped_storage().nbytes() == weights.embed.nbytes  # not a view into a mapped file
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
