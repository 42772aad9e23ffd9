"""When will a micro-batch's attention be back? Predicted from prices, put right by what was measured.

    driver   |send(c) submitted|
    d2h           |copy|
    cpu      earlier work ...|-- attention of c --|         predicted: max(cpu free, now + copy) + price * factor

The factor is a moving average of measured over priced time of the CPU's attention, so a CPU that was misjudged is
known for what it is after a few ops.
"""

from __future__ import annotations

from hybridattn.core.device import Future
from hybridattn.core.op import CPU, GPU
from hybridattn.core.stages import Batch, MicroBatch
from hybridattn.cost.correction import Correction
from hybridattn.cost.costs import Costs

_ATTENTION, _LINEAR = "decode_attention", "linear"


class Forecast:
    """Predicted returns of the micro-batches in flight of one executor.

    Attributes
    ----------
    cpu_factor, gpu_factor : measured over priced time of the CPU's attention, and of the GPU's linear stages
    gpu_free_ns, cpu_free_ns : when GPU and CPU will have done all they were given
    """

    __slots__ = (
        "_away", "_correction", "_costs", "_prices_ns", "cpu_factor", "cpu_free_ns", "gpu_factor", "gpu_free_ns",
    )  # fmt: skip

    predicts = True

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._correction = Correction(weight=0.2)
        self._away: dict[int, MicroBatch] = {}  # not known to be back
        self._prices_ns: dict[int, tuple[int, int]] = {}  # of a micro-batch's attention, and of its copy down
        self.cpu_factor = self.gpu_factor = 1.0
        self.cpu_free_ns = 0
        self.gpu_free_ns = 0

    def gpu_attends(self, now_ns: int, batch: Batch) -> None:
        """The GPU begins its attention of a layer, and has nothing else to do."""
        attention_ns = self._costs.attention_ns(batch.num_decodes, batch.decode_kv_tokens, batch.chunks)
        self.gpu_free_ns = now_ns + attention_ns

    def gpu_comes_to_linear(self, now_ns: int, rows: int) -> None:
        """The GPU begins a linear stage of ``rows`` rows, and has nothing else to do."""
        self.gpu_free_ns = now_ns + self._costs.linear_ns(rows)

    def gpu_works(self, now_ns: int, rows: int) -> None:
        """A linear stage of ``rows`` rows is submitted behind all that the GPU has to do."""
        self.gpu_free_ns = max(self.gpu_free_ns, now_ns) + self._costs.linear_ns(rows)

    def linear_took(self, future: Future, rows: int) -> None:
        """A linear stage of ``rows`` rows has ended: learn from what it took."""
        self._correction.observe(GPU, _LINEAR, self._costs.linear_ns(rows), future.end_ns - future.start_ns)
        self.gpu_factor = self._correction.factor(GPU, _LINEAR)

    def sent(self, micro_batch: MicroBatch, now_ns: int) -> None:
        """The micro-batch's q, k, v go down as soon as the GPU is through, and its attention follows."""
        prices_ns = self._prices_ns.get(micro_batch.number)
        if prices_ns is None:
            costs, rows = self._costs, micro_batch.size
            prices_ns = costs.cpu_ns(rows, micro_batch.kv_tokens), costs.down_ns(rows)
            self._prices_ns[micro_batch.number] = prices_ns
        priced, down_ns = prices_ns
        start = max(self.cpu_free_ns, now_ns + down_ns, self.gpu_free_ns + down_ns)
        micro_batch.return_ns = self.cpu_free_ns = start + int(priced * self.cpu_factor)
        self._away[micro_batch.number] = micro_batch

    def returned(self, micro_batch: MicroBatch) -> None:
        """Its future has ended: learn from what it took. Called once per attention; later calls teach nothing."""
        if self._away.pop(micro_batch.number, None) is None:
            return
        future, priced = micro_batch.future, self._prices_ns[micro_batch.number][0]
        end_ns, took_ns = future.end_ns, future.end_ns - future.start_ns
        if took_ns != priced or self.cpu_factor != 1.0:  # else there is nothing to learn
            self._correction.observe(CPU, _ATTENTION, priced, took_ns)
            self.cpu_factor = self._correction.factor(CPU, _ATTENTION)
        late_ns = end_ns - micro_batch.return_ns
        if late_ns:  # what is queued behind it shifts as well
            self.cpu_free_ns += late_ns
            for other in self._away.values():
                other.return_ns += late_ns
            micro_batch.return_ns = end_ns

    def forget(self, micro_batch: MicroBatch) -> None:
        """It is through, or rows of it died."""
        self._away.pop(micro_batch.number, None)
        self._prices_ns.pop(micro_batch.number, None)


class NoForecast:
    """For a policy that does not ask for forecasts: all times are 0."""

    __slots__ = ()

    predicts = False
    cpu_factor = gpu_factor = 1.0
    cpu_free_ns = 0
    gpu_free_ns = 0

    def gpu_attends(self, now_ns: int, batch: Batch) -> None: ...
    def gpu_comes_to_linear(self, now_ns: int, rows: int) -> None: ...
    def gpu_works(self, now_ns: int, rows: int) -> None: ...
    def linear_took(self, future: Future, rows: int) -> None: ...
    def sent(self, micro_batch: MicroBatch, now_ns: int) -> None: ...
    def returned(self, micro_batch: MicroBatch) -> None: ...
    def forget(self, micro_batch: MicroBatch) -> None: ...
