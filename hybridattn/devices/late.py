"""How late the lanes of a simulated machine begin, and its driver goes on: measured times, taken in turn.

    times of a lane      10 20 30 40 50 60 70 80 90        in turn:  50 10 60 20 70 30 80 40 90 50 ...

Each lane takes its own in an order of its own, the same in every run, so that a simulation stays repeatable while two
threads that do something at about the same time are now the one, now the other, the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import gcd

from hybridattn.core.errors import InputError
from hybridattn.core.op import LANES

WAKE = "wake"


def lateness(
    wake_ns: int | Sequence[int], handover_ns: Mapping[str, int | Sequence[int]] | None
) -> dict[str, Iterator[int]] | None:
    """The times of each lane and of ``WAKE``; None where nothing is ever late."""
    given = {**dict.fromkeys(LANES, 0), **(handover_ns or {}), WAKE: wake_ns}
    values = {name: (v,) if isinstance(v, int) else tuple(v) for name, v in given.items()}
    for name, late in values.items():
        if name not in (*LANES, WAKE) or not late or min(late) < 0:
            raise InputError(f"lateness of '{name}' is {late}: a lane's, in nanoseconds, none of them negative")
    if not any(any(late) for late in values.values()):
        return None
    return {name: in_turn(late, place) for place, (name, late) in enumerate(values.items())}


def in_turn(values: Sequence[int], place: int) -> Iterator[int]:
    """All of ``values`` over and over, in steps of about 0.6 of their number, larger ones for later ``place``."""
    size = len(values)
    steps = [s for s in range(1, size + 1) if gcd(s, size) == 1 or size == 1]
    step = steps[(round(0.6 * len(steps)) + place) % len(steps)]
    return (values[(size // 2 + i * step) % size] for i in count())
