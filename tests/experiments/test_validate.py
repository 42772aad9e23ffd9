from __future__ import annotations

import json

import pytest

from experiments.run import main
from hybridattn.calibration.bench import Bench
from hybridattn.calibration.measure import driver_costs, handover_costs
from hybridattn.calibration.samples import AXES, samples_of, thinned
from hybridattn.cost.profile import measured_profile, save_profile
from hybridattn.devices.fingerprint import fingerprint

POLICIES = ("gpu_only", "sync_offload", "adaptive")
SHRUNK = ["repeats=1", f"policy={','.join(POLICIES)}", "settings.gpu_rows=2", "settings.cpu_rows=2"]
SHRUNK += ["settings.context=64", "settings.warmup=1", "settings.steps=2"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The profile of this machine from as few points as its tables can be made of."""
    with Bench(most_rows=8) as bench:
        timed = []
        for rows, context in ((1, 64), (4, 64), (1, 128), (4, 128)):
            timed += bench.steps(rows, rows, context, 1)
        samples = samples_of(timed)
        for chunk in (32, 64):
            samples += samples_of(bench.prompts(chunk, 1))
        name, dtype, costs = bench.shape.name, bench.dtype, driver_costs(bench) | handover_costs(timed)
    path = tmp_path_factory.mktemp("profile") / "here.json"
    save_profile(measured_profile("here", fingerprint(), name, dtype, thinned(samples), AXES, {}, costs), path)
    return path


@pytest.mark.slow
def test_the_simulator_is_held_against_this_machine(tmp_path, profile):
    assert main(["+experiment=validate", f"results_root={tmp_path}", f"settings.profile={profile}", *SHRUNK]) == 0
    folder = tmp_path / "validate" / "latest"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [(r["policy"], r["decoding_cpu_rows"]) for r in rows] == list(zip(POLICIES, (0, 2, 2), strict=True))
    for row in rows:
        ratio = row["simulated_tokens_per_s"] / row["measured_tokens_per_s"]
        assert row["simulated_over_measured"] == pytest.approx(ratio) and 0.05 < ratio < 20  # not a claim: same units
        assert (row["kind"], row["device"], row["profile"]) == ("measured", "host", fingerprint())
    assert (folder / "validate.png").stat().st_size > 1000


def test_without_a_profile_it_says_what_to_do(tmp_path, capsys):
    where = ["+experiment=validate", f"results_root={tmp_path}", "settings.profile=/nowhere.json", *SHRUNK]
    assert main([*where, "policy=gpu_only"]) == 1
    assert "run `hybridattn calibrate` first" in capsys.readouterr().out
