"""S04, S05, S07, M01, M03, M04, M06: generation and its records as an engine makes them, from end to end."""

from __future__ import annotations

import dataclasses

import pytest

from hybridattn import SamplingParams
from hybridattn.core.config import EngineConfig
from hybridattn.core.op import CPU
from hybridattn.core.request import Request
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.engine.output import stop_reason
from hybridattn.metrics.latency import summarize, tpot_ns
from hybridattn.metrics.throughput import throughput
from hybridattn.models.torch_stages import TorchStages
from hybridattn.policies.fixed import AsyncOverlap

HOT = SamplingParams(max_tokens=10, temperature=1.0, seed=42)
PROMPT = [3, 1, 4, 1, 5]


def engine_of(model, eos=(), **limits):
    """``eos`` are the model's end ids, for sampling and for the engine."""
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=tuple(eos)))
    config = EngineConfig(
        12, 12, 16, **{"max_model_len": 96, "max_num_seqs": 5, "max_num_batched_tokens": 24, **limits}
    )
    device = SimDevice(lambda op: 300 if op.lane == CPU else 20, execute=True)
    stages = TorchStages(model, device, config, "fp32")
    return Engine(stages, device, AsyncOverlap(cpu_fraction=0.5), config, frozenset(eos))


def run(engine, jobs):
    """Token ids of each (prompt, params)."""
    requests = [engine.add(prompt, params.max_tokens, params) for prompt, params in jobs]
    engine.run()
    return [r.token_ids[r.num_prompt :] for r in requests]


def test_S04_a_seeded_request_is_the_same_in_any_company_and_slot(tiny):
    alone = run(engine_of(tiny), [(PROMPT, HOT)])[0]
    unseeded = SamplingParams(max_tokens=4, temperature=1.0, seed=7)
    for at, crowd in [
        (0, [(PROMPT, HOT), ([9, 9], unseeded)]),
        (1, [([9, 9], SamplingParams(max_tokens=2)), (PROMPT, HOT)]),  # the neighbour finishes first
        (3, [([8], unseeded), ([7], unseeded), ([6] * 20, unseeded), (PROMPT, HOT), ([5], unseeded)]),
        (5, [([i] * 3, unseeded) for i in range(5)] + [(PROMPT, HOT)]),  # it has to wait for a place
    ]:
        assert run(engine_of(tiny), crowd)[at] == alone
    twice = run(engine_of(tiny), [(PROMPT, HOT), (PROMPT, HOT)])
    assert twice == [alone, alone]


def test_S04_several_answers_to_one_prompt_differ_and_reproduce(tiny):
    """There is no parameter n: a prompt that is given three times, with three seeds, is what it would do."""
    jobs = [(PROMPT, SamplingParams(max_tokens=10, temperature=1.0, seed=s)) for s in (1, 2, 3)]
    first, again = run(engine_of(tiny), jobs), run(engine_of(tiny), jobs[::-1])[::-1]
    assert first == again and len({tuple(ids) for ids in first}) == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'n'"):
        SamplingParams(n=3)


def test_S05_a_greedy_row_beside_hot_ones_is_the_greedy_row(tiny):
    greedy = SamplingParams(max_tokens=10)
    alone = run(engine_of(tiny), [(PROMPT, greedy)])[0]
    assert run(engine_of(tiny), [(PROMPT, HOT), (PROMPT, greedy), (PROMPT, HOT)])[1] == alone


VARIED = {"max_tokens": 24, "repetition_penalty": 5.0}  # random weights repeat themselves otherwise


@pytest.fixture(scope="module")
def lively(tiny):
    """(prompt, its 24 ids), all different."""
    ids = run(engine_of(tiny), [([2, 6], SamplingParams(**VARIED))])[0]
    assert len(set(ids)) == 24
    return [2, 6], ids


