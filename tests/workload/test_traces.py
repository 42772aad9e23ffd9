"""Trace files as they come: odd stamps, failed rows, byte-order marks, blank lines, broken rows."""

import json
import warnings
from pathlib import Path

import pytest

from hybridattn.core.errors import InputError
from hybridattn.workload.arrivals import ClosedLoop, Poisson
from hybridattn.workload.traces import (
    TraceOrderWarning,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_sharegpt,
)

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SECOND, MS = 1_000_000_000, 1_000_000


def write(path, text):
    path.write_bytes(text.encode())
    return path


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_azure_seven_digit_stamps_bom_crlf_extra_columns_and_blank_lines(tmp_path):
    text = (
        f"\ufeff{AZURE},Note\r\n2023-11-16 18:15:46.6805900,374,44,a\r\n2023-11-16 18:15:50.9951690,396,109,b\r\n"
        "2023-11-16 18:15:50.9951690,7,1,duplicate\r\n\r\n"
    )
    found = read_azure(write(tmp_path / "azure.csv", text))
    assert [i.arrival_ns for i in found.items] == [0, 4_314_579_000, 4_314_579_000]
    assert [(i.prompt_tokens, i.output_tokens) for i in found.items] == [(374, 44), (396, 109), (7, 1)]
    assert "3 requests, arrivals over 4.3 s" in found.describe()


def test_azure_stamps_across_midnight_and_with_a_zone(tmp_path):
    text = f"{AZURE}\n2024-05-10 23:59:59.9+00:00,1,1\n2024-05-11T02:00:00.1+02:00,1,1\n"
    assert read_azure(write(tmp_path / "a.csv", text)).items[1].arrival_ns == SECOND // 5


@pytest.mark.parametrize(("name", "count"), [("conv", 19_366), ("code", 8_819)])
def test_the_azure_traces_of_2023(name, count):
    path = DATA / f"AzureLLMInferenceTrace_{name}.csv"
    if not path.exists():
        pytest.skip(f"../shared/data/{path.name} is absent")
    found = read_azure(path)
    assert len(found) + sum(found.dropped.values()) == count
    assert found.items[0].arrival_ns == 0 and 3400 < found.duration_ns / SECOND < 3600


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def burst_file(tmp_path):
    rows = [
        "5,ChatGPT,10,3,13,x",
        "47.5,GPT-4,20,0,20,x",
        "45,ChatGPT,30,4,34,x",
        "60,GPT-4,40,5,45,x",
        "61,ChatGPT,50,0,50,x",
    ]
    return write(tmp_path / "burst.csv", BURST + "\n".join(rows) + "\n")


def test_burstgpt_failed_rows_are_dropped_with_a_count_and_order_is_restored(tmp_path):
    found = read_burstgpt(burst_file(tmp_path))
    assert [(i.arrival_ns, i.prompt_tokens, i.output_tokens) for i in found.items] == [
        (0, 10, 3),
        (40 * SECOND, 30, 4),
        (55 * SECOND, 40, 5),
    ]
    assert found.dropped == {"no output": 2}
    assert "2 dropped (no output)" in found.describe()


def test_burstgpt_keeps_failed_rows_only_if_asked(tmp_path):
    with pytest.warns(TraceOrderWarning, match="burst.csv: 1 rows go back in time; sorted"):
        found = read_burstgpt(burst_file(tmp_path), keep_empty=True)
    assert [i.output_tokens for i in found.items] == [3, 4, 0, 5, 0] and not found.dropped


def test_burstgpt_of_one_model(tmp_path):
    assert [i.prompt_tokens for i in read_burstgpt(burst_file(tmp_path), model="GPT-4").items] == [40]
    with pytest.raises(InputError, match="no rows of model 'GPT-9'; it has ChatGPT, GPT-4"):
        read_burstgpt(burst_file(tmp_path), model="GPT-9")


def test_more_rows_than_there_are_need_replacement(tmp_path):
    found = read_burstgpt(burst_file(tmp_path))
    with pytest.raises(InputError, match="burst has 3 requests, 8 were asked for"):
        found.take(8)
    drawn = found.take(8, replacement=True, seed=1)
    assert len(drawn) == 8 and set(drawn.items) <= set(found.items)
    assert drawn == found.take(8, replacement=True, seed=1) != found.take(8, replacement=True, seed=2)


def test_mooncake_milliseconds_that_start_late(tmp_path):
    rows = [
        {"timestamp": t, "input_length": p, "output_length": o, "hash_ids": [1]}
        for t, p, o in ((27482, 655, 52), (27482, 9, 1), (30535, 672, 26))
    ]
    found = read_mooncake(write(tmp_path / "m.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n"))
    assert [i.arrival_ns for i in found.items] == [0, 0, 3053 * MS]
    assert found.scaled(0.1).duration_ns == 305_300_000
    # A thousandfold time scale is no hang: the line that is printed first says how long it will take.
    assert "arrivals over 3053.0 s" in found.scaled(1000).describe()
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="time_scale must be positive and finite"):
            found.scaled(bad)


def talk(*messages):
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}


