from __future__ import annotations

import argparse
import json
import re

import pytest

from hybridattn.cli.plan import BESIDE, add_parser, run, textbook_check
from hybridattn.core.errors import InputError
from hybridattn.cost.profile import load_profile, shipped_names


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


def test_a_plan_says_what_fits_what_limits_and_who_wins(capsys):
    assert plan("--gpu", "t4", "--model", "llama2-7b", "--context", "400", "--concurrency", "64") == 0
    text = capsys.readouterr().out
    for part in ("weights", "524,288 B", "requests", "bottleneck", "predicted winner", "computed from"):
        assert part in text
    assert "t4+xeon-8259cl-8c+pcie3-x16" in text
    assert re.search(r"async_overlap .*x \(\d\.\d\d to \d\.\d\d\) of GPU-only", text)  # with ranges


def test_a_plan_warns_where_offload_does_not_pay(capsys):
    plan("--gpu", "h200", "--concurrency", "8", "--context", "1000")
    assert "predicted winner   gpu_only" in capsys.readouterr().out
    plan("--gpu", "a100-80g", "--cpu", "epyc-7r32-4c", "--context", "16000", "--concurrency", "64")
    assert "warning: offload will not pay" in capsys.readouterr().out


def test_a_plan_as_json(capsys):
    plan("--gpu", "a10", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "llama3.1-8b" and found["kv_bytes_per_token"] == 131_072
    assert found["gpu_requests"] + found["cpu_requests"] + found["waiting_requests"] == found["concurrency"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "a11"], "nothing is known to stand beside GPU 'a11'"),
        (["--gpu", "a10", "--model", "gpt-5"], "model shape 'gpt-5' is unknown"),
        (["--context", "0"], "context and concurrency of at least 1"),
        (["--context", "1000000"], "exceeds max_model_len"),
        (["--gpu", "t4", "--cpu", "t4"], "describes a gpu"),
    ],
)
def test_bad_input_is_one_clear_sentence(argv, message):
    with pytest.raises(InputError, match=message):
        plan(*argv)


def test_every_gpu_has_something_beside_it():
    assert set(BESIDE) == set(shipped_names("gpu"))
    for cpu, link in BESIDE.values():
        assert (load_profile(cpu).role, load_profile(link).role) == ("cpu", "link")
    assert callable(run)
