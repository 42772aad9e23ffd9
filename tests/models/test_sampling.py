"""Choosing tokens: filters, penalties, seeds, ties."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.core.params import SamplingParams
from hybridattn.models.sampling import RowFault, SampleRow, argmax, first_maximum, sample, sample_each, uniform

V = 50


def row(seed: int = 0, position: int = 0, **params) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, position)


def logits(seed: int, n: int = 1, size: int = V) -> torch.Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed)) * 3


def kept(values: torch.Tensor, draws: int = 300, **params) -> set[int]:
    """Every token that ``draws`` output positions give."""
    rows = [row(1, p, temperature=params.get("temperature", 1.0), **_without(params)) for p in range(draws)]
    return set(sample(values.expand(draws, -1), rows))


def _without(params: dict) -> dict:
    return {k: v for k, v in params.items() if k != "temperature"}


DEGENERATE = [{"top_p": p} for p in (0.0, 1e-8, 1e-3)] + [{"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-6}]


@pytest.mark.parametrize("params", DEGENERATE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_S01_the_strictest_filters_keep_the_likeliest_token(params, dtype):
    values = torch.linspace(-2, 1, V)
    values[37] = 4.0
    assert kept(values.to(dtype).float()[None], **params) == {37}


@pytest.mark.parametrize(
    "params", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}, {"top_k": V}, {"top_k": V + 1}, {"min_p": 0.0}]
)
def test_S01_a_filter_that_is_off_changes_nothing(params):
    values = logits(3, 40)
    plain = [row(5, p, temperature=1.3) for p in range(40)]
    filtered = [row(5, p, temperature=1.3, **params) for p in range(40)]
    assert sample(values, filtered) == sample(values, plain)


def test_S01_infinite_temperature_is_uniform_over_what_the_filters_keep():
    values = torch.zeros(1, 4)
    values[0, 2] = 100.0
    drawn = sample(values.expand(4000, -1), [row(2, p, temperature=math.inf) for p in range(4000)])
    assert np.bincount(drawn, minlength=4) == pytest.approx(1000, abs=120)
    assert kept(values, temperature=math.inf, top_k=1) == kept(values, temperature=1e308, top_p=0.0) == {2}


def test_S01_one_token_with_all_the_probability():
    values = torch.full((1, V), -1e30)
    values[0, 11] = 1e30
    assert kept(values, top_p=0.9, min_p=0.1) == {11}
    assert kept(values) == {11}


def test_S01_masked_logits_are_never_drawn():
    values = torch.full((1, V), -math.inf)
    values[0, [7, 9]] = 1.0
    assert kept(values) == {7, 9}
    assert kept(values, temperature=math.inf) == {7, 9}
    assert kept(values, top_k=20, top_p=0.99) == {7, 9}


def reference_distribution(values: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The slow path: full sorts, one step after the other."""
    x = (values - values.max()) / p.temperature
    order = np.argsort(-x, kind="stable")
    if p.top_k >= 1:
        x[order[p.top_k :]] = -math.inf
    weights = np.exp(x)
    if p.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.concatenate([[0.0], weights[order].cumsum()[:-1]])
        out = before >= p.top_p * weights.sum()
        out[0] = False
        weights[order[out]] = 0.0
    weights[weights < p.min_p * weights.max()] = 0.0
    return weights / weights.sum()


@given(
    seed=st.integers(0, 10_000),
    ties=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 1, 2, 7, V]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
