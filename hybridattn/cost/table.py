"""A measured price: interpolated between sample points, immutable, never refusing a point outside them."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median

from hybridattn.core.errors import InputError
from hybridattn.core.op import Work

AXES = ("rows", "kv_tokens", "num_bytes", "flops", "kv_per_row")
_CACHE_LIMIT = 65_536


class ExtrapolationWarning(UserWarning):
    """A price was asked for outside the measured range."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: what an op was asked to do and how long it took [ns]."""

    lane: str
    kind: str
    rows: int
    kv_tokens: int
    flops: float
    num_bytes: int
    took_ns: int

    def __post_init__(self) -> None:
        if self.took_ns <= 0:
            raise InputError(f"sample of {self.kind} on {self.lane}: took_ns must be positive, got {self.took_ns}")

    @property
    def work(self) -> Work:
        return Work(self.kind, self.flops, self.num_bytes, self.rows, self.kv_tokens)


def coordinate(work: Work, axis: str) -> float:
    """The value of ``work`` along ``axis``; ``kv_per_row`` is the mean context, ``kv_tokens / rows``."""
    if axis == "kv_per_row":
        return work.kv_tokens / work.rows if work.rows else 0.0
    return float(getattr(work, axis))


@dataclass(frozen=True, slots=True)
class Table:
    """Piecewise-linear price over one or two axes of ``Work``.

    Parameters
    ----------
    axes : tuple of one or two of ``AXES``
    points : per axis, the strictly increasing coordinates
    prices_ns : nested tuples, ``prices_ns[i]`` or ``prices_ns[i][j]``

    Notes
    -----
    Outside the points the nearest segment is continued, at least down to 0, and an ``ExtrapolationWarning`` is given
    once per table. Prices are memoised up to a fixed number of distinct coordinates.
    """

    axes: tuple[str, ...]
    points: tuple[tuple[float, ...], ...]
    prices_ns: tuple
    _cache: dict[tuple[float, ...], int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _key: Callable[[Work], tuple[float, ...]] = field(init=False, repr=False, compare=False)
    _warned: list[bool] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        if len(self.axes) not in (1, 2) or len(self.points) != len(self.axes):
            raise InputError(f"a table has one or two axes with points each, got {self.axes} and {len(self.points)}")
        for axis, points in zip(self.axes, self.points, strict=True):
            if axis not in AXES:
                raise InputError(f"table axis '{axis}' is none of {', '.join(AXES)}")
            if len(points) < 2 or any(a >= b for a, b in zip(points, points[1:], strict=False)):
                raise InputError(f"table axis '{axis}' needs at least two increasing points, got {points}")
        self._check_shape()
        object.__setattr__(self, "_key", _key_of(self.axes))

    def _check_shape(self) -> None:
        rows = self.prices_ns if len(self.axes) == 2 else (self.prices_ns,)
        sizes = [len(p) for p in self.points]
        if len(self.prices_ns) != sizes[0] or any(len(row) != sizes[-1] for row in rows):
            raise InputError(f"table over {self.axes}: prices do not have the shape {tuple(sizes)}")
        if any(price < 0 for row in rows for price in row):
            raise InputError(f"table over {self.axes}: a price is negative")

    def price_ns(self, work: Work) -> int:
        """Interpolated time for ``work`` [ns]."""
        key = self._key(work)
        price = self._cache.get(key)
        if price is None:
            price = self.price_ns_at(key)
            if len(self._cache) < _CACHE_LIMIT:
                self._cache[key] = price
        return price

    def price_ns_at(self, key: tuple[float, ...]) -> int:
        """Interpolated time at the coordinates ``key``, one per axis [ns]."""
        for axis, points, value in zip(self.axes, self.points, key, strict=True):
            if not points[0] <= value <= points[-1] and not self._warned:
                self._warned.append(True)
                text = f"{axis} {value:g} lies outside the measured {points[0]:g} to {points[-1]:g}: extrapolated"
                warnings.warn(text, ExtrapolationWarning, stacklevel=3)
        cells = [_cell(points, value) for points, value in zip(self.points, key, strict=True)]
        i, t = cells[0]
        if len(cells) == 1:
            price = _mix(self.prices_ns[i], self.prices_ns[i + 1], t)
        else:
            j, u = cells[1]
            low, high = self.prices_ns[i], self.prices_ns[i + 1]
            price = _mix(_mix(low[j], low[j + 1], u), _mix(high[j], high[j + 1], u), t)
        return max(0, round(price))


def _key_of(axes: tuple[str, ...]) -> Callable[[Work], tuple[float, ...]]:
    """A fast getter of the coordinates along ``axes``."""
    if len(axes) == 2 and "kv_per_row" not in axes:
        return attrgetter(*axes)
    if len(axes) == 1 and axes[0] != "kv_per_row":
        get = attrgetter(axes[0])
        return lambda work: (get(work),)
    if axes == ("rows", "kv_per_row"):
        return lambda work: (work.rows, work.kv_tokens / work.rows if work.rows else 0.0)
    return lambda work: tuple(coordinate(work, axis) for axis in axes)


def _cell(points: tuple[float, ...], value: float) -> tuple[int, float]:
    """The segment of ``value`` and where in it (outside [0, 1] when extrapolating)."""
    i = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return i, (value - points[i]) / (points[i + 1] - points[i])


def _mix(a: float, b: float, t: float) -> float:
    return a + (b - a) * t


def table_from_samples(samples: Iterable[Sample], axes: tuple[str, ...]) -> Table:
    """A table through the medians of ``samples`` of one kind.

    With two axes the samples must fill the grid of their coordinates; a hole is refused, naming it.
    """
    groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for s in samples:
        groups[tuple(coordinate(s.work, axis) for axis in axes)].append(s.took_ns)
    if not groups:
        raise InputError("a table needs samples, got none")
    points = tuple(tuple(sorted({key[n] for key in groups})) for n in range(len(axes)))
    if len(axes) == 1:
        return Table(axes, points, tuple(median(groups[(p,)]) for p in points[0]))
    for a in points[0]:
        for b in points[1]:
            if (a, b) not in groups:
                raise InputError(f"table over {axes}: no sample at ({a:g}, {b:g})")
    return Table(axes, points, tuple(tuple(median(groups[(a, b)]) for b in points[1]) for a in points[0]))


def held_out_error(samples: Iterable[Sample], axes: tuple[str, ...]) -> float | None:
    """Mean relative error of predicting the inner grid lines of a table, each from the table without it.

    ``None`` when no axis has three points: nothing can be left out without extrapolating.
    """
    whole = table_from_samples(samples, axes)
    errors = []
    for n, points in enumerate(whole.points):
        for i in range(1, len(points) - 1):
            rest, left_out = _without(whole, n, i)
            errors += [abs(rest.price_ns_at(key) - price) / price for key, price in left_out if price > 0]
    return sum(errors) / len(errors) if errors else None


def _without(table: Table, axis: int, i: int) -> tuple[Table, list[tuple[tuple[float, ...], float]]]:
    """``table`` without point ``i`` of ``axis``, and the coordinates and prices that this leaves out."""
    points = tuple(p[:i] + p[i + 1 :] if n == axis else p for n, p in enumerate(table.points))
    at = table.points[axis][i]
    left_out: list[tuple[tuple[float, ...], float]]
    if axis == 1:
        prices = tuple(row[:i] + row[i + 1 :] for row in table.prices_ns)
        left_out = [((a, at), row[i]) for a, row in zip(table.points[0], table.prices_ns, strict=True)]
        return Table(table.axes, points, prices), left_out
    prices = table.prices_ns[:i] + table.prices_ns[i + 1 :]
    if len(table.axes) == 1:
        left_out = [((at,), table.prices_ns[i])]
    else:
        left_out = [((at, b), price) for b, price in zip(table.points[1], table.prices_ns[i], strict=True)]
    return Table(table.axes, points, prices), left_out
