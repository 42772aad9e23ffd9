"""The control path as a server in front of an engine: by hand, through the engine, and measured."""

from __future__ import annotations

import json

import pytest

from experiments.control import ControlPath, Cores
from experiments.points.control import counted_from
from experiments.run import main
from hybridattn.core.errors import InputError
from hybridattn.core.records import RequestRecord
from hybridattn.workload.item import WorkItem, Workload

PATH = ControlPath(request_ns=10, token_ns=2, schedule_ns=0, op_ns=0, poll_ns=0)


@pytest.mark.parametrize(
    ("cores", "speed", "attention"),
    [
        (Cores(4, 2, 2), 1, 2 / 4),  # everybody has a core
        (Cores(4, 4, 2), 4 / 6, 4 / 6),  # six threads on four cores
        (Cores(4, 4, 2, 6), 4 / 12, 4 / 12),
        (Cores(64, 64, 2, 32), 64 / 98, 64 / 98),
        (Cores(2, 0, 1, 4), 2 / 5, 0),
    ],
)
def test_threads_that_want_to_run_share_the_cores_evenly(cores, speed, attention):
    assert cores.speed == pytest.approx(speed) and cores.attention_share == pytest.approx(attention)


@pytest.mark.parametrize(
    ("layout", "attends", "want"),
    [
        ("own", True, Cores(8, 6, 2)),
        ("shared", True, Cores(8, 8, 2)),
        ("busy", True, Cores(8, 8, 2, 5)),
        ("busy", False, Cores(8, 0, 2, 5)),
    ],
)
def test_layouts(layout, attends, want):
    assert Cores.laid_out(layout, 8, 2, attends, 5) == want
    assert Cores.laid_out("own", 2, 2, True, 0).workers == 1  # attention never stops


def test_prompts_are_tokenised_first_come_first_served_by_hand():
    """Half a core: 5 tokens take (10 + 5 x 2) / 0.5 = 40 ns, 20 take 100, 1 takes 24.

    |0 first 40|40 second (came at 10) 140|      |1000 third 1024|
    """
    assert PATH.ready_ns([0, 10, 1000], [5, 20, 1], 0.5) == [40, 140, 1024]
    assert PATH.ready_ns([0, 10, 1000], [5, 20, 1], 1.0) == [20, 70, 1012]


def test_two_tokenizers_let_a_short_prompt_overtake_a_long_one():
    """|0 100 tokens 210|
    |5 one token 17||17 one more, which came at 6, 29|
    """
    two = ControlPath(10, 2, 0, 0, 0, tokenizers=2)
    assert two.ready_ns([0, 5, 6], [100, 1, 1], 1.0) == [210, 17, 29]