@settings(deadline=None, max_examples=120)
def test_fast_filters_give_the_distribution_of_the_slow_ones(seed, ties, temperature, top_k, top_p, min_p):
    values = logits(seed).round() if ties else logits(seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference_distribution(values[0].double().numpy(), params)
    cumulative = expected.cumsum()
    for position in range(12):
        (token,) = sample(values, [SampleRow(params, seed, position)])
        draw = uniform(seed, position)
        assert expected[token] > 0
        assert cumulative[token] - expected[token] - 1e-9 <= draw <= cumulative[token] + 1e-9


def test_frequencies_of_draws_follow_the_softmax():
    values = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    drawn = sample(values.expand(6000, -1), [row(4, p, temperature=1.0) for p in range(6000)])
    expected = values[0].softmax(0).numpy()
    assert np.bincount(drawn, minlength=4) / 6000 == pytest.approx(expected, abs=0.02)


def test_S04_a_seeded_row_does_not_see_its_neighbours():
    own = logits(8)
    alone = [sample(own, [row(42, p, temperature=0.9)])[0] for p in range(20)]
    for others in ([row(7, 3, temperature=1.0)], [row(1, 1), row(42, 5, temperature=2.0)]):
        for slot in range(len(others) + 1):
            rows = [*others[:slot], None, *others[slot:]]
            values = torch.cat([own if r is None else logits(99) for r in rows])
            for p in range(20):
                batch = [row(42, p, temperature=0.9) if r is None else r for r in rows]
                assert sample(values, batch)[slot] == alone[p]


def test_S04_equal_seeds_draw_alike_and_other_seeds_do_not():
    values = logits(8, 2)[:1].expand(2, -1)
    same = [sample(values, [row(5, p, temperature=1.5)] * 2) for p in range(30)]
    assert all(a == b for a, b in same)
    other = [sample(values, [row(5, p, temperature=1.5), row(6, p, temperature=1.5)]) for p in range(30)]
    assert any(a != b for a, b in other)


def test_S04_draws_are_fixed_numbers():
    """What a seed means must not change between versions."""
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(1, 2) == 0.9456775220595027
    assert uniform(2**64 - 1, 1) == 0.6958661658538585
    draws = [uniform(9, p) for p in range(2000)]
    assert 0 <= min(draws) and max(draws) < 1
    assert np.mean(draws) == pytest.approx(0.5, abs=0.02)


def test_S04_a_sampled_row_without_a_seed_is_refused():
    with pytest.raises(InputError, match="a sampled row needs a seed"):
        SampleRow(SamplingParams(temperature=1.0), None, 0)
    assert SampleRow(SamplingParams(), None, 0).plain


def test_S05_temperature_0_takes_the_lowest_of_equal_tokens_beside_a_sampled_row():
    values = logits(1, 3)
    values[0, [13, 40]] = 50.0
    values[2, 29] = 50.0
    for position in range(20):
        ids = sample(values, [row(1, position), row(2, position, temperature=0.8), row(3, position)])
        assert (ids[0], ids[2]) == (13, 29)


def test_S05_both_forms_of_argmax_take_the_lowest_id():
    values = logits(2, 6).round()
    expected = [int(np.flatnonzero(v == v.max())[0]) for v in values.numpy()]
    assert argmax(values) == expected
    assert first_maximum(values)[0].tolist() == expected  # the form for other devices than the CPU


def test_S07_end_ids_are_blocked_until_the_minimum_is_reached():
    values = torch.zeros(1, V)
    values[0, [2, 5]] = 9.0
    request = SimpleNamespace(
        token_ids=[1, 1, 1], num_prompt=3, params=SamplingParams(min_tokens=2, stop_token_ids=[5])
    )
    for expected in (0, 0, 2):
        (token,) = sample(values, [SampleRow.of(request, 0, eos_ids=(2,))])
        assert token == expected
        request.token_ids.append(token)


def test_a_blocked_id_outside_the_vocabulary_is_ignored():
    assert sample(logits(1), [SampleRow(SamplingParams(), 0, 0, blocked=(V, 10**6))]) == argmax(logits(1))


def test_S07_ignoring_end_ids_leaves_them_drawable_below_the_minimum():
    request = SimpleNamespace(token_ids=[1], num_prompt=1, params=SamplingParams(min_tokens=2, ignore_eos=True))
    assert SampleRow.of(request, 0, eos_ids=(2,)).blocked == ()


def test_penalties_follow_their_formulas():
    history = [3, 3, 4, 6, 6, 6]  # two of prompt, then output
    values = torch.tensor([[0.0, 1.0, 2.0, -4.0, 5.0, 6.0, 7.0]])
    expected = values[0].double().numpy().copy()
    expected[[4, 6]] /= 1.25
    expected[3] *= 1.25
    expected[[4, 6]] -= 0.5 + 0.125 * np.array([1, 3])
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.125, seed=1
    )
    request = SimpleNamespace(token_ids=history, num_prompt=2, params=params)
    made = SampleRow.of(request, 1, eos_ids=())
    probabilities = np.exp(expected) / np.exp(expected).sum()
    rows = [SampleRow(params, 1, p, made.history, made.num_prompt) for p in range(4000)]
    drawn = np.bincount(sample(values.expand(4000, -1), rows), minlength=7) / 4000
    assert drawn == pytest.approx(probabilities, abs=0.025)


