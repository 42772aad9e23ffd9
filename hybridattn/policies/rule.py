"""The local rule: per micro-batch and layer, the decision whose gain in tokens exceeds what its GPU time is worth.

    lambda = B_G / P          tokens that a nanosecond of the GPU makes without CPU rows
    b, J, tau                 rows of a micro-batch, its CPU time at one layer, its linear time alone
    r                         how much later than the GPU's attention the micro-batch is back (copy up included)

    WAIT    where the CPU would starve, r is shorter than a detour, and   net b / L > margin lambda r
    DETOUR  where the CPU runs dry, and   net (omega J + (1 - omega) idle) / (c L) > margin lambda tau

``idle`` is CPU time that would be lost until the next micro-batch feeds it, c = J / b, and ``net`` the part of a
token's worth that is left after the prefill that every token costs. Everything that is waited or detoured for in a step
stays within ``stretch`` of the step without CPU rows, which is the limit on the time per token of GPU rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridattn.core.op import SKIPPED, WAITED
from hybridattn.cost.costs import Costs
from hybridattn.policies.base import Decision, DispatchView, LayerView, MicroBatchView, Policy, StepView
from hybridattn.policies.fixed import shares

MARGIN = 0.8
_NEVER_NS = 1 << 62
_SLACK_NS = 20_000  # a wait is given this much beyond the prediction, and a quarter of it


class Rule(Policy):
    """Join, skip, wait, detour by the rule above.

    Parameters
    ----------
    costs : Costs
    micro_batches : int
        Equal micro-batches that share the CPU rows.
    omega : float
        How much CPU work counts that would be done later anyway: 0 detours only where the CPU would idle, 1 always
        counts all of it.
    stretch : float, optional
        Budget for waits and detours per step, as a share of the step without CPU rows; None: no limit.
    waited_rows : int
        Rows of one more micro-batch that goes first and is always waited for, so that it makes a token in every step.
    max_rows : int, optional
        CPU rows in flight at most.
    """

    name = "rule"
    hooks = frozenset({"begin", "detour"})
    forecasts = True

    def __init__(
        self,
        costs: Costs,
        micro_batches: int = 2,
        omega: float = 0.5,
        stretch: float | None = None,
        waited_rows: int = 0,
        max_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.costs: Costs = costs
        self.micro_batches = micro_batches
        self.omega = omega
        self.stretch = stretch
        self.waited_rows = waited_rows
        self.max_rows = max_rows
        self._waited = -1  # number of the micro-batch that is always waited for
        self._rows = 0
        self._lambda = 0.0
        self._net = 1.0
        self._step_ns = 0
        self._budget_ns = 0.0
        self._prompt_tokens = 0

    # -- per step ----------------------------------------------------------------------------------------------------

    def begin(self, view: StepView) -> None:
        costs = self.costs
        self._prompt_tokens += view.prefill_tokens
        self._rows = min(view.cpu_rows, self.max_rows or view.cpu_rows)
        self._step_ns = costs.step_ns(view.gpu_rows, view.gpu_kv_tokens) if view.gpu_rows else 0
        prefill_ns = self._prefill_ns(view) * self._prompt_tokens / view.tokens if view.tokens > 0 else 0.0
        busy_ns = self._step_ns + view.gpu_rows * prefill_ns
        self._lambda = view.gpu_rows / busy_ns if busy_ns else 0.0
        self._net = max(0.0, 1 - MARGIN * self._lambda * prefill_ns)
        self._budget_ns = float("inf") if self.stretch is None else self.stretch * self._step_ns

    def _prefill_ns(self, view: StepView) -> float:
        """GPU time of one prompt token in a chunk of 512 beside the rows of the step."""
        more = self.costs.linear_ns(view.gpu_rows + 512) - self.costs.linear_ns(view.gpu_rows)
        return self.costs.num_layers * more / 512

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        idle = min(view.idle_rows, self._rows - view.flying_rows)
        if idle < 1:
            return ()
        sizes: tuple[int, ...] = ()
        slow = [(n, rows) for n, rows in view.flying if n != self._waited]
        if self.waited_rows and len(slow) == view.micro_batches:
            sizes = (min(self.waited_rows, idle),)
            self._waited = view.next_number
            idle -= sizes[0]
        rows = max(0, self._rows - self.waited_rows)
        return (*sizes, *shares(idle, rows, self.micro_batches, max(0, self.micro_batches - len(slow))))

    def priority_of(self, number: int) -> int:
        return WAITED if number == self._waited else SKIPPED

    # -- per micro-batch and layer -------------------------------------------------------------------------------------

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        if micro_batch.ready:
            return Decision.JOIN
        costs = self.costs
        late_ns = micro_batch.return_ns + costs.up_ns(micro_batch.size) - at.gpu_free_ns
        if late_ns <= 0 or micro_batch.number == self._waited:
            return Decision.WAIT  # the GPU's own attention takes as long, or the layout says so
        tau = costs.linear_ns(micro_batch.size)
        starves = at.cpu_free_ns - micro_batch.return_ns < tau + costs.down_ns(micro_batch.size)
        if late_ns < min(tau, self._budget_ns) and starves:
            if self._net * micro_batch.size / at.num_layers > MARGIN * self._lambda * late_ns:
                self._budget_ns -= late_ns
                return Decision.WAIT
        return Decision.SKIP

    def max_wait_ns(self, micro_batch: MicroBatchView, at: LayerView) -> int | None:
        if micro_batch.number == self._waited:
            return None
        return max(0, micro_batch.return_ns - at.now_ns) * 5 // 4 + _SLACK_NS

    def no_detour(self, at: LayerView) -> bool:
        """The CPU has work queued for two layers more than the GPU: it need not be fed before that has shrunk."""
        layer_ns = self.costs.layer_ns(at.tokens, at.gpu_rows, at.gpu_kv_tokens)
        more_ns = max(0, at.cpu_free_ns - at.gpu_free_ns) - 2 * layer_ns
        if more_ns < 0:
            return False
        self.next_detour_ns = at.now_ns + more_ns
        return True

    def detour(self, micro_batches: Sequence[MicroBatchView], at: LayerView) -> int | None:
        costs, num_layers = self.costs, at.num_layers
        backlog = max(0, at.cpu_free_ns - at.gpu_free_ns)
        feed_ns = _until_fed(micro_batches, at, costs.layer_ns(at.tokens, at.gpu_rows, at.gpu_kv_tokens))
        net, omega, price, left_ns = self._net, self.omega, MARGIN * self._lambda, self._budget_ns
        best, chosen, cost_ns = 0.0, None, 0
        for layer, (number, rows, kv_tokens) in _ready_by_layer(micro_batches, at.layer + 1).items():
            most = net * rows / num_layers  # if all of its CPU time counts
            if most <= best:
                continue
            tau = costs.last_ns(rows) if layer == num_layers - 1 else costs.linear_ns(rows)
            if tau > left_ns or most - price * tau <= best:
                continue
            worth = omega
            if feed_ns > backlog and feed_ns > tau:  # else the CPU does not idle
                idle = feed_ns - max(backlog, tau + costs.down_ns(rows))
                if idle > 0 and (job := costs.cpu_ns(rows, kv_tokens)):
                    worth += (1 - worth) * min(idle, job) / job
            gain = net * worth * rows / num_layers - price * tau
            if gain > best:
                best, chosen, cost_ns = gain, number, tau
        self._budget_ns = left_ns - cost_ns
        return chosen


def _ready_by_layer(micro_batches: Sequence[MicroBatchView], apart_from: int) -> dict[int, tuple[int, int, int]]:
    """(number of one of them, rows, kv_tokens) of the ready micro-batches at each layer: they share a detour."""
    found: dict[int, tuple[int, int, int]] = {}
    for c in micro_batches:
        if c.ready and (layer := c.layer) != apart_from:
            if layer in found:
                number, rows, kv_tokens = found[layer]
                found[layer] = number, rows + c.size, kv_tokens + c.kv_tokens
            else:
                found[layer] = c.number, c.size, c.kv_tokens
    return found


def _until_fed(micro_batches: Sequence[MicroBatchView], at: LayerView, layer_ns: int) -> int:
    """Time until some micro-batch has returned and the GPU comes by its layer."""
    comes, num_layers, now_ns = at.layer + 1, at.num_layers, at.gpu_free_ns
    fed_ns = _NEVER_NS
    for c in micro_batches:
        back_ns = c.return_ns
        if back_ns < fed_ns:
            steps_ns = now_ns + (c.layer - comes) % num_layers * layer_ns
            if steps_ns < fed_ns:
                fed_ns = steps_ns if steps_ns > back_ns else back_ns
    return fed_ns - now_ns
