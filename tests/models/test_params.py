"""Sampling parameters: what is refused, and when a request ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.core.params import MAX_SEED, NoEffectWarning, SamplingParams

BAD = [
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
    ({"max_tokens": True}, "max_tokens must be an integer, got True"),
    ({"min_tokens": -1}, "min_tokens must be at least 0, got -1; 0 is off"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 exceeds max_tokens 8"),
    ({"temperature": -0.1}, "temperature must be between 0 and inf, got -0.1"),
    ({"temperature": math.nan}, "temperature must be between 0 and inf, got nan"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_k": -2}, "top_k must be at least -1, got -2"),
    ({"top_p": 1.1}, "top_p must be between 0 and 1, got 1.1"),
    ({"top_p": math.nan}, "top_p must be between 0 and 1, got nan"),
    ({"min_p": -0.5}, "min_p must be between 0 and 1, got -0.5"),
    ({"seed": -1}, "seed must be at least 0 and at most 18446744073709551615, got -1; None lets the engine choose"),
    ({"seed": 2**64}, "seed must be at least 0 and at most 18446744073709551615, got 18446744073709551616"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0; 1.0 is off"),
    ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, got -3"),
    ({"stop": ("a", "")}, "stop must hold non-empty strings, got ''"),
    ({"stop": ""}, "stop must hold non-empty strings, got ''"),
    ({"top_p": None}, "top_p must be a number, got None; 1.0 keeps all"),
    ({"top_p": -1}, "top_p must be between 0 and 1, got -1; 1.0 keeps all"),
    ({"top_k": None}, "top_k must be an integer, got None; 0 or -1 keeps all"),
    ({"repetition_penalty": None}, "repetition_penalty must be a number, got None; 1.0 is off"),
    ({"temperature": np.True_}, "temperature must be a number, got np.True_"),
    ({"temperature": np.array([0.5])}, "temperature must be a number, got array([0.5])"),
    ({"max_tokens": np.float32(3)}, "max_tokens must be an integer, got np.float32(3.0)"),
    ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
    ({"stop_token_ids": 7}, "stop_token_ids must be a list, got 7"),
    ({"stop_token_ids": np.array([[1, 2]])}, "stop_token_ids must be a list, got array([[1, 2]])"),
    ({"stop_token_ids": np.array([1.5])}, "stop_token_ids must hold ids of at least 0, got np.float64(1.5)"),
    ({"stop_token_ids": (-3,)}, "stop_token_ids must hold ids of at least 0, got -3"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[m for _, m in BAD])
def test_S01_bad_values_are_refused_in_one_sentence(values, message):
    with pytest.raises(InputError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_edges_that_are_allowed():
    SamplingParams(temperature=math.inf, top_k=0, top_p=0.0, min_p=1.0, seed=2**64 - 1, min_tokens=16)


INTEGER_KINDS = [int, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64, np.array]
NUMBER_KINDS = [float, np.float16, np.float32, np.float64, np.array]


@given(kind=st.sampled_from(INTEGER_KINDS), value=st.integers(1, 100))
def test_whole_numbers_of_any_kind_mean_the_same(kind, value):
    names = ("max_tokens", "min_tokens", "seed", "top_k")
    made = SamplingParams(temperature=1.0, stop_token_ids=[kind(value)], **{name: kind(value) for name in names})
    assert made == SamplingParams(temperature=1.0, stop_token_ids=(value,), **dict.fromkeys(names, value))
    assert all(type(getattr(made, name)) is int for name in names) and type(made.stop_token_ids[0]) is int


@given(kind=st.sampled_from(NUMBER_KINDS), value=st.integers(1, 8))
def test_fractions_of_any_kind_mean_the_same(kind, value):
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    made = SamplingParams(**{name: kind(value / 8) for name in names})  # eighths are exact in all of them
    assert made == SamplingParams(**dict.fromkeys(names, value / 8))
    assert all(type(getattr(made, name)) is float for name in names)


@given(seed=st.integers(0, MAX_SEED))
def test_every_seed_of_64_bits_works_as_numpy_gives_it(seed):
    assert SamplingParams(seed=np.uint64(seed)).seed == SamplingParams(seed=seed).seed == seed


def test_stop_ids_may_be_an_array_and_switches_numpys():
    made = SamplingParams(stop_token_ids=np.array([5, 6]), stop=np.array(["a", "b"]), ignore_eos=np.True_)
    assert made == SamplingParams(stop_token_ids=(5, 6), stop=("a", "b"), ignore_eos=True)
    assert SamplingParams(stop_token_ids=np.array([], dtype=int)).stop_token_ids == ()
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


@pytest.mark.parametrize("given", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_filter_that_cannot_act_is_said(given):
    name, value = next(iter(given.items()))
    with pytest.warns(NoEffectWarning, match=f"{name} {value} has no effect at temperature 0"):
        SamplingParams(**given)
    SamplingParams(temperature=0.5, **given)  # and said only then: a warning is an error here
    SamplingParams(top_k=0)


def test_lists_and_a_bare_stop_string_become_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert hash(params) == hash(SamplingParams(stop=["END"], stop_token_ids=(3, 4)))


def test_S07_ignore_eos_ignores_the_models_ids_and_not_the_users():
    assert SamplingParams(stop_token_ids=[9]).ending_ids((1, 2)) == {1, 2, 9}
    assert SamplingParams(stop_token_ids=[9], ignore_eos=True).ending_ids((1, 2)) == {9}