@pytest.mark.parametrize("options", [{}, {"min_tokens": 4}, {"ignore_eos": True}])
def test_S07_end_ids_end_a_request_unless_ignored_or_too_early(tiny, lively, options):
    prompt, ids = lively
    eos = [ids[1], ids[5]]
    (found,) = run(engine_of(tiny, eos=eos), [(prompt, SamplingParams(**VARIED, **options))])
    if options.get("ignore_eos"):
        assert found == ids
    elif options:
        assert found[0] == ids[0] and len(found) >= 4 and not set(eos) & set(found[:3])  # blocked: another token came
    else:
        assert found == ids[:2]  # either of several end ids


def test_S07_the_users_stop_ids_count_under_ignore_eos(tiny, lively):
    prompt, ids = lively
    engine = engine_of(tiny, eos=[ids[1]])
    params = SamplingParams(**VARIED, ignore_eos=True, stop_token_ids=(ids[4],))
    assert run(engine, [(prompt, params)]) == [ids[:5]]
    assert engine.take_records().requests[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("token", "params", "reason"),
    [
        (5, SamplingParams(max_tokens=9), None),
        (1, SamplingParams(max_tokens=9), "stop"),
        (1, SamplingParams(max_tokens=9, ignore_eos=True), None),
        (1, SamplingParams(max_tokens=9, min_tokens=4), None),
        (1, SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(1,)), "stop"),
        (7, SamplingParams(max_tokens=9, stop_token_ids=(7,)), "stop"),
        (5, SamplingParams(max_tokens=3), "length"),
        (1, SamplingParams(max_tokens=3), "stop"),  # both at once: the model ended it
        (1, None, None),  # a simulated request ends by length alone
    ],
)
def test_S07_reasons(token, params, reason):
    request = Request("r", 0, [9, 9], params.max_tokens if params else 9, params, 0)
    request.token_ids += [4, 4, token]
    assert stop_reason(request, frozenset({1, 2})) == reason


# -- records of an engine --------------------------------------------------------------------------------------------


def records_of(rig, lengths, aborted=0):
    engine = rig.build(rig.policies["async_overlap"]())
    for i, n in enumerate(lengths):
        engine.add([1 + i] * 5, n)
    gone = [engine.add([9] * 5, 50).request_id for _ in range(aborted)]

    def between(step):
        if step == 3:
            for name in gone:
                engine.abort(name)

    rig.finish(engine, between)
    return engine.take_records().requests


@pytest.mark.parametrize("lengths", [[1], [1, 1], [2], [1, 2, 5]])
def test_M01_one_token_has_no_time_per_token(rig, lengths):
    records = records_of(rig, lengths)
    assert [tpot_ns(r) is None for r in records] == [r.output_tokens < 2 for r in records]
    summary = summarize(records)
    assert summary.completed == len(lengths)
    assert (summary.tpot.count if summary.tpot else 0) == sum(n >= 2 for n in lengths)


def test_M03_tokens_are_counted_by_id(tiny, lively):
    """Equal tokens count each; an early stop at the 7th of 90 counts seven."""
    prompt, ids = lively
    engine = engine_of(tiny)
    run(engine, [([5], SamplingParams(max_tokens=15))])
    record = engine.take_records().requests[0]
    assert record.output_tokens == 15
    run(engine, [(prompt, SamplingParams(**{**VARIED, "max_tokens": 90}, stop_token_ids=(ids[6],)))])
    record = engine.take_records().requests[0]
    assert record.output_tokens == 7 and record.finish_reason == "stop"


def test_M04_failures_are_apart(rig):
    records = records_of(rig, [4] * 8, aborted=4)
    summary = summarize(records)
    assert (summary.completed, summary.failed) == (8, 4)
    assert summary.e2el.count == 8 and throughput(records).output_tokens == 32


def test_M06_times_of_a_request_are_in_order(rig):
    for record in records_of(rig, [1, 7, 12], aborted=2):
        times = [record.arrival_ns, record.scheduled_ns, *record.token_ns, record.end_ns]
        known = [t for t in times if t is not None]
        assert known == sorted(known)
