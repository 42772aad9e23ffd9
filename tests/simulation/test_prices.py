"""Prices of a simulated device: kept by their work, never where lanes share bandwidth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, LANES, Op, Work
from hybridattn.cost.machine import machine
from hybridattn.devices.sim_prices import MOST_KNOWN, Prices

PRICING = machine("a10", "epyc-7r32-16c", "pcie4-x16")
FREE = dict.fromkeys(LANES, 0)


class Counted:
    """A price model that says how often it was asked."""

    def __init__(self):
        self.asked = 0

    def price_ns(self, work):
        self.asked += 1
        return work.rows


def counted():
    model = Counted()
    return model, Prices(replace(PRICING, models={(GPU, "linear"): model}, contention={}))


def op(rows=1, kind="linear", lane=GPU, work=None):
    return Op("x", lane, work or Work(kind, 1.0, 1, rows))


def test_the_same_work_is_priced_once_and_as_many_are_kept_as_fit():
    model, prices = counted()
    work = Work("linear", 1.0, 1, 7)
    assert [prices.at(op(work=work), GPU, 0, FREE) for _ in range(5)] == [7] * 5 and model.asked == 1
    for rows in range(MOST_KNOWN):
        assert prices.alone(op(rows), GPU) == rows
    assert prices.alone(op(work=work), GPU) == 7 and model.asked == MOST_KNOWN + 2


def test_a_lane_that_shares_bandwidth_costs_more_while_the_other_is_busy():
    pricing = replace(PRICING, contention={(D2H, CPU): 2.0})
    prices, copy = Prices(pricing), op(kind="copy", lane=D2H, work=Work("copy", 0.0, 10**6, 1))
    alone = prices.at(copy, D2H, 100, FREE)
    assert prices.at(copy, D2H, 100, {**FREE, CPU: 101}) == 2 * alone
    assert prices.at(copy, D2H, 100, {**FREE, CPU: 100}) == alone


def test_a_negative_price_is_refused():
    with pytest.raises(InputError, match="negative price -1 ns"):
        Prices(lambda op: -1).alone(op(), GPU)
