"""Damaged files and absurd arguments: the project's own error in one sentence; no crash, no hang, no half file."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import cpu_kernels as ck
from experiments.run import main as run_experiments
from hybridattn import LLM, SamplingParams
from hybridattn.cli import generate
from hybridattn.core.errors import InputError
from hybridattn.models.checkpoint import Checkpoint
from hybridattn.models.convert import converted
from hybridattn.models.gguf_header import check_header
from hybridattn.models.load import load
from hybridattn.workload import traces

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))  # more of them: see docs/reliability.md
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def damaged(draw, good: bytes):
    """A file with a few bytes flipped, cut off, inserted, or overwritten by a huge number."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "number"]))
        if how == "flip" and data:
            data[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del data[at:]
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            data[at : at + 8] = draw(st.sampled_from([0, 1, 10**6, 2**31, 2**62, 2**64 - 1])).to_bytes(8, "little")
    return bytes(data)


@pytest.fixture(autouse=True)
def bounded():
    """Nothing here may hang: the alarm ends a test that does."""
    before = signal.signal(signal.SIGALRM, lambda *args: pytest.fail("it hangs"))
    signal.alarm(40 + EXAMPLES)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def own_error_or_fine(read) -> bool:
    """True when ``read`` accepted its input."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. rows out of order, which are put in order
            read()
    except InputError as error:
        assert str(error) and "\n" not in str(error).strip(), str(error)
        return False
    return True


# -- GGUF ------------------------------------------------------------------------------------------------------------


def good_gguf(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_merges(["a b"])
    writer.add_tensor("x", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@given(data=st.data())
@FUZZ
def test_a_damaged_gguf_is_refused_and_leaves_nothing(tmp_path, monkeypatch, data):
    """``converted`` with the conversion itself left out: it takes a second and hears of the file only after this."""
    monkeypatch.setenv("HYBRIDATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _stop)
    good = good_gguf(tmp_path / "good.gguf")
    path = tmp_path / "bad.gguf"
    path.write_bytes(data.draw(damaged(good)))
    with pytest.raises(InputError) as caught:
        converted(path)
    assert "bad.gguf" in str(caught.value)
    models = tmp_path / "cache" / "models"
    assert not models.exists() or not any(models.iterdir())


def _stop(*args, **kwargs):
    raise RuntimeError("the header was accepted")


@pytest.mark.parametrize(
    ("offset", "message"),
    [(8, "tensors at byte 8, but"), (16, "entries at byte 16, but"), (24, "bytes at byte 32 end past")],
)
def test_a_count_beyond_the_end_of_the_file_is_refused_at_once(tmp_path, offset, message):
    data = bytearray(good_gguf(tmp_path / "good.gguf"))
    data[offset : offset + 8] = (2**40).to_bytes(8, "little")
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(InputError, match=message):
        check_header(tmp_path / "bad.gguf")


# -- checkpoints -----------------------------------------------------------------------------------------------------

FOLDER_CONFIG = {
    "model_type": "llama", "num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2,
    "intermediate_size": 64, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "eos_token_id": 2, "rope_scaling": None, "rope_theta": 1e4, "sliding_window": None,
    "head_dim": None, "hidden_act": "silu", "quantization_config": None, "layer_types": None, "bos_token_id": 1,
}  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner),
    max_leaves=4,
)


@given(data=st.data())
@FUZZ
def test_damaged_safetensors_are_refused_or_whole(tmp_path, data):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4, 4), "b": torch.ones(3)}, path)
    path.write_bytes(data.draw(damaged(path.read_bytes())))

    def read():
        with Checkpoint(tmp_path) as checkpoint:
            for name, shape in (("a", (4, 4)), ("b", (3,))):
                assert tuple(checkpoint.read(name, shape).shape) == shape

    own_error_or_fine(read)


@given(data=st.data())
@FUZZ
def test_a_damaged_index_is_refused(tmp_path, data):
    save_file({"a": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    good = json.dumps({"weight_map": {"a": "model.safetensors"}}).encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(data.draw(damaged(good)))
    own_error_or_fine(lambda: Checkpoint(tmp_path))


@given(changes=st.dictionaries(st.sampled_from(list(FOLDER_CONFIG)), ANYTHING, min_size=1, max_size=3))
@FUZZ
def test_a_config_with_values_of_any_kind_is_refused_before_weights_are_read(tmp_path, monkeypatch, changes):
    monkeypatch.setattr("hybridattn.models.load.Tokenizer", lambda folder: type("T", (), {"eos_id": 2}))
    monkeypatch.setattr("hybridattn.models.load.load_weights", lambda *args: None)
    (tmp_path / "config.json").write_text(json.dumps({**FOLDER_CONFIG, **changes}))
    own_error_or_fine(lambda: load(str(tmp_path)))


@pytest.mark.parametrize("name", ["", "/", "~nobody-of-that-name/x", "a\x00b.gguf", "dummy:", "x" * 5000, "\ud800"])
def test_a_name_that_is_no_model_is_refused(name):
    with pytest.raises((InputError, OSError)):
        load(name)


# -- traces and prompts ----------------------------------------------------------------------------------------------

TRACES = {
    "azure": (traces.read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,5\n"),
    "burstgpt": (
        traces.read_burstgpt,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x\n",
    ),
    "mooncake": (traces.read_mooncake, '{"timestamp": 27482, "input_length": 6955, "output_length": 52}\n'),
    "sharegpt": (
        lambda path: traces.read_sharegpt(path, len),
        '[{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}]',
    ),
}


@pytest.mark.parametrize("name", TRACES)
@given(data=st.data())
@FUZZ
def test_a_damaged_trace_is_refused_with_its_line_or_read(tmp_path, name, data):
    read, good = TRACES[name]
    text = data.draw(damaged(good.encode() * 2)).decode("latin-1")  # any text, but text
    (tmp_path / "t").write_text(text, encoding="utf-8")
    own_error_or_fine(lambda: read(tmp_path / "t"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000], ids=["bytes", "depth"])
def test_a_trace_that_is_no_text_or_too_deep_is_refused(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(InputError):
        traces.read_mooncake(tmp_path / "t")


@given(data=st.data())
@FUZZ
def test_a_damaged_file_of_prompts_is_refused_with_its_line_or_read(tmp_path, data):
    good = b'{"prompt": "abc"}\n\n{"prompt": "d\\u00e9"}\n'
    (tmp_path / "p").write_bytes(data.draw(damaged(good)))
    own_error_or_fine(lambda: generate.read_prompts(tmp_path / "p"))


def test_a_file_of_prompts_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "p").write_bytes(b'{"prompt": "x"}\n' + b"[" * 100_000)
    with pytest.raises(InputError, match="line 2: not JSON"):
        generate.read_prompts(tmp_path / "p")


def test_half_a_surrogate_pair_is_refused_by_name(real_model):
    with pytest.raises(InputError, match=r"half of a surrogate pair at character 2: '\\ud800'"):
        real_model.tokenizer.encode("ab\ud800")


# -- arguments -------------------------------------------------------------------------------------------------------


SEQUENCES = ("stop", "stop_token_ids")  # fields that hold several values
FIELDS = {
    name: st.lists(ANYTHING, max_size=2) | st.text(max_size=2) if name in SEQUENCES else ANYTHING
    for name in SamplingParams.__dataclass_fields__
}


@given(kwargs=st.fixed_dictionaries({}, optional=FIELDS))
@settings(max_examples=EXAMPLES + 40, deadline=None)
def test_sampling_params_of_any_kind_are_taken_or_refused(kwargs):
    own_error_or_fine(lambda: SamplingParams(**kwargs))


@pytest.mark.parametrize("name", SEQUENCES)
def test_stops_that_are_no_sequence_are_refused(name):
    with pytest.raises(InputError):
        SamplingParams(**{name: True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_kv_blocks": 2.5}, "gpu_kv_blocks must be an integer, got 2.5"),
        ({"cpu_kv_blocks": "8"}, "cpu_kv_blocks must be an integer, got '8'"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer, got True"),
        ({"max_model_len": 2.5}, "max_model_len must be an integer, got 2.5"),
        ({"op_timeout_s": float("nan")}, "op_timeout_s must be a positive number of seconds, got nan"),
        ({"op_timeout_s": -1}, "op_timeout_s must be a positive number of seconds, got -1"),
        ({"op_timeout_s": "1"}, "op_timeout_s must be a positive number of seconds, got '1'"),
        ({"policy_options": [1]}, r"policy_options must be a dict of names and values, got \[1\]"),
        ({"policy_options": {1: 2}}, r"policy_options must be a dict of names and values, got \{1: 2\}"),
        ({"device_options": 5}, "device_options must be a dict of names and values, got 5"),
        ({"cpu_fraction": "0.5"}, "cpu_fraction must lie in 0..1, got '0.5'"),
        ({"kv_dtype": "foo"}, "dtype 'foo' is unknown"),
        ({"policy": 3}, "policy must be a name or a Policy, got 3"),
        ({"policy_options": {"x": 1}}, "has no option 'x'"),
        ({"cpu_fraction": float("nan")}, "cpu_fraction must lie in 0..1, got nan"),
        ({"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9}, "too little memory"),
    ],
)
def test_options_of_an_LLM_are_checked_by_type_and_range(open_tiny, options, message):
    with pytest.raises(InputError, match=message):
        open_tiny(**options)


def test_seconds_and_shares_may_be_of_any_kind_and_size(open_tiny):
    options = {"cpu_fraction": np.float32(0.5), "op_timeout_s": np.int64(9), "max_num_seqs": np.int64(4)}
    with open_tiny(**options) as llm:
        assert (llm.config.op_timeout_ns, llm.policy.cpu_fraction) == (9 * 10**9, 0.5)
        assert type(llm.config.max_num_seqs) is int
    with open_tiny(op_timeout_s=1e300) as llm:
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_head_size_that_no_kernel_has_is_refused_before_any_page_is_made(tiny):
    shape = dataclasses.replace(tiny.config.shape, head_dim=40)
    model = dataclasses.replace(tiny, config=dataclasses.replace(tiny.config, shape=shape))
    with pytest.raises(InputError, match="head_dim 40 is not supported: multiples of 16 up to 512 are"):
        LLM(model)


@pytest.mark.parametrize("model", [None, 3, object()])
def test_a_model_of_another_kind_is_refused(model):
    with pytest.raises(InputError, match="model must be a name, a path or what hybridattn.models.load.load returned"):
        LLM(model)


@given(prompts=st.one_of(ANYTHING, st.lists(st.lists(st.integers(-5, 600) | st.floats() | st.none()), max_size=3)))
@settings(max_examples=EXAMPLES + 20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prompts_of_any_kind_are_queued_whole_or_refused_whole(shared_tiny, prompts):
    llm = shared_tiny
    calls = []  # one that nobody holds is aborted
    if own_error_or_fine(lambda: calls.append(llm.start(prompts))):
        assert llm.engine.unfinished == len(prompts)
        for request in [*llm.engine.scheduler.queues.waiting]:
            llm.engine.abort(request.request_id)
    assert llm.engine.unfinished == 0


@pytest.mark.parametrize("params", [3, [None], ["x"], {}, [SamplingParams()] * 3])
def test_params_of_another_kind_or_number_are_refused(shared_tiny, params):
    with pytest.raises(InputError, match="params must"):
        shared_tiny.start([[1]], params)


@pytest.fixture(scope="module")
def shared_tiny(tiny):
    with LLM(tiny, gpu_kv_blocks=64, cpu_kv_blocks=8, page_size=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def pages():
    return ck.KVPages(4, 2, 64, 16, "fp32", huge_pages=False)


EXTRA = (
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "alibi_slopes",
    "sinks",
    "slot_mapping",
    "backend",
    "split_tokens",
    "isa",
)
ODD = st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**40), 1.5, float("nan"), float("inf"), None, "x", [], True])


@given(
    table=st.lists(st.lists(st.integers(-3, 6), min_size=1, max_size=3), min_size=1, max_size=3) | ODD,
    lens=st.lists(st.integers(-2, 70), min_size=1, max_size=3) | ODD,
    heads=st.integers(-2, 9) | ODD.filter(lambda v: v not in (2**31, 2**63)),  # see docs/reliability.md, Open
    extra=st.dictionaries(st.sampled_from(EXTRA), ODD, max_size=2),
)
@settings(max_examples=EXAMPLES + 90, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_kernel_arguments_of_any_kind_run_or_are_refused(pages, table, lens, heads, extra):
    """The kernel package knows no error of ours: ValueError and TypeError, before any key is read."""
    try:
        plan = ck.plan_decode(pages, table, lens, heads, **extra)
        n = len(lens)
        out, q = np.full((n, heads, 64), np.nan, np.float32), np.zeros((n, heads, 64), np.float32)
        plan.run(q, out)
        assert np.isfinite(out).all()
    except (ValueError, TypeError) as error:
        assert str(error) and "\n" not in str(error)


# -- overrides -------------------------------------------------------------------------------------------------------

GROUPS = ["+experiment", "policy", "workload", "hardware"]
KEYS = ["repeats", "settings.x", "+settings.y", "fail_fast", "nonsense", "sweep.policy"]
NAMES = ["ratio", "gpu_only", "gpu_only,async_overlap", "''", "a b", "'", "[", "{", "\x00", "../x"]
NUMBERS = ["1", "-1", "null", "1e999", "1.5", "true", "[1,2]"]


def test_overrides_of_any_kind_are_refused_in_one_sentence(tmp_path, capsys):
    """Without an experiment nothing can run, so every one of them ends with a sentence."""
    rng = random.Random(0)
    for _ in range(25):
        group = rng.random() < 0.5
        line = f"{rng.choice(GROUPS if group else KEYS)}={rng.choice(NAMES if group else NAMES + NUMBERS)}"
        assert run_experiments(["-m", line, "name=", f"results_root={tmp_path}"]) == 2, line
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, line


@pytest.mark.parametrize(
    "line", ["policy=true", "~policy=[1,2]", "launcher=[1,2]", "repeats=${x}", "point=glob(*)", "hydra=3"]
)
def test_overrides_of_the_wrong_kind_are_refused(line, tmp_path, capsys):
    assert run_experiments(["-m", "name=x", line, f"results_root={tmp_path}"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1 and not list(tmp_path.iterdir())
