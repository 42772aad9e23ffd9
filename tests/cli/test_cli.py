"""The command line as a user sees it: one sentence and exit code 2 for bad input; text, JSON and traces otherwise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from hybridattn import cli, doctor
from hybridattn.cli import generate


def call(capsys, *argv):
    code = cli.main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([""], "prompt 0 is empty"),
        ([], "no prompt was given"),
        (["x", "--model", "nonsense"], "model 'nonsense' is unknown"),
        (["x", "--policy", "nonsense"], "policy 'nonsense' is unknown"),
        (["x", "--device", "nonsense"], "device 'nonsense' is unknown"),
        (["x", "--device", "cuda"], "device 'cuda' cannot be used"),
        (["x", "--temperature", "-1"], "temperature must be between 0 and inf, got -1.0"),
        (["x", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["x", "--dtype", "int3"], "dtype must be fp32 or bf16 on device 'host', got 'int3'"),
        (["x", "--cpu-fraction", "2"], "cpu_fraction must lie in 0..1, got 2.0"),
        (["x", "--page-size", "7"], "page_size must be one of 16, 32, 64, 128, got 7"),
        (["--prompts-file", "no/such/file"], "--prompts-file no/such/file cannot be read"),
        (["x", "--trace", "no/such/folder/t.json"], "--trace: the folder no/such/folder does not exist"),
        (["word " * 400, "--max-model-len", "100"], "leaves no room for an output token within max_model_len 100"),
        (
            ["x", "--gpu-kv-blocks", "1", "--cpu-kv-blocks", "1", "--page-size", "32"],
            "needs 2 blocks of 32 tokens .*gpu tier has 1 and the cpu",
        ),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(capsys, real_model, argv, message):
    code, out, err = call(capsys, "generate", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("hybridattn: ") and err.count("\n") == 1
    assert re.search(message, err), err


def test_separators_inside_a_prompt_end_no_line(tmp_path):
    marks = ["\u2028", "\u2029", "\u0085"]
    path = tmp_path / "p.jsonl"
    lines = [json.dumps({"prompt": f"a{mark}b"}, ensure_ascii=False) for mark in marks]
    path.write_bytes("\r\n".join(lines).encode())
    assert generate.read_prompts(path) == [f"a{mark}b" for mark in marks]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"text": "x"}', 'line 2: expected an object with a string "prompt"'),
        ("[1]", "line 2: expected"),
    ],
)
def test_a_prompts_file_names_the_line_that_cannot_be_used(capsys, tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    code, _, err = call(capsys, "generate", "--prompts-file", str(path))
    assert code == 2 and message in err


def test_json_has_one_object_per_prompt_in_order(capsys, tmp_path, prompts):
    path = tmp_path / "p.jsonl"
    names = ["capital", "count"]
    path.write_text("\n".join(json.dumps({"prompt": prompts[n]["text"]}, ensure_ascii=False) for n in names) + "\n\n")
    trace = tmp_path / "t.json"
    code, out, _ = call(
        capsys, "generate", prompts["chinese"]["text"], "--prompts-file", str(path), "--json", "--max-tokens", "16",
        "--cpu-fraction", "0.5", "--trace", str(trace),
    )  # fmt: skip
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [r["token_ids"] for r in rows] == [prompts[n]["token_ids"] for n in ("chinese", *names)]
    assert [r["tier"] for r in rows] == ["gpu", "cpu", "gpu"]
    for row in rows:
        assert set(row) == {
            "text", "token_ids", "finish_reason", "error", "tier", "policy", "steps_by_layout", "device", "metrics",
        }  # fmt: skip
        assert (row["policy"], row["device"], row["finish_reason"]) == ("async_overlap", "host", "length")
        assert row["metrics"]["output_tokens"] == 16 and row["metrics"]["ttft_s"] > 0
    lanes = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "thread_name"}
    assert lanes == {"gpu.compute", "cpu.attention", "gpu.d2h", "gpu.h2d"}


def test_several_prompts_stream_in_order(capsys):
    code, out, _ = call(capsys, "generate", "1, 2, 3,", "The capital of France is", "--max-tokens", "4")
    assert code == 0
    assert out.startswith(" 4, ") and "\n Paris." in out


def test_the_command_of_the_readme_in_a_process_of_its_own():
    argv = [sys.executable, "-m", "hybridattn.cli", "generate", "The capital of France is", "--max-tokens", "8"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris.")


def test_the_command_line_loads_torch_only_when_a_command_needs_it():
    code = "import sys, hybridattn.cli; hybridattn.cli.main(['plan', '--check']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_traceback():
    argv = [sys.executable, "-m", "hybridattn.cli", "doctor"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr


def test_doctor_says_what_would_be_used(capsys):
    code, out, _ = call(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["isa_level"] in found["isa_available"] and found["isa_reason"]
    assert set(found["threads_per_role"]) == {"driver", "gpu.compute", "gpu.d2h", "gpu.h2d", "cpu.attention"}
    assert found["devices"]["host"] == "yes" and found["devices"]["cuda"].startswith("no: ")
    assert found["attention_backends"]["native"] == "yes" and "torch 2.8" in found["attention_backends"]["ipex"]
    assert found["memory_total_bytes"] > found["memory_available_bytes"] > 0
    assert found["versions"]["torch"]
    text = doctor.as_text(found)
    assert "isa level" in text and found["cpu_model"] in text
