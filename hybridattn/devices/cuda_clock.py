"""The GPU's clock on the host's: one line through a few round trips, so that one trace can hold both.

A round trip records an event on the idle stream between two readings of the host's clock:

    host    t0, record ........ query, query, query: passed, t1
    stream                    * event

The event happened between t0 and t1, so their middle is wrong by at most half of t1 - t0. CUDA tells only how far two
events lie apart, in milliseconds as a float32, which resolves 1 us over ten seconds. So times are taken from an anchor
event, and a later event becomes the anchor when ten seconds have passed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from hybridattn.core.errors import StallError
from hybridattn.devices.cuda_runtime import CudaRuntime, Event, Stream

TRIPS = 15
_ANCHOR_NS = 10_000_000_000
_MIN_LINE_NS = 100_000_000  # two alignments nearer than this give an offset, not a slope


@dataclass(frozen=True, slots=True)
class Alignment:
    """At GPU time ``gpu_ns`` (since the first anchor) the host's clock read ``host_ns``, give or take ``spread_ns``."""

    gpu_ns: int
    host_ns: int
    spread_ns: int


class GpuClock:
    """GPU times as nanoseconds since the first anchor, and their place on ``time.perf_counter_ns``."""

    def __init__(self, runtime: CudaRuntime, stream: Stream, timeout_ns: int) -> None:
        self._runtime, self._stream, self._timeout_ns = runtime, stream, timeout_ns
        self.anchor = runtime.event()
        runtime.record(self.anchor, stream)
        self._anchor_ns = 0
        self.first = self.last = self.align()

    @property
    def spread_ns(self) -> int:
        """The larger spread of the two alignments in use."""
        return max(self.first.spread_ns, self.last.spread_ns)

    def align(self) -> Alignment:
        """Measure the offset between the two clocks by round trips on an idle stream: the median over the trips, and
        half the median distance between their two readings as its uncertainty."""
        trips = [self._trip() for _ in range(TRIPS)]
        offsets = [(t0 + t1) // 2 - gpu for t0, t1, gpu in trips]
        gpu = trips[TRIPS // 2][2]
        width = int(statistics.median(t1 - t0 for t0, t1, _ in trips))
        return Alignment(gpu, gpu + int(statistics.median(offsets)), max(1, width // 2))

    def _trip(self) -> tuple[int, int, int]:
        event = self._runtime.event()
        t0 = time.perf_counter_ns()
        self._runtime.record(event, self._stream)
        while not self._runtime.query(event):
            if time.perf_counter_ns() - t0 > self._timeout_ns:
                raise StallError(f"an event on an idle stream did not pass within {self._timeout_ns / 1e9:g} s")
        return t0, time.perf_counter_ns(), self.gpu_ns(event)

    def realign(self) -> None:
        """Align again: times since the first alignment lie on the line between the two."""
        self.last = self.align()

    def restart(self) -> None:
        """What comes from now on is measured from the last alignment."""
        self.first = self.last

    def gpu_ns(self, event: Event) -> int:
        """GPU time of an event that has passed. The event may become the next anchor: do not record it again."""
        since = self._runtime.elapsed_ns(self.anchor, event)
        if since > _ANCHOR_NS:
            self.anchor, self._anchor_ns = event, self._anchor_ns + since
            return self._anchor_ns
        return self._anchor_ns + since

    def host_ns(self, gpu_ns: int) -> int:
        """The host's clock at a GPU time."""
        a, b = self.first, self.last
        if b.gpu_ns - a.gpu_ns < _MIN_LINE_NS:
            return gpu_ns + b.host_ns - b.gpu_ns
        slope = (b.host_ns - a.host_ns) / (b.gpu_ns - a.gpu_ns)
        return a.host_ns + round((gpu_ns - a.gpu_ns) * slope)
