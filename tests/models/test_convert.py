"""GGUF files: order of rows, metadata that must not be guessed, and the cache of converted folders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.models import convert
from hybridattn.models.config import RopeConfig, read_config
from hybridattn.models.convert import converted
from hybridattn.models.gguf_facts import PRE_TOKENIZERS, GgufFacts
from hybridattn.models.locate import resolve
from hybridattn.models.pieces import byte_alphabet
from hybridattn.models.rope import inverse_frequencies
from hybridattn.models.text import Tokenizer
from hybridattn.models.weights import DecoderWeights, load_weights

TINY = {"intermediate_size": 80, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 0}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
TOKENS = ["<|end|>", "<|start|>", *byte_alphabet(), "he", "hel", *(f"<unused{i}>" for i in range(40))]
MERGES = ["h e", "he l"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HYBRIDATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """q and k rows in the order of llama.cpp's ``llama`` architecture: the two halves of a head alternate."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def write_gguf(tiny_model, tmp_path) -> Callable[..., tuple[Any, Path, Path]]:
    """Writes a tiny model twice: a transformers folder and a GGUF. ``meta`` changes metadata, None removes it."""

    def write(architecture: str = "llama", rope_freqs: np.ndarray | None = None, **meta: Any) -> tuple[Any, Path, Path]:
        model, folder = tiny_model(architecture, **SIZES)
        path = tmp_path / "tiny.gguf"
        tensors = in_gguf(architecture, model)
        if rope_freqs is not None:
            tensors["rope_freqs.weight"] = rope_freqs.astype(np.float32)
        write_file(path, architecture, tensors, meta)
        return model, folder, path

    return write


def write_file(path: Path, architecture: str, tensors: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, meta.get("declared", architecture))
    _metadata(writer, architecture, meta)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_gguf(architecture: str, model: Any) -> dict[str, np.ndarray]:
    return dict(_gguf_tensor(architecture, name, value.numpy()) for name, value in model.state_dict().items())


def nothing_in(cache: Path) -> bool:
    return not cache.exists() or list(cache.iterdir()) == []


