from __future__ import annotations

import argparse
import json
import re

import pytest

from hybridattn.cli.plan import add_parser, run, textbook_check
from hybridattn.core.errors import InputError
from hybridattn.cost.catalog import BESIDE
from hybridattn.cost.profile import load_profile, shipped_names

SMALL = ["--gpu", "t4", "--model", "llama2-7b", "--context", "800", "--concurrency", "4"]


def plan(*argv):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *argv])
    return args.command(args)


def test_the_textbook_check_of_a_70b_model(capsys):
    assert plan("--check") == 0
    text = capsys.readouterr().out
    weights, per_token, kv, gib = re.search(
        r"about (\d+) GB of weights; ([\d,]+) B.*about (\d+) GB \((\d+) GiB\)", text
    ).groups()
    assert 139 <= int(weights) <= 142 and per_token == "327,680"
    assert 40 <= int(kv) <= 43 and int(gib) == 40
    assert text.strip() == textbook_check()


def test_a_plan_says_what_fits_what_limits_and_what_each_policy_does(capsys):
    assert plan(*SMALL) == 0
    text = capsys.readouterr().out
    for part in ("weights", "524,288 B", "requests", "bottleneck", "simulated from", "t4+xeon-8259cl-8c+pcie3-x16"):
        assert part in text
    assert re.search(r"^> \w+ .*\dx .* ms .* best; .*pays from \d at a time", text, re.M)


def test_a_plan_warns_where_offload_does_not_pay(capsys):
    plan("--gpu", "h200", "--concurrency", "8", "--context", "1000")
    assert "> gpu_only" in capsys.readouterr().out
    plan("--gpu", "a10g", "--cpu", "epyc-7r32-4c", "--cpu-bandwidth", "20", "--context", "20000", "--concurrency", "3")
    assert "offload will not pay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--gpu", "a10", "--concurrency", "64"],
            r"case 1, GPU memory limits the batch: [\d,]+ cold tokens, 1\.\d\dx GPU-",
        ),
        (["--gpu", "gh200", "--concurrency", "32"], r"case 2, everything fits: [\d,]+ cold tokens, 1\.\d\dx GPU-only"),
        (["--gpu", "a10", "--context", "131072", "--concurrency", "1"], r"case 3, .*, 1\.\d\dx the CPU tier alone"),
    ],
)
def test_a_plan_says_which_case_of_both_tiers_it_is(argv, says, capsys):
    plan(*argv)
    assert re.search(f"over both tiers    {says}", capsys.readouterr().out)


def test_a_plan_as_json(capsys):
    plan("--gpu", "A10", "--model", "Llama-3.1-8B", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "llama3.1-8b" and found["kv_bytes_per_token"] == 131_072
    assert found["gpu_requests"] + found["cpu_requests"] + found["waiting_requests"] == found["concurrency"]
    assert found["outcomes"]["gpu_only"]["gpu_tpot_ms"] > 0


def test_what_a_machine_has_may_be_said(capsys):
    args = ["--gpu-memory", "48", "--gpu-bandwidth", "1200", "--cores", "64", "--cpu-memory", "512"]
    plan("--gpu", "a10", "--gpus", "2", *args, "--concurrency", "8", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["gpu_kv_bytes"] == int(0.9 * 96e9) - found["weight_bytes"]
    assert found["cpu_kv_bytes"] == int(0.8 * 512e9)
    assert found["machine"] == (
        "2xa10 (memory 48 GB, bandwidth 1.2 TB/s)+"
        "epyc-7r32-16c (cores 64, peak_flops 5.734 Tflop/s) (memory 512 GB)+2xpcie4-x16"
    )


def test_a_search_prints_the_machine_and_why_no_cheaper_one(capsys, tmp_path):
    assert plan("--search", "llama3.1-8b 2000 x 20, tpot <= 1s") == 0
    text = capsys.readouterr().out
    assert "1x l4 beside" in text and "by W; cheaper ones:" in text and "with too little memory" in text
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(dict.fromkeys((*shipped_names("gpu"), *shipped_names("cpu")), 2) | {"H100": 1}))
    assert plan("--search", "llama3.1-8b 2000 x 20", "--prices", str(prices), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpu"], found["gpus"], found["cost"], found["in"]) == ("h100", 1, 3, "price")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "a11"], "profile 'a11' is unknown; shipped are a10, a100-80g, a10g, gh200, h100,"),
        (["--gpu", "a10", "--model", "gpt-5"], "model shape 'gpt-5' is unknown"),
        (["--context", "0"], "context and concurrency of at least 1"),
        (["--context", "1000000"], "a context of 1,000,000 tokens exceeds the 131,072 that llama3.1-8b fp16 has"),
        (["--gpu", "t4", "--cpu", "t4"], "describes a gpu"),
        (["--gpu", "gh200", "--model", "llama31-70b"], "141.1 GB of weights and gh200 96 GB of memory"),
        (["--gpus", "3"], "gpus must divide the 8 KV heads of llama3.1-8b, got 3"),
        (["--gpus", "0"], "gpus must divide the 8 KV heads of llama3.1-8b, got 0"),
        (["--gpu-memory", "-4"], "--gpu-memory must be positive, got -4"),
        (["--cpu-bandwidth", "nan"], "--cpu-bandwidth must be positive, got nan"),
        (["--cores", "0"], "cores must be at least 1, got 0"),
        (["--prices", "p.json"], "--prices rank the machines of --search"),
        (["--search", "llama3.1-8b 10 x 1", "--context", "5"], "takes no --context"),
        (["--search", ""], "--search reads 'MODEL CONTEXT x REQUESTS, tpot <= TIME ms', got ''"),
        (
            ["--search", "llama3.1-8b 10 x 1", "--prices", "none.json"],
            "none.json is no JSON object of names and numbers",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(argv, message):
    with pytest.raises(InputError) as error:
        plan(*argv)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_gpu_has_something_beside_it():
    assert set(BESIDE) == set(shipped_names("gpu"))
    for cpu, link in BESIDE.values():
        assert (load_profile(cpu).role, load_profile(link).role) == ("cpu", "link")
    assert callable(run)