def test_requests_count_from_their_own_arrival_also_when_they_overtake():
    items = (WorkItem(0, 100, 1), WorkItem(5, 1, 1))
    records = [RequestRecord(str(i), at, at + 50, 1, (at + 50,), "length") for i, at in enumerate((17, 210))]
    found = counted_from(Workload("w", items), [210, 17], records)
    assert [(r.arrival_ns, r.token_ns) for r in found] == [(5, (67,)), (0, (260,))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Cores(0, 1, 1), "at least one core"),
        (lambda: Cores.laid_out("none", 4, 2, True, 0), "sharing 'none' is none of own, shared, busy"),
        (lambda: ControlPath(-1, 0, 0, 0, 0), "request_ns must not be negative, got -1"),
        (lambda: ControlPath(0, 0, 0, 0, 0, tokenizers=0), "tokenizers must be at least 1, got 0"),
        (lambda: PATH.ready_ns([0], [1], 0.0), r"must lie in \(0, 1\], got 0.0"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def rows(tmp_path, *overrides):
    where = ["+experiment=control_path", f"results_root={tmp_path}", "also=[]", "policy=gpu_only", "hardware.gpu=a10g"]
    assert main([*where, *overrides]) == 0
    found = (tmp_path / "control_path" / "latest" / "rows.jsonl").read_text().splitlines()
    return {(r["cpu_cores"], r["sharing"]): r for r in map(json.loads, found)}


ONE = ["workload.options.count=1", "workload.options.prompts.mean=1000", "settings.load=null", "settings.drop_first=0"]
ONE += ["settings.op_us=0", "settings.poll_us=0"]


def test_a_single_request_waits_for_its_tokens_and_for_the_schedule_of_each_step(tmp_path):
    """gpu_only runs no worker: 2 control threads and 32 busy processes on 4 cores run at 4/34 of their speed."""
    free = ["settings.request_us=0", "settings.token_us=0", "settings.schedule_us=0", "settings.sharing=own"]
    one = [*ONE, "workload.options.outputs.mean=20"]
    none = rows(tmp_path, "hardware=a10g_4c", *one, *free)[4, "own"]
    found = rows(tmp_path, "hardware=a10g_4c", *one, "settings.sharing=own,busy")
    tokens = round((found[4, "own"]["tokenise_mean_ns"] - 50_000) / 1800)  # 50 us a request, 1.8 us a token
    assert 900 <= tokens <= 1100
    for sharing, slower in (("own", 1.0), ("busy", 34 / 4)):
        row = found[4, sharing]
        assert row["control_speed"] == pytest.approx(1 / slower)
        assert row["tokenise_mean_ns"] == pytest.approx((50_000 + 1800 * tokens) * slower, abs=1)
        assert row["schedule_step_ns"] == pytest.approx(160_000 * slower, abs=1)
        # the prompt fits one step; the driver schedules once before it
        later = row["ttft_mean_ns"] - none["ttft_mean_ns"]
        assert later == pytest.approx(row["tokenise_mean_ns"] + row["schedule_step_ns"], abs=100)
        assert row["tpot_mean_ns"] - none["tpot_mean_ns"] == pytest.approx(row["schedule_step_ns"], abs=100)


def test_starved_it_costs_time_to_first_token_and_more_cores_give_it_back(tmp_path):
    few = ["hardware=a10g_4c,a10g_64c", "settings.limit=30", "settings.schedule_us=2000", "settings.sharing=own,busy"]
    found = rows(tmp_path, *few)
    ttft = {key: r["ttft_mean_ns"] for key, r in found.items()}
    assert ttft[4, "busy"] > 1.1 * ttft[4, "own"] and ttft[64, "busy"] == pytest.approx(ttft[64, "own"])
    assert "Assumed" in found[64, "own"]["cores_are"] and "g5.2xlarge" in found[4, "own"]["cores_are"]


def test_attention_workers_lose_what_the_control_path_takes(tmp_path):
    where = ["+experiment=control_path", f"results_root={tmp_path}", "also=[]", "policy=async_overlap"]
    shared = ["hardware=a10g_4c", "hardware.gpu=a10g", "settings.sharing=own,shared", "settings.limit=10"]
    assert main([*where, *shared]) == 0
    found = (tmp_path / "control_path" / "latest" / "rows.jsonl").read_text().splitlines()
    own, all_cores = map(json.loads, found)
    assert (own["attention_workers"], own["control_speed"], own["attention_share"]) == (2, 1.0, 0.5)
    assert (all_cores["attention_workers"], all_cores["control_speed"]) == (4, pytest.approx(4 / 6))
    assert "cpu x2 " in f"{own['profile']} " and "cpu x1.5 " in f"{all_cores['profile']} "


def test_closed_loops_and_other_devices_are_refused(tmp_path, capsys):
    where = ["+experiment=control_path", f"results_root={tmp_path}", "also=[]", "policy=gpu_only", "hardware=a10g_4c"]
    assert main([*where, "hardware.gpu=a10g", "settings.sharing=own", "workload=closed_loop"]) in (1, 2)
    assert main([*where, "hardware.gpu=a10g", "settings.sharing=none"]) == 2
    assert "settings.sharing must be one of own, shared, busy, got 'none'" in capsys.readouterr().err


def test_the_measured_path_is_beside_its_model(tmp_path, real_model, capsys):
    small = ["repeats=1", "settings.neighbours=0,1", "settings.prompts=6", "settings.words=200", "settings.steps=3"]
    assert main(["+experiment=control_path_host", f"results_root={tmp_path}", *small]) == 0
    found = (tmp_path / "control_path_host" / "latest" / "rows.jsonl").read_text().splitlines()
    for row, busy in zip(map(json.loads, found), (0, 1), strict=True):
        assert row["kind"] == "measured" and 0 < row["measured_share"] <= 1 and row["cpu_time_stretch"] > 0
        assert row["control_speed"] == min(1, row["cores"] / (1 + busy))
        assert row["modelled_ready_mean_ns"] >= row["service_alone_ns"] * 0.999 / row["control_speed"]
        assert row["schedule_step_ns"] > 0 and row["driver_op_ns"] > 0
    out = capsys.readouterr().out
    assert "1 busy processes on" in out and "us a token on a core of its own" in out
