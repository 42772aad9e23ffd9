"""Asymmetric pipelining: two sub-batches take turns on GPU and CPU (NEO, APEX).

One layer; sub-batch 0 holds the GPU rows G and CPU rows c0, sub-batch 1 CPU rows c1, whose linear stage is their own:

    gpu.compute    |linear 0 (G + c0)|linear 1 (c1)|attention of G|linear 0 ...
    cpu.attention  |... c1, layer l  |------ c0, layer l + 1 -----|-- c1, layer l + 1 ...

As decisions: c0 is waited for at its layer, c1 takes a detour at every layer. All CPU rows that
take part get a token in every step. The weights are read twice, so it has to pay: see ``choice``.

Prompts for the CPU tier lengthen the step, so that more CPU work hides behind it. With ``choice='neo'`` a step reads as
many as it takes to hide its CPU rows, and otherwise as few as fill the GPU (``WIDTH`` token rows), as NEO's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridattn.core.errors import InputError
from hybridattn.core.op import WAITED
from hybridattn.cost.costs import Costs
from hybridattn.cost.crossover import eq6_threshold, neo_iteration_ns
from hybridattn.policies.base import Decision, DispatchView, LayerView, MicroBatchView, Policy, PromptView
from hybridattn.policies.fixed import shares

CHOICES = ("neo", "eq6", "always")
WIDTH = 128  # token rows from which on a linear stage is bound by compute: NEO's threshold
MAX_WAIT_STEPS = 64  # steps without CPU rows, while some wait, after which they run whatever the choice says


class SubBatches(NamedTuple):
    """CPU rows of the two sub-batches, and the CPU time of each at a layer [ns]."""

    rows_0: int = 0
    rows_1: int = 0
    cpu_ns_0: float = 0.0
    cpu_ns_1: float = 0.0


class Asymmetric(Policy):
    """Two sub-batches, filled with CPU rows one by one while the CPU keeps up.

    Parameters
    ----------
    costs : Costs, optional
        Without it there is nothing to predict with: all CPU rows run, in halves.
    choice : str
        When to pipeline at all: ``neo`` compares predicted requests per second with those of the GPU rows alone,
        ``eq6`` applies the closed form of APEX, ``always`` does not ask.
    max_rows : int, optional
        CPU rows of a step at most.
    moves_block : bool
        A step waits for the copies of requests that begin with it, as NEO's does.
    """

    name = "asymmetric"
    priority = WAITED
    hooks = frozenset({"prompts", "detour"})
    swap_in_below = 0.95

    def __init__(
        self,
        costs: Costs | None = None,
        cpu_fraction: float | None = None,
        choice: str = "neo",
        max_rows: int | None = None,
        moves_block: bool = False,
    ) -> None:
        super().__init__(cpu_fraction)
        if choice not in CHOICES:
            raise InputError(f"choice must be one of {', '.join(CHOICES)}, got '{choice}'")
        if max_rows is not None and max_rows < 1:
            raise InputError(f"max_rows must be at least 1, got {max_rows}")
        self.costs = costs
        self.choice = choice
        self.max_rows = max_rows
        self.moves_block = moves_block
        self.dispatch_cap = None
        self._sub_batch_1: set[int] = set()
        self._declined = 0
        self._pipelines: bool | None = None  # what was decided with the prompts of the coming step

    # -- decisions ---------------------------------------------------------------------------------------------------

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        if micro_batch.number in self._sub_batch_1:
            return Decision.DETOUR
        return Decision.JOIN if micro_batch.ready else Decision.WAIT

    # -- sub-batches -------------------------------------------------------------------------------------------------

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        rows = min(view.idle_rows, self.max_rows or view.idle_rows)
        if not rows:
            return ()
        if not view.gpu_rows:  # two micro-batches take turns
            return shares(rows, rows + view.flying_rows, 2, max(0, 2 - view.micro_batches))
        if self.costs is None:
            rows_0, rows_1 = rows - rows // 2, rows // 2
        else:
            window_ns = self.costs.attention_ns(view.gpu_rows - len(view.prefill), view.gpu_kv_tokens, view.prefill)
            tokens = view.gpu_rows - len(view.prefill) + sum([t for t, _ in view.prefill])
            split = self._split(view.idle_kv_tokens[:rows], tokens, window_ns)
            if not self._pays(view, split, tokens, window_ns):
                return ()
            rows_0, rows_1 = split.rows_0, split.rows_1
            if not rows_0 + rows_1:  # their turn has come though the CPU is too slow for a single one
                rows_0 = 1
        if self.dispatch_cap is not None:  # a step with prompts has room for more rows than the one before
            self.dispatch_cap = max(2 * (rows_0 + rows_1) + 64, self.dispatch_cap * 63 // 64)
        self._sub_batch_1 = {n for n in self._sub_batch_1 if n >= view.next_number - 256}
        if rows_1:
            self._sub_batch_1.add(view.next_number + (1 if rows_0 else 0))
        return tuple(n for n in (rows_0, rows_1) if n)

    def prompts(self, view: PromptView) -> int:
        self._pipelines = None
        if self.costs is None or self.choice != "neo":
            return len(view.candidates)
        tokens = [view.gpu_rows + sum([t for t, _ in view.prefill])]
        windows = [self.costs.attention_ns(view.gpu_rows, view.gpu_kv_tokens, view.prefill)]
        for prompt in view.candidates:
            tokens.append(tokens[-1] + prompt)
            windows.append(windows[-1] + self.costs.attention_ns(0, 0, ((prompt, prompt),)))
        few = next((n for n, width in enumerate(tokens) if width >= WIDTH), len(view.candidates))
        split = self._split(view.idle_kv_tokens, tokens[-1], windows[-1])
        many = len(view.candidates)
        while many > few and self._hides(split, tokens[many - 1], windows[many - 1]):
            many -= 1
        rows = view.gpu_rows + len(view.prefill)
        gain = self._rate(rows + many, tokens[many], windows[many], split) / self._rate(
            rows + few, tokens[few], windows[few], SubBatches()
        )
        if view.idle_kv_tokens:  # else nothing is launched in this step, and the next one is another question
            self._pipelines = gain > 1
        return many if self._pipelines else few

    def _split(self, idle_kv_tokens: Sequence[int], tokens: int, window_ns: int) -> SubBatches:
        """Each CPU row, oldest first, goes where there is more slack, until one fits nowhere.

        ``window_ns`` is the GPU's attention of a layer; ``tokens`` are the rows of its linear stage without CPU rows.
        """
        costs = self.costs
        assert costs is not None
        base = costs.cpu_ns(1, 1)
        per_key = (costs.cpu_ns(1, 1_000_001) - base) / 1e6
        copy = costs.down_ns(1) + costs.up_ns(1)
        linear = costs.linear_ns
        rows_0 = rows_1 = 0
        cpu_ns_0 = cpu_ns_1 = float(base + copy)
        for kv_tokens in idle_kv_tokens:
            more = kv_tokens * per_key
            slack_0 = window_ns + linear(rows_1) - cpu_ns_0 - more
            slack_1 = linear(tokens + rows_0) - cpu_ns_1 - more
            if slack_0 < 0 and slack_1 < 0:
                break
            if slack_0 > slack_1:
                rows_0, cpu_ns_0 = rows_0 + 1, cpu_ns_0 + more
            else:
                rows_1, cpu_ns_1 = rows_1 + 1, cpu_ns_1 + more
        return SubBatches(rows_0, rows_1, cpu_ns_0, cpu_ns_1)

    def _hides(self, split: SubBatches, tokens: int, window_ns: int) -> bool:
        """The CPU is done with both sub-batches within their windows."""
        assert self.costs is not None
        window_0 = window_ns + self.costs.linear_ns(split.rows_1)
        return split.cpu_ns_0 <= window_0 and split.cpu_ns_1 <= self.costs.linear_ns(tokens + split.rows_0)

    def _rate(self, rows: int, tokens: int, window_ns: int, split: SubBatches) -> float:
        """Requests advanced per nanosecond of a layer, by NEO's model of an iteration (docs/crossover.md)."""
        costs = self.costs
        assert costs is not None
        layer_ns = neo_iteration_ns(
            1,
            (costs.linear_ns(tokens + split.rows_0), costs.linear_ns(split.rows_1)),
            window_ns,
            (split.cpu_ns_0 if split.rows_0 else 0.0, split.cpu_ns_1 if split.rows_1 else 0.0),
        )
        return (rows + split.rows_0 + split.rows_1) / layer_ns

    def _pays(self, view: DispatchView, split: SubBatches, tokens: int, window_ns: int) -> bool:
        decided, self._pipelines = self._pipelines, None
        if split.rows_0 + split.rows_1:
            if decided is None:
                decided = self.choice == "always" or self._gain(view, split, tokens, window_ns) > 1
            if decided:
                self._declined = 0
                return True
        self._declined += 1
        return self._declined % MAX_WAIT_STEPS == 0

    def _gain(self, view: DispatchView, split: SubBatches, tokens: int, window_ns: int) -> float:
        """Requests per second with the CPU rows over those without, as NEO's model or eq. 6 has it."""
        costs = self.costs
        assert costs is not None
        decodes = view.gpu_rows - len(view.prefill)
        if self.choice == "eq6" and decodes:
            mean = sum(view.idle_kv_tokens) // max(1, len(view.idle_kv_tokens))
            rate = (decodes / window_ns) * costs.cpu_ns(64, 64 * mean) / 64
            return eq6_threshold(window_ns / costs.linear_ns(tokens)) / rate
        rows = view.gpu_rows
        return self._rate(rows, tokens, window_ns, split) / self._rate(rows, tokens, window_ns, SubBatches())
