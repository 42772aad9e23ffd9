"""Sampling where the logits are: the same tokens and the same faults as on the host, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.params import SamplingParams
from hybridattn.models import card_sampling
from hybridattn.models.card_sampling import choose, tokens_of
from hybridattn.models.sampling import SampleRow, sample_each

V = 97


def on_card(logits: torch.Tensor, rows: list[SampleRow]) -> list:
    chosen = choose(logits, rows, torch.from_numpy)
    return tokens_of(chosen.ids.tolist(), chosen.top.tolist(), chosen.allowed.tolist(), rows)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.7, 1.0, 3.0, math.inf]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 40, V, V + 5]),
        "top_p": st.sampled_from([0.0, 1e-8, 0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25]),
    }
)


@st.composite
def sample_rows(draw):
    params = SamplingParams(**draw(PARAMS), max_tokens=8)
    history = tuple(draw(st.lists(st.integers(0, V + 3), max_size=9)))
    return SampleRow(
        params, draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 99)), history, draw(st.integers(0, len(history))),
        tuple(draw(st.lists(st.integers(0, V + 3), max_size=4))),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::hybridattn.core.params.NoEffectWarning")
@settings(deadline=None, max_examples=150)
@given(
    st.lists(sample_rows(), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_row_gets_the_hosts_token(rows, seed, spread, dtype):
    """Spread 0: all logits equal, so that ties decide everything."""
    logits = (torch.randn(len(rows), V, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype).float()
    kept = logits.clone()
    assert on_card(logits, rows) == sample_each(logits, rows)
    assert torch.equal(logits, kept)


def test_a_row_without_a_token_says_why_and_its_neighbours_have_theirs():
    plain, drawn = SampleRow(SamplingParams(), None, 0), SampleRow(SamplingParams(temperature=1.0), 5, 0)
    every = SampleRow(SamplingParams(min_tokens=1), 1, 0, blocked=tuple(range(V)))
    tiny = SampleRow(SamplingParams(repetition_penalty=5e-324), 1, 0, history=(3,))
    rows = [plain, drawn, every, tiny, plain, drawn]
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(1)).abs()
    logits[4, 7], logits[5, 7] = math.nan, math.inf
    found = on_card(logits, rows)
    assert [str(f) for f in found] == [str(f) for f in sample_each(logits, rows)]
    assert [isinstance(f, int) for f in found] == [True, True, False, False, False, False]


def test_many_rows_are_chosen_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(card_sampling, "AT_ONCE", 3)
    rows = [SampleRow(SamplingParams(temperature=1.0, top_k=i), i, i) for i in range(7)] + [
        SampleRow(SamplingParams(min_tokens=1), 1, 0, blocked=tuple(range(V)))
    ]
    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(2))
    found, want = on_card(logits, rows), sample_each(logits, rows)
    assert found[:7] == want[:7] and str(found[7]) == str(want[7])  # the fault names its row among all


def test_rows_that_take_the_likeliest_token_cost_no_search():
    """No float64 copy, no sort: two reductions."""
    logits = torch.zeros(2, V)
    logits[0, 4] = logits[0, 9] = 1.0
    assert on_card(logits, [SampleRow(SamplingParams(), None, 0)] * 2) == [4, 0]
