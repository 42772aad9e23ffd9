"""A request that fails by itself: a named result, and neighbours that never hear of it."""

from __future__ import annotations

import json
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn import LLM, SamplingParams, cli
from hybridattn.core.params import NoEffectWarning
from hybridattn.engine import replay
from hybridattn.metrics.latency import summarize
from hybridattn.models.load import load
from hybridattn.workload.item import WorkItem, Workload

VOCAB = 512
NOTHING_ALLOWED = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
FREE = {"gpu": 16, "cpu": 32}


@pytest.fixture(scope="module")
def tiny():
    return load("dummy:tiny")


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, gpu_kv_blocks=16, cpu_kv_blocks=32, page_size=32, cpu_fraction=0.5, record=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm):
    return llm.generate([[2, 3]])[0].token_ids


def check_alone_failed(llm, outputs, alone):
    failed, fine = outputs
    assert failed.finish_reason == failed.record.finish_reason == "error" and failed.record.failed
    assert failed.error == failed.record.error and failed.error.startswith("the logits of request r")
    assert (fine.finish_reason, fine.error, fine.token_ids) == ("length", None, alone)
    assert llm.engine.broken is None and llm.free_blocks() == FREE


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (NOTHING_ALLOWED, "leave no token that is allowed: 512 ids are blocked until min_tokens"),
        (SamplingParams(repetition_penalty=5e-324), "have the maximum inf after repetition_penalty 4.94066e-324"),
    ],
)
def test_the_others_are_what_they_are_alone(llm, alone, params, why):
    outputs = llm.generate([[1], [2, 3]], [params, SamplingParams()])
    check_alone_failed(llm, outputs, alone)
    assert why in outputs[0].error and outputs[0].text == ""
    assert llm.generate([[2, 3]])[0].token_ids == alone


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("at", [0, 3])
def test_logits_that_are_not_finite_end_their_row_on_either_tier(tiny, share, at, monkeypatch):
    with LLM(tiny, gpu_kv_blocks=16, cpu_kv_blocks=32, page_size=32, cpu_fraction=share) as llm:
        want = llm.generate([[2, 3]])[0].token_ids
        sampled = llm.stages.gpu_tier.sampled

        def spoiled(logits, rows):
            for i, row in enumerate(rows):
                if row.num_prompt == 1 and row.position == at:  # a penalty's rows know their prompt
                    logits[i] = math.nan
            return sampled(logits, rows)

        monkeypatch.setattr(llm.stages.gpu_tier, "sampled", spoiled)
        outputs = llm.generate([[1], [2, 3]], [SamplingParams(repetition_penalty=1.5), SamplingParams()])
        check_alone_failed(llm, outputs, want)
        assert len(outputs[0].token_ids) == at and "have the maximum nan" in outputs[0].error


def test_a_stream_says_so_in_its_last_piece(llm):
    pieces = list(llm.stream([[1], [2]], [NOTHING_ALLOWED, SamplingParams(max_tokens=2)]))
    (last,) = [p for p in pieces if p.index == 0]
    assert (last.token_id, last.text, last.finish_reason) == (None, "", "error") and "no token" in last.error
    assert [p.finish_reason for p in pieces if p.index == 1] == [None, "length"]


def test_a_turn_that_fails_leaves_the_context_as_it_was(llm):
    def talk(*all_params):
        with llm.session() as chat:
            return [chat.generate([i, 9], p) for i, p in enumerate(all_params)], list(chat.token_ids)

    plain = SamplingParams(max_tokens=4)
    (first, failed, last), context = talk(plain, NOTHING_ALLOWED, plain)
    assert (failed.finish_reason, failed.token_ids) == ("error", ())
    assert context == [*first.prompt_token_ids, *first.token_ids, 2, 9, *last.token_ids]
    assert last.token_ids == llm.generate([context[:-4]], plain)[0].token_ids
    assert llm.free_blocks() == FREE