def _metadata(writer: gguf.GGUFWriter, architecture: str, changes: dict[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_block_count(changes.get("block_count", 3))
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(80)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(changes.get("theta", 10000.0))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    if changes.get("pre", "smollm") is not None:
        writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    if changes.get("merges", True):
        writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    for key, value in changes.items():
        if "." in key:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(key if key.startswith(("split.", "general.")) else f"{architecture}.{key}", value)


def _gguf_tensor(architecture: str, name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in plain:
        return f"{plain[stem]}.{kind}", value
    _, _, layer, part = stem.split(".", 3)
    if architecture == "llama" and part.endswith(("q_proj", "k_proj")):
        value = interleaved(value, 4 if part.endswith("q_proj") else 2)
    return f"blk.{layer}.{NAMES[part]}.{kind}", np.ascontiguousarray(value)


def weights_of(folder: Path) -> DecoderWeights:
    return load_weights(folder, read_config(folder))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_L01_rows_of_q_and_k_are_put_back_in_order(architecture, write_gguf):
    """``llama`` files hold them interleaved, ``qwen2`` files do not; k has fewer heads than q."""
    _, folder, path = write_gguf(architecture)
    ours, theirs = weights_of(converted(path)), weights_of(folder)
    assert torch.equal(ours.embed, theirs.embed) and torch.equal(ours.head, theirs.head)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(a.qkv, b.qkv) and torch.equal(a.o, b.o)
        assert torch.equal(a.gate_up, b.gate_up) and torch.equal(a.down, b.down)
        assert torch.equal(a.input_norm, b.input_norm)
        if architecture == "qwen2":
            assert a.qkv_bias is not None and torch.equal(a.qkv_bias, b.qkv_bias)
    assert read_config(converted(path)).rope == read_config(folder).rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"pre": "mystery"}, r"tokenizer\.ggml\.pre 'mystery' is unknown; known: gpt-2, llama-bpe, qwen2, smollm"),
        ({"merges": False}, r"tokenizer\.ggml\.merges is missing"),
        ({"declared": "mamba"}, "architecture 'mamba' is not supported; known: llama, phi3, qwen2, qwen3"),
        ({"rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"attention.sliding_window": 16}, "sliding window in a GGUF is not supported"),
        ({"rope_freqs": np.array([1.0, 2.0, 3.0, 8.0])}, "rope_freqs.weight is not the llama3 scaling"),
        ({"rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.factor is 4, but no rope\.scaling\.type reads it"),
        (
            {"rope.scaling.attn_factor": 1.2},
            r"the entry llama\.rope\.scaling\.attn_factor \(1\.2.*\) is not understood",
        ),
        ({"attention.scale": 0.1}, r"the entry llama\.attention\.scale .* is not understood"),
        ({"attention.key_length": 16}, r"llama\.attention\.key_length is 16, but a head has 8 dimensions"),
        ({"expert_count": 0, "expert.count": 4}, r"the entry llama\.expert\.count \(4\) is not understood"),
        ({"block_count": 4}, r"tiny\.gguf lacks the tensors 'blk\.3\.attn_norm\.weight', .* and 6 more"),
        ({"block_count": 2}, r"tiny\.gguf holds the tensors 'blk\.2\..* and 6 more, which this model does not read"),
        ({"split.count": 3, "split.no": 1}, "is shard 2 of 3 of a split GGUF; join the shards into one file first"),
        ({"split.tensors.count": 99}, "holds 30 tensors of 99: it is a shard of a split GGUF"),
    ],
    ids=str,
)
def test_L03_what_would_have_to_be_guessed_is_refused_and_leaves_nothing(change, message, write_gguf, own_cache):
    _, _, path = write_gguf(**change)
    with pytest.raises(InputError, match=message):
        converted(path)
    assert nothing_in(own_cache)


@pytest.fixture(scope="module")
def llama_tensors() -> dict[str, np.ndarray]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **{**TINY, **SIZES, "num_hidden_layers": 3})
    return in_gguf("llama", AutoModelForCausalLM.from_config(config, dtype=torch.float32))


ACTIONS = ("remove", "rename", "add", "truncate", "turn", "lengthen")


@given(data=st.data(), action=st.sampled_from(ACTIONS))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_L07_no_tensor_of_a_gguf_may_lack_be_renamed_added_or_misshapen(
    data, action, llama_tensors, tmp_path, own_cache
):
    """The message names it, and nothing is written. A head that lacks is a tied one: no file says which was meant."""
    name = data.draw(st.sampled_from(sorted(set(llama_tensors) - {"output.weight"})))
    tensors = dict(llama_tensors)
    value = tensors.pop(name)
    other = name + "s" if action in ("rename", "add") else name
    if action == "add":
        tensors[name] = value
    if action in ("rename", "add"):
        tensors[other] = value
    if action == "truncate":
        tensors[name] = np.ascontiguousarray(value[:-1])
    if action == "lengthen":
        tensors[name] = np.concatenate([value, value[:1]])
    if action == "turn":
        assume(value.ndim == 2 and value.shape[0] != value.shape[1])
        tensors[name] = np.ascontiguousarray(value.T)
    write_file(tmp_path / "t.gguf", "llama", tensors, {})
    with pytest.raises(InputError, match=re.escape(f"'{other if action == 'add' else name}'")):
        converted(tmp_path / "t.gguf")
    assert nothing_in(own_cache)


def test_L07_a_gguf_without_an_embedding_is_refused(llama_tensors, tmp_path, own_cache):
    rest = {name: value for name, value in llama_tensors.items() if name != "token_embd.weight"}
    write_file(tmp_path / "t.gguf", "llama", rest, {})
    with pytest.raises(InputError, match=r"t\.gguf lacks the tensor 'token_embd\.weight'"):
        converted(tmp_path / "t.gguf")
    assert nothing_in(own_cache)


def moved(path: Path, name: str, change: Callable[[int], int]) -> None:
    """Changes the offset that the header gives for a tensor."""
    data = bytearray(path.read_bytes())
    at = data.index(name.encode()) + len(name)
    at += 4 + 8 * int.from_bytes(data[at : at + 4], "little") + 4
    data[at : at + 8] = change(int.from_bytes(data[at : at + 8], "little")).to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: at + 8, r"tensor 'blk\.1\.attn_v\.weight' begins at \d+, which is not aligned to 32 bytes"),
        (lambda at: at - 32, r"tensor 'blk\.1\.attn_v\.weight' begins at byte \d+, inside the one before it"),
        (lambda at: at + 32, r"32 bytes before tensor 'blk\.1\.attn_v\.weight' belong to no tensor"),
        (lambda at: 0, r"begins at byte \d+, inside the one before it"),
        (lambda at: 1 << 40, r"belong to no tensor|ends at byte"),
    ],
)
def test_L07_tensors_of_a_gguf_lie_one_behind_the_other(change, message, write_gguf, own_cache):
    _, _, path = write_gguf()
    moved(path, "blk.1.attn_v.weight", change)
    with pytest.raises(InputError, match=message):
        converted(path)
    assert nothing_in(own_cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-100], r"tensor '.*' ends at byte \d+ of \d+"),
        (lambda data: data + bytes(64), "64 bytes after the last tensor belong to no tensor"),
        (lambda data: data.replace(b"blk.1.attn_v.weight", b"blk.0.attn_v.weight"), "the tensor '.*' is there twice"),
        (
            lambda data: data.replace(b"llama.vocab_size", b"llama.block_coun"),
            r"llama\.block_coun .* is not understood",
        ),
    ],
    ids=["cut", "longer", "a tensor twice", "an unread entry"],
)
def test_L07_a_changed_gguf_is_refused_by_name(change, message, write_gguf, own_cache):
    _, _, path = write_gguf()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=message):
        converted(path)
    assert nothing_in(own_cache)


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        (
            "llama.rope.freq_base",
            [1.0, 2.0],
            "ARRAY",
            r"llama.rope.freq_base must be a finite number, got \[1.0, 2.0\]",
        ),
        ("llama.rope.scaling.factor", "x", "STRING", "llama.rope.scaling.factor must be a finite number, got 'x'"),
        ("llama.attention.head_count", 0, "UINT32", "llama.attention.head_count must be a positive integer of 31 bits"),
        ("llama.block_count", 2**32 - 1, "UINT32", "llama.block_count must be a positive integer of 31 bits, got 4294"),
        ("tokenizer.ggml.eos_token_id", -1, "INT32", r"eos_token_id must be one of the \d+ tokens, got -1"),
        ("tokenizer.ggml.bos_token_id", 2**31, "UINT32", r"bos_token_id must be one of the \d+ tokens, got 2147483648"),
        ("tokenizer.ggml.token_type", [1, 2], "ARRAY", r"token_type has 2 entries for \d+ tokens"),
    ],
)
def test_an_entry_of_another_kind_or_out_of_range_is_refused_by_name(key, value, kind, message, tmp_path):
    writer = gguf.GGUFWriter(path := tmp_path / "tiny.gguf", "llama")
    _metadata(writer, "llama", {})
    writer.kv_data[0].pop(key, None)
    kinds = {} if kind != "ARRAY" else {"sub_type": gguf.GGUFValueType.get_type(value[0])}
    writer.add_key_value(key, value, gguf.GGUFValueType[kind], **kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match=message):
        GgufFacts.read(path)


