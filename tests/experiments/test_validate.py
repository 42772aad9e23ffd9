from __future__ import annotations

import json
from dataclasses import replace

import pytest

from experiments.run import main
from hybridattn.calibration import measure
from hybridattn.calibration.bench import Bench
from hybridattn.cost.profile import load_profile, save_profile
from hybridattn.devices.fingerprint import fingerprint

pytestmark = pytest.mark.filterwarnings("ignore::hybridattn.cost.table.ExtrapolationWarning")  # few points
POLICIES = ("gpu_only", "sync_offload", "auto", "adaptive")
SHRUNK = ["repeats=1", f"policy={','.join(POLICIES)}", "settings.gpu_rows=2", "settings.cpu_rows=2"]
SHRUNK += ["settings.context=64", "settings.warmup=1", "settings.steps=2"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The profile of this machine, calibrated at as few points as its tables can be made of."""
    few = {
        "CONTEXTS": (64, 128), "ROWS": (1, 4), "LINEAR_ROWS": (6,), "MIXED_ROWS": ((2, 2),), "CHUNKS": (32, 64),
        "STEPS": 1, "ROUNDS": 1,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("profile") / "here.json"
    with pytest.MonkeyPatch.context() as patch, Bench(most_rows=8) as bench:
        for name, value in few.items():
            patch.setattr(measure, name, value)
        save_profile(measure.calibrate(bench, lambda what: None), path)
    return path


@pytest.mark.slow
def test_the_simulator_is_held_against_this_machine(tmp_path, profile):
    assert main(["+experiment=validate", f"results_root={tmp_path}", f"settings.profile={profile}", *SHRUNK]) == 0
    folder = tmp_path / "validate" / "latest"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [(r["policy"], r["decoding_cpu_rows"]) for r in rows] == list(zip(POLICIES, (0, 2, 2, 2), strict=True))
    for row in rows:
        ratio = row["simulated_tokens_per_s"] / row["measured_tokens_per_s"]
        assert row["simulated_over_measured"] == pytest.approx(ratio) and 0.05 < ratio < 20  # not a claim: same units
        assert (row["kind"], row["device"], row["profile"]) == ("measured", "host", fingerprint())
    assert (folder / "validate.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_profile_of_an_earlier_version_says_what_to_do(tmp_path, profile, capsys):
    old = load_profile(profile)
    quantities = {n: q for n, q in old.quantities.items() if n != "micro_batch_op"}
    save_profile(replace(old, quantities=quantities), tmp_path / "old.json")
    where = ["+experiment=validate", f"results_root={tmp_path}", f"settings.profile={tmp_path}/old.json", *SHRUNK]
    assert main([*where, "policy=gpu_only"]) == 1
    assert "it was made by an earlier version, so run `hybridattn calibrate" in capsys.readouterr().out


def test_without_a_profile_it_says_what_to_do(tmp_path, capsys):
    where = ["+experiment=validate", f"results_root={tmp_path}", "settings.profile=/nowhere.json", *SHRUNK]
    assert main([*where, "policy=gpu_only"]) == 1
    assert "run `hybridattn calibrate` first" in capsys.readouterr().out