def test_a_token_without_text_ends_its_request_and_quotes_nothing(llm, alone, monkeypatch):
    class Mute:
        stopped = False

        def push(self, token_id):
            raise KeyError(f"secret {token_id}")

        def finish(self):
            return ""

    texts = iter([Mute(), None])
    monkeypatch.setattr(llm, "_new_text", lambda params: next(texts))
    failed, fine = llm.generate([[1], [2, 3]])
    assert failed.error.endswith("could not become text (KeyError)") and "secret" not in failed.error
    assert (failed.finish_reason, fine.token_ids) == ("error", alone)


def test_failed_requests_are_counted_and_never_averaged_in(llm):
    llm.take_records()
    llm.generate([[1], [2, 3]], [NOTHING_ALLOWED, SamplingParams()])
    records = llm.take_records().requests
    found, without = summarize(records), summarize([r for r in records if not r.failed])
    assert (found.completed, found.failed, found.empty) == (1, 1, 0)
    assert (found.ttft, found.tpot, found.e2el) == (without.ttft, without.tpot, without.e2el)


def test_a_replay_counts_the_turn_that_failed_and_the_session_goes_on(llm):
    items = [
        WorkItem(0, 3, 2, session="s"),
        WorkItem(0, 1, 2, session="s", after=0, history_tokens=5),
    ]
    params = [NOTHING_ALLOWED, SamplingParams(max_tokens=2)]
    run = replay.Replay(
        llm.engine, Workload("w", tuple(items)), prompts=lambda index, item: [7] * item.prompt_tokens,
        params=lambda index, item: params[index].__class__(**{**_fields(params[index]), "seed": 1}),
    )  # fmt: skip
    try:
        served = run.run()
    finally:
        llm.engine.send_records(llm.engine._ended_requests.append, llm.engine.executor.steps.append)
    assert (served.ended, served.failed) == (2, 1)
    assert [(r.finish_reason, r.prompt_tokens) for r in served.requests] == [("error", 3), ("length", 6)]


def _fields(params):
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_the_command_line_names_it_and_ends_with_1(real_model, monkeypatch, capsys):
    monkeypatch.setattr("hybridattn.cli.generate._sampling", lambda args: NOTHING_ALLOWED_OF_SMOLLM)
    assert cli.main(["generate", "--json", "hello"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["finish_reason"], said["token_ids"]) == ("error", []) and "no token that is allowed" in said["error"]
    assert cli.main(["generate", "hello"]) == 1
    out, err = capsys.readouterr()
    assert out == "\n" and err.startswith("hybridattn: prompt 0: the logits of request r0 leave no token")


NOTHING_ALLOWED_OF_SMOLLM = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(49152)))


@st.composite
def legal_params(draw):
    tiny, some = 5e-324, st.floats(1e-6, 1e6)
    made = {
        "max_tokens": draw(st.integers(1, 8)),
        "temperature": draw(st.sampled_from([0.0, 0.0, tiny, 1e-9, 1.0, 1e300, math.inf])),
        "top_k": draw(st.sampled_from([-1, 0, 1, 2, 511, 512, 10**9])),
        "top_p": draw(st.sampled_from([0.0, tiny, 0.5, 1.0])),
        "min_p": draw(st.sampled_from([0.0, tiny, 0.5, 1.0])),
        "seed": draw(st.one_of(st.none(), st.integers(0, 2**64 - 1))),
        "stop_token_ids": draw(st.sampled_from([(), tuple(range(VOCAB)), (0, 10**12)])),
        "ignore_eos": draw(st.booleans()),
        "repetition_penalty": draw(st.one_of(st.sampled_from([tiny, 1.0, 1e6]), some)),
        "presence_penalty": draw(st.floats(-2, 2)),
        "frequency_penalty": draw(st.floats(-2, 2)),
    }
    made["min_tokens"] = draw(st.integers(0, made["max_tokens"]))
    return made


@given(st.lists(legal_params(), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_any_legal_choice_beside_any_other_leaves_neighbours_alone(llm, alone, others):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        params = [SamplingParams(**p) for p in others]
    outputs = llm.generate([[i + 5] for i in range(len(params))] + [[2, 3]], [*params, SamplingParams()])
    assert outputs[-1].token_ids == alone
    assert all((o.error is None) == (o.finish_reason in ("stop", "length")) for o in outputs)
    assert llm.engine.broken is None and llm.free_blocks() == FREE