def test_penalties_equal_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    values = logits(5)
    history = [3, 7, 7, *values[0].topk(4).indices.tolist(), 41, 41]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([history]), values.clone())
    request = SimpleNamespace(token_ids=history, num_prompt=4, params=SamplingParams(repetition_penalty=1.7))
    assert sample(values, [SampleRow.of(request, 0, ())]) == [int(theirs.argmax())]
    assert int(values.argmax()) != int(theirs.argmax())  # the penalty decides


def test_logits_are_left_alone():
    values = logits(6)
    before = values.clone()
    request = SimpleNamespace(
        token_ids=[1, 2], num_prompt=1, params=SamplingParams(temperature=1.0, presence_penalty=2.0, min_tokens=5)
    )
    sample(values, [SampleRow.of(request, 0, (2,))])
    assert torch.equal(values, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_logits_that_are_no_numbers_are_refused_with_their_row(bad, params):
    values = logits(7, 2)
    values[1, 4] = bad
    with pytest.raises(InputError, match=f"logits of row 1 have the maximum {bad}"):
        sample(values, [row(), row(**params)])


def test_nothing_left_to_draw_is_refused():
    values = torch.full((1, V), -math.inf)
    with pytest.raises(InputError, match="row 0 have the maximum -inf"):
        sample(values, [row()])
    values[0, 2] = 1.0
    with pytest.raises(InputError, match="row 0 leave no token"):
        sample(values, [SampleRow(SamplingParams(), 0, 0, blocked=(2,))])
    with pytest.raises(InputError, match=r"shape \(1, 50\) for 2 rows"):
        sample(values, [row(), row()])


def legal_params() -> st.SearchStrategy[SamplingParams]:
    """Any parameters that are accepted, extreme ones among them."""
    return st.builds(
        SamplingParams,
        max_tokens=st.just(9),
        min_tokens=st.sampled_from([0, 9]),
        temperature=st.sampled_from([5e-324, 1e-6, 0.8, 1e308, math.inf]),
        top_k=st.sampled_from([-1, 1, 7]),
        top_p=st.sampled_from([0.0, 0.5, 1.0]),
        min_p=st.sampled_from([0.0, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([5e-324, 1e-300, 1.0, 1.3, 1e6]),
        presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
        frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
        stop_token_ids=st.sampled_from([(), (1,), tuple(range(V))]),
    )


def damage(values: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "all":
        values[:] = math.nan
    elif kind != "none":
        values[3] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[kind]
    return values


@given(
    params=st.lists(legal_params(), min_size=2, max_size=5),
    kinds=st.lists(st.sampled_from(["none", "none", "nan", "inf", "-inf", "all"]), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=150)
def test_S01_any_row_beside_any_other_gets_what_it_gets_alone(params, kinds, seed):
    """A fault of one row stays in that row, whatever its parameters and logits are, and never becomes an exception."""
    values = torch.stack([damage(logits(seed + i)[0], kinds[i]) for i in range(len(params))])
    requests = [SimpleNamespace(token_ids=[4, 3, 3, V + 7], num_prompt=2, params=p) for p in params]
    rows = [SampleRow.of(request, seed + i, (2,)) for i, request in enumerate(requests)]
    together = sample_each(values, rows)
    for i, found in enumerate(together):
        (alone,) = sample_each(values[i : i + 1], [rows[i]])
        if isinstance(found, RowFault):
            assert (found.row, found.reason) == (i, alone.reason)
        else:
            assert found == alone and 0 <= found < V and found not in rows[i].blocked


def test_S01_each_fault_is_told_in_a_sentence():
    values = logits(3, 5)
    values[1, 4] = math.nan
    values[2] = -math.inf
    seen = {"history": (int(values[3].argmax()),), "num_prompt": 1}
    wild = SampleRow(SamplingParams(temperature=1.0, repetition_penalty=5e-324), 1, 0, **seen)
    shut = SampleRow(SamplingParams(temperature=1.0), 1, 0, blocked=tuple(range(V)))
    found = sample_each(values, [row(), row(temperature=1.0), row(), wild, shut])
    assert found[0] == argmax(values[:1])[0]
    assert list(map(str, found[1:])) == [
        "logits of row 1 have the maximum nan, expected a finite number",
        "logits of row 2 have the maximum -inf, expected a finite number",
        "logits of row 3 have the maximum inf after repetition_penalty 4.94066e-324, presence_penalty 0 and "
        "frequency_penalty 0, expected a finite number",
        "logits of row 4 leave no token that is allowed: 50 ids are blocked until min_tokens",
    ]