def test_sharegpt_takes_the_first_answered_question(tmp_path):
    data = [
        talk(("gpt", "hi"), ("human", "a b c"), ("gpt", "d e")),
        talk(("human", "only a question")),
        talk(("human", "q"), ("human", "r s"), ("gpt", "t")),
    ]
    path = write(tmp_path / "share.json", json.dumps(data))
    found = read_sharegpt(path, lambda text: len(text.split()))
    assert [(i.prompt_tokens, i.output_tokens) for i in found.items] == [(3, 2), (2, 1)]
    assert found.dropped == {"no question and answer": 1}
    timed = read_sharegpt(path, len, arrivals=Poisson(10), seed=3)
    assert timed.items[0].arrival_ns == 0 < timed.items[1].arrival_ns
    assert read_sharegpt(path, len, arrivals=ClosedLoop(2, 5)).concurrency == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,Tokens\n", "lacks the column ContextTokens, GeneratedTokens; its first line is 'TIMESTAMP,Tokens'"),
        (f"{AZURE}\n", "t.csv holds no usable request"),
        (f"{AZURE}\n2023-11-16 18:15:46,1,0\n", "t.csv holds no usable request; 1 with no output"),
        (f"{AZURE}\n2023-11-16 18:15:46.68,374\n", "t.csv line 2: 2 columns, 3 are needed"),
        (f"{AZURE}\n12.5,374,44\n", "t.csv line 2: the time is '12.5', a stamp like"),
        (f"{AZURE}\n2023-13-16 18:15:46,374,44\n", "t.csv line 2: the time is '2023-13-16 18:15:46'"),
        (
            f"{AZURE}\n2023-11-16 18:15:46,many,44\n",
            "t.csv line 2: ContextTokens is 'many', a count of tokens is needed",
        ),
        (f"{AZURE}\n2023-11-16 18:15:46,1,-4\n", "t.csv line 2: GeneratedTokens is '-4'"),
        (f"{AZURE}\n2023-11-16 18:15:46,1,1.5\n", "t.csv line 2: GeneratedTokens is '1.5'"),
        (f"{AZURE}\n2023-11-16 18:15:46,nan,5\n", "t.csv line 2: ContextTokens is 'nan'"),
    ],
)
def test_a_broken_azure_file_is_refused_with_file_line_and_value(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_azure(write(tmp_path / "t.csv", text))


def test_other_broken_files(tmp_path):
    with pytest.raises(InputError, match="none.csv does not exist"):
        read_azure(tmp_path / "none.csv")
    with pytest.raises(InputError, match="b.csv line 2: the time is 'noon', a number is needed"):
        read_burstgpt(write(tmp_path / "b.csv", BURST + "noon,GPT-4,1,1,2,x\n"))
    with pytest.raises(InputError, match="m.jsonl line 2: needs timestamp, input_length and output_length"):
        read_mooncake(
            write(tmp_path / "m.jsonl", '{"timestamp":1,"input_length":1,"output_length":1}\n{"timestamp":2}\n')
        )
    with pytest.raises(InputError, match="m2.jsonl line 1: needs timestamp"):
        read_mooncake(write(tmp_path / "m2.jsonl", "[1, 2]\n"))
    with pytest.raises(InputError, match="s.json is not JSON"):
        read_sharegpt(write(tmp_path / "s.json", "{"), len)
    with pytest.raises(InputError, match="a list of conversations is needed, got a dict"):
        read_sharegpt(write(tmp_path / "s.json", "{}"), len)
    with pytest.raises(InputError, match="s.json conversation 1: needs 'conversations'"):
        read_sharegpt(write(tmp_path / "s.json", json.dumps([talk(("human", "a"), ("gpt", "b")), {"id": 1}])), len)


def test_readers_are_quiet_on_a_good_file(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_burstgpt(write(tmp_path / "b.csv", BURST + "1,GPT-4,1,1,2,x\n1,GPT-4,1,1,2,x\n"))


# Line ends to `str.splitlines`, but neither to JSON lines nor to CSV.
NO_LINE_ENDS = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]


@pytest.mark.parametrize("mark", NO_LINE_ENDS, ids=ascii)
def test_separators_inside_a_string_end_no_line(tmp_path, mark):
    text = f'{{"timestamp": 5, "input_length": 2, "output_length": 3, "note": "a{mark}b"}}\n' * 2
    if mark >= "\x80":  # JSON has the others escaped
        found = read_mooncake(write(tmp_path / "m.jsonl", text))
        assert [(i.prompt_tokens, i.output_tokens) for i in found.items] == [(2, 3)] * 2
    found = read_burstgpt(write(tmp_path / "b.csv", BURST + f"1,a{mark}b,4,5,9,x\n2,a{mark}b,6,7,9,x\n"))
    assert [(i.prompt_tokens, i.output_tokens) for i in found.items] == [(4, 5), (6, 7)]
    assert len(read_burstgpt(tmp_path / "b.csv", model=f"a{mark}b").items) == 2


def test_a_quoted_cell_may_hold_a_line_end_and_an_open_quote_is_refused(tmp_path):
    found = read_burstgpt(write(tmp_path / "b.csv", BURST + '1,"a\nb",4,5,9,x\n2,"c, d",6,7,9,x\n'))
    assert [(i.prompt_tokens, i.output_tokens) for i in found.items] == [(4, 5), (6, 7)]
    with pytest.raises(InputError, match=r"b\.csv line 4: the time is 'noon'"):
        read_burstgpt(write(tmp_path / "b.csv", BURST + '1,"a\nb",4,5,9,x\nnoon,c,6,7,9,x\n'))
    with pytest.raises(InputError, match=r"b\.csv line 3 is no CSV: unexpected end of data"):
        read_burstgpt(write(tmp_path / "b.csv", BURST + '1,"a,4,5,9,x\n2,c,6,7,9,x\n'))
