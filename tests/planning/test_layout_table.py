"""Answers about layouts that outlive a run: kept by coarse loads, read by later runs, never another's."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from made_profile import made_profile

from hybridattn.core.config import EngineConfig
from hybridattn.core.request import DeclaredTokens
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.machine import driver_of
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.planning import layout_table
from hybridattn.planning.layout_table import LayoutTable, fill, table_path
from hybridattn.planning.messages import Setup
from hybridattn.planning.predict import predict_for
from hybridattn.planning.steady import Steady
from hybridattn.policies import chooser
from hybridattn.policies.adaptive import Adaptive
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Limits, Load
from hybridattn.policies.planning import LayoutQuestion

SHAPE = ModelShape("toy", 2, 64, 128, 4, 2, 16, 256, 512)
SETUP = Setup(made_profile("here", "toy", cpu_factor=0.5), SHAPE, "fp32")
STEADY = Steady(9.5, 4.0, 5.5, 1e6, None, 50, 10**9)
ANSWER = Layout("rule", 2, 0.5), STEADY
pytestmark = pytest.mark.filterwarnings("ignore::hybridattn.cost.table.ExtrapolationWarning")


def question(rows=4, **changes):
    return replace(LayoutQuestion(Load(rows, 8, 64), 1.0, Limits(), 1.0), **changes)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(chooser, "FIRST_NS", 0)


class Prompt:
    """Answers every question until the next step, at no cost: a planner with all the time of the world."""

    def __init__(self, table, costs, predict):
        self.cpu_ns, self.known, self.asked = 0, dict(table.known), 0
        self._table, self._answer, self._given = table, None, (costs, predict)

    def ask(self, what):
        self.asked += 1
        self._answer = what.answer(*self._given)
        self._table.add(what, *self._answer)

    def take(self):
        answer, self._answer = self._answer, None
        return answer


def served(chooser, costs):
    """Requests of several sizes, more than the GPU tier holds; their tokens, and the policy."""
    policy = Adaptive(costs, chooser)
    device = SimDevice(costs.pricing, record=False, **driver_of(SETUP.profile))
    engine = Engine(PricedStages(SHAPE, "fp32"), device, policy, EngineConfig(8, 64, 16, 256, 64, 256))
    for i in range(10):
        engine.add(DeclaredTokens(20 + 3 * i), 10 + i, arrival_ns=i * 20_000_000)
    engine.run()
    assert sorted(r.output_tokens for r in engine.take_records().requests) == list(range(10, 20))
    return policy


def test_a_second_run_of_the_same_requests_asks_nobody():
    costs, predict = SETUP.costs(), predict_for(SETUP.profile)
    first = Prompt(LayoutTable(table_path(SETUP)), costs, predict)
    served(first, costs)
    first._table.save()
    assert first.asked > 2
    second = Prompt(LayoutTable(table_path(SETUP)), costs, predict)
    policy = served(second, costs)
    assert second.asked == 0 and policy._chooser.recalled > 0
    assert "0 simulated" in repr(policy) and "from memory" in repr(policy)


def test_processes_add_to_one_file_and_what_a_run_learnt_of_its_layouts_is_not_kept():
    path = table_path(SETUP)
    one, other = LayoutTable(path), LayoutTable(path)
    one.add(question(4), *ANSWER)
    one.add(question(5, discount=((ANSWER[0], 0.5),)), *ANSWER)
    one.save()
    other.add(question(6), *ANSWER)
    other.save()
    assert LayoutTable(path).known == {question(4): ANSWER, question(6): ANSWER}
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half written is left


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"of": "%s", "answers": [{"load": {}}]}', '{"of": "x", "answers": []}']
)
def test_a_file_that_is_no_table_is_ignored_with_one_warning_and_replaced(text):
    path = table_path(SETUP)
    path.parent.mkdir(parents=True)
    path.write_text(text % path.stem if "%" in text else text)
    with pytest.warns(RuntimeWarning, match="is no table of layouts") as caught:
        table = LayoutTable(path)
    assert table.known == {} and len(caught) == 1
    table.add(question(), *ANSWER)
    table.save()
    assert LayoutTable(path).known == {question(): ANSWER}


def test_another_profile_model_or_version_has_another_file(monkeypatch):
    paths = {
        table_path(s) for s in (SETUP, replace(SETUP, dtype="bf16"), replace(SETUP, shape=replace(SHAPE, num_layers=3)))
    }
    monkeypatch.setattr(layout_table, "_code", lambda: b"another version")
    paths |= {table_path(SETUP), table_path(replace(SETUP, profile=made_profile("elsewhere", "toy")))}
    assert len(paths) == 5


def test_where_nothing_can_be_written_answers_last_for_the_run(tmp_path):
    (tmp_path / "layouts").write_text("in the way of the folder")
    table = LayoutTable(None)
    table.path = tmp_path / "layouts" / "a.json"
    table.add(question(), *ANSWER)
    table.save()
    assert table.known == {question(): ANSWER}


def test_filling_keeps_to_its_time_and_goes_on_where_it_ended(monkeypatch):
    said = []
    now = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    for _ in range(2):
        fill(LayoutTable(table_path(SETUP)), SETUP, 4.5, said.append)
    assert said == ["layouts of 4 loads simulated, 4 known", "layouts of 0 loads simulated, 4 known"]
    kept = json.loads(table_path(SETUP).read_text())["answers"]
    assert {a["min_gain"] for a in kept} == {1.0, 1.02}  # for adaptive and for auto
    assert all(load_of(a) == load_of(a).coarse() for a in kept)  # as it is asked for


def load_of(answer):
    return Load(**answer["load"])
