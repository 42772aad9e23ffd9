"""When will a cohort's attention be back? Predicted from prices, put right by what was measured.

    driver   |send(c) submitted|
    d2h           |copy|
    cpu      earlier work ...|-- attention of c --|         predicted: max(cpu free, now + copy) + price * factor

The factor is a moving average of measured over priced time of the CPU's attention, so a CPU that was misjudged is
known for what it is after a few ops.
"""

from __future__ import annotations

from hybridattn.core.op import CPU
from hybridattn.core.stages import Batch, Cohort
from hybridattn.cost.correction import Correction
from hybridattn.cost.costs import Costs

_KIND = "decode_attention"


class Forecast:
    """Predicted returns of the cohorts in flight of one executor."""

    __slots__ = ("_away", "_correction", "_costs", "cpu_factor", "cpu_free_ns", "gpu_free_ns")

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._correction = Correction(weight=0.2)
        self._away: dict[int, tuple[Cohort, int]] = {}  # by number: not known to be back; the price of its attention
        self.cpu_factor = 1.0
        self.cpu_free_ns = 0
        self.gpu_free_ns = 0

    def linear_ns(self, rows: int) -> int:
        return self._costs.linear_ns(rows)

    def attention_ns(self, batch: Batch, keys: int) -> int:
        """GPU attention of the pass's rows at one layer; ``keys`` are those of its decode rows."""
        prefill = [(s.num_tokens, s.start + s.num_tokens) for s in batch.segments if s.prefill]
        return self._costs.attention_ns(len(batch.segments) - len(prefill), keys, prefill)

    def gpu_works(self, now_ns: int, rows: int) -> None:
        """A linear stage of ``rows`` rows is submitted behind all that the GPU has to do."""
        self.gpu_free_ns = max(self.gpu_free_ns, now_ns) + self._costs.linear_ns(rows)

    def sent(self, cohort: Cohort, now_ns: int) -> None:
        """The cohort's q, k, v go down as soon as the GPU is through, and its attention follows."""
        rows = cohort.size
        priced = self._costs.cpu_ns(rows, cohort.keys)
        start = max(self.cpu_free_ns, max(now_ns, self.gpu_free_ns) + self._costs.down_ns(rows))
        self.cpu_free_ns = start + int(priced * self.cpu_factor)
        cohort.return_ns = self.cpu_free_ns
        self._away[cohort.number] = cohort, priced

    def returned(self, cohort: Cohort) -> None:
        """Its ticket has ended: learn from what it took. Called once per attention; later calls teach nothing."""
        away = self._away.pop(cohort.number, None)
        if away is None:
            return
        priced, end_ns = away[1], cohort.ticket.end_ns
        self._correction.observe(CPU, _KIND, priced, end_ns - cohort.ticket.start_ns)
        self.cpu_factor = self._correction.factor(CPU, _KIND)
        late_ns = end_ns - cohort.return_ns
        if late_ns:  # what is queued behind it shifts as well
            self.cpu_free_ns += late_ns
            for other, _ in self._away.values():
                other.return_ns += late_ns
            cohort.return_ns = end_ns

    def forget(self, cohort: Cohort) -> None:
        self._away.pop(cohort.number, None)
