"""Sampling parameters: what is refused, and when a request ends."""

from __future__ import annotations

import math

import pytest

from hybridattn.core.errors import InputError
from hybridattn.runtime.params import SamplingParams

BAD = [
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
    ({"max_tokens": True}, "max_tokens must be an integer, got True"),
    ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 exceeds max_tokens 8"),
    ({"temperature": -0.1}, "temperature must be between 0 and inf, got -0.1"),
    ({"temperature": math.nan}, "temperature must be between 0 and inf, got nan"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_k": -2}, "top_k must be at least -1, got -2"),
    ({"top_p": 1.1}, "top_p must be between 0 and 1, got 1.1"),
    ({"top_p": math.nan}, "top_p must be between 0 and 1, got nan"),
    ({"min_p": -0.5}, "min_p must be between 0 and 1, got -0.5"),
    ({"seed": -1}, "seed must be at least 0 and at most 18446744073709551615, got -1"),
    ({"seed": 2**64}, "seed must be at least 0 and at most 18446744073709551615, got 18446744073709551616"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0"),
    ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, got -3"),
    ({"stop": ("a", "")}, "stop must hold non-empty strings, got ''"),
    ({"stop": ""}, "stop must hold non-empty strings, got ''"),
    ({"stop_token_ids": (-3,)}, "stop_token_ids must hold ids of at least 0, got -3"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[m for _, m in BAD])
def test_S01_bad_values_are_refused_in_one_sentence(values, message):
    with pytest.raises(InputError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_edges_that_are_allowed():
    SamplingParams(temperature=math.inf, top_k=0, top_p=0.0, min_p=1.0, seed=2**64 - 1, min_tokens=16)


def test_lists_and_a_bare_stop_string_become_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert hash(params) == hash(SamplingParams(stop=["END"], stop_token_ids=(3, 4)))


def test_S07_ignore_eos_ignores_the_models_ids_and_not_the_users():
    assert SamplingParams(stop_token_ids=[9]).ending_ids((1, 2)) == {1, 2, 9}
    assert SamplingParams(stop_token_ids=[9], ignore_eos=True).ending_ids((1, 2)) == {9}
