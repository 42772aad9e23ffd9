"""What policies_host says: shares of runs that followed one another, and the decisions where a goal is missed."""

from __future__ import annotations

from experiments.points.policies_host import verdict

WHY = "0.10 s: gpu_only for 2 + 2 rows of 64 tokens, by a closed form | 1.20 s: sync_offload for 2 + 2 rows, by memory"


def row(policy, repeat, tokens_per_s, soon=10.0, case="text"):
    chosen = f"<{policy}: ...>" if policy in ("adaptive", "auto") else ""
    return {
        "case": case, "policy": policy, "repeat": repeat, "tokens_per_s": tokens_per_s, "first_2s_tokens_per_s": soon,
        "chosen": chosen, "decisions": WHY if chosen else "",
    }  # fmt: skip


def test_a_machine_that_drifts_does_not_change_the_shares():
    speeds = (1.0, 0.5, 2.0)  # of the machine, repeat by repeat
    rates = {"gpu_only": 20.0, "sync_offload": 40.0, "adaptive": 42.0, "auto": 30.0}
    lines = verdict([row(p, i, rate * speed) for i, speed in enumerate(speeds) for p, rate in rates.items()])
    assert lines[0] == "text: best fixed sync_offload 40.0 tokens/s, 3 runs each"
    assert any(line.startswith("  adaptive") and "1.05 (1.05 to 1.05) of the best fixed" in line for line in lines)
    assert not any("misses" in line for line in lines)
    assert "adaptive: at least 1.05 of the best fixed policy (goal: 0.97)" in lines[-2] and "1 of 1" in lines[-2]
    assert lines[-1] == "auto: at least 1.50 of gpu_only (goal: 0.98), lowest in text"


def test_where_a_goal_is_missed_the_decisions_say_why():
    rates = {"gpu_only": 20.0, "sync_offload": 40.0, "adaptive": 38.0, "auto": 19.0}
    lines = verdict([row(p, 0, rate) for p, rate in rates.items()])
    at = lines.index("  adaptive misses 0.97 of sync_offload; its decisions in the last run:")
    assert lines[at + 1 : at + 3] == [f"    {d}" for d in WHY.split(" | ")]
    assert "  auto misses 0.98 of gpu_only; its decisions in the last run:" in lines