def test_a_text_of_a_gguf_that_is_no_utf8_is_refused(tmp_path):
    from hybridattn.models.gguf_header import check_header

    key = b"general.architecture"
    parts = [
        b"GGUF",
        (3).to_bytes(4, "little"),
        bytes(8),
        (1).to_bytes(8, "little"),
        len(key).to_bytes(8, "little"),
        key,
    ]
    (tmp_path / "m.gguf").write_bytes(
        b"".join([*parts, (8).to_bytes(4, "little"), (3).to_bytes(8, "little"), b"l\x80a"])
    )
    with pytest.raises(InputError, match=r"m.gguf is damaged: the text at byte 65 is no UTF-8 \(invalid start byte\)"):
        check_header(tmp_path / "m.gguf")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("no model")
    with pytest.raises(InputError, match=r"text\.gguf is not a readable GGUF file"):
        converted(path)


def test_L03_the_pre_tokenizer_is_the_one_of_the_tag(write_gguf):
    _, _, path = write_gguf(pre="smollm")
    folder = converted(path)
    assert json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"] == PRE_TOKENIZERS["smollm"]
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hello 12"), skip_special_tokens=False) == "hello 12"
    assert tokenizer.encode("hello")[:1] == [TOKENS.index("hel")]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.prefix_ids) == (1, 0, ())


def test_L03_pre_tokenizers_cut_text_as_their_models_do():
    import tokenizers

    def cut(tag: str, text: str) -> list[str]:
        content = json.dumps(
            {"version": "1.0", "added_tokens": [], "pre_tokenizer": PRE_TOKENIZERS[tag]}
            | {"model": {"type": "BPE", "vocab": {}, "merges": []}}
        )
        splitter = tokenizers.Tokenizer.from_str(content).pre_tokenizer
        return [text[a:b] for _, (a, b) in splitter.pre_tokenize_str(text)]

    text = "it's  2024\n\nOK"
    assert cut("gpt-2", text) == ["it", "'s", " ", " 2024", "\n", "\n", "OK"]
    assert cut("smollm", text) == ["it", "'s", "  ", "2", "0", "2", "4", "\n", "\n", "OK"]
    assert cut("llama-bpe", text) == ["it", "'s", " ", " ", "202", "4", "\n\n", "OK"]
    assert cut("qwen2", text) == ["it", "'s", " ", " ", "2", "0", "2", "4", "\n\n", "OK"]


def test_L04_rotary_divisors_of_a_file_become_llama3_scaling(write_gguf):
    expected = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    divisors = inverse_frequencies(RopeConfig(500000.0), 8) / inverse_frequencies(expected, 8)
    _, _, path = write_gguf(rope_freqs=divisors.numpy(), theta=500000.0)
    assert read_config(converted(path)).rope == expected


def test_L04_linear_scaling_of_a_file_is_kept(write_gguf):
    _, _, path = write_gguf(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert read_config(converted(path)).rope == RopeConfig(10000.0, "linear", 4.0)


def test_a_converted_file_is_found_again_and_a_changed_one_is_not(write_gguf, own_cache, capfd):
    _, _, path = write_gguf()
    first = converted(path)
    assert capfd.readouterr().err.count("converting tiny.gguf") == 1
    stamp = (first / "config.json").stat().st_mtime_ns
    assert converted(path) == first and (first / "config.json").stat().st_mtime_ns == stamp
    assert capfd.readouterr().err == ""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last weight
    path.write_bytes(data)
    assert converted(path) != first
    assert converted(path, "1.2") not in (first, converted(path))
    assert len(list(own_cache.iterdir())) == 3


def test_an_edit_inside_a_file_of_the_users_own_is_noticed(write_gguf, own_cache):
    _, _, path = write_gguf()
    first = resolve(str(path)).folder
    assert resolve(str(path)).folder == first
    os.utime(path, ns=(1, 1))
    assert resolve(str(path)).folder != first


@pytest.mark.parametrize("error", [OSError("No space left"), Exception("No space left on device (os error 28)")])
def test_a_conversion_that_fails_leaves_no_folder_behind(write_gguf, own_cache, monkeypatch, error):
    """A full disk is no fault of the file, in the words of whichever library met it."""
    from transformers import AutoTokenizer

    def fail(*_: Any, **__: Any) -> None:
        raise error

    _, _, path = write_gguf()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        converted(path)
    assert nothing_in(own_cache)


SCRIPT = """
import sys
from pathlib import Path
from hybridattn.models.load import load
model = load(sys.argv[1])
print(model.source.folder)
print("transformers" in sys.modules, "gguf" in sys.modules)
"""


def run_load(path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(path)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_start_from_the_cache_is_silent_and_needs_no_transformers(write_gguf):
    _, _, path = write_gguf()
    folder = resolve(str(path)).folder
    process = run_load(path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.split() == [str(folder), "False", "False"]


@pytest.mark.slow
def test_two_processes_may_convert_at_once(write_gguf, own_cache):
    _, _, path = write_gguf()
    both = [run_load(path) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    (folder,) = own_cache.iterdir()
    assert [o[0] for o in outputs] == [str(folder)] * 2


def test_whoever_publishes_second_takes_the_first_folder(write_gguf, own_cache, monkeypatch):
    """The other converter finishes while this one is at work."""
    _, _, path = write_gguf()
    real = convert._convert
    final: list[Path] = []

    def slow(source: Path, folder: Path, *read: Any) -> None:
        monkeypatch.setattr(convert, "_convert", real)
        final.append(converted(source))
        (final[0] / "mark").touch()
        real(source, folder, *read)

    monkeypatch.setattr(convert, "_convert", slow)
    assert converted(path) == final[0]
    assert (final[0] / "mark").exists()
    assert list(own_cache.iterdir()) == final


def test_a_cache_that_cannot_be_written_costs_time_and_one_sentence(write_gguf, own_cache, monkeypatch, capfd):
    _, _, path = write_gguf()
    own_cache.parent.write_text("no folder")
    folder = converted(path)
    assert folder.is_dir() and not folder.is_relative_to(own_cache.parent)
    assert Tokenizer(folder).bos_id == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "this run only" in line]
    assert lines == [f"{own_cache} cannot be made (Not a directory): the model is converted for this run only"]
    assert converted(path) == folder and "converting" not in capfd.readouterr().err
    convert._uncached.popitem()[1].cleanup()  # as at the end of the process
    assert not folder.exists()


def test_what_a_killed_conversion_left_goes(write_gguf, own_cache):
    _, _, path = write_gguf()
    converted(path)
    (own_cache / ".converting-gone").mkdir()
    (own_cache / ".converting-gone" / ".lock").touch()
    converted(path)
    assert len(list(own_cache.iterdir())) == 1
