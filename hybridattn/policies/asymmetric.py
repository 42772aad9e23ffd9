"""Asymmetric pipelining: two sub-batches take turns on GPU and CPU (NEO, APEX).

One layer; sub-batch 0 holds the GPU rows and the riders, sub-batch 1 the followers, whose linear stage is their own:

    gpu.compute    |linear 0 (G + riders)|linear 1 (followers)|attention of G|linear 0 ...
    cpu.attention  |...followers, layer l|------ riders, layer l + 1 -------|-- followers, layer l + 1 ...

In the executor's verbs: riders are waited for at their layer, followers take a detour at every layer. All CPU rows that
take part get a token in every pass. The weights are read twice, so it has to pay: see ``choice``.
"""

from __future__ import annotations

from hybridattn.core.errors import InputError
from hybridattn.core.op import WAITED
from hybridattn.cost.costs import Costs
from hybridattn.cost.crossover import eq6_threshold, neo_iteration_ns
from hybridattn.policies.base import CohortView, LaunchView, LayerView, Policy, Verb
from hybridattn.policies.fixed import shares

CHOICES = ("neo", "eq6", "always")
PATIENCE_PASSES = 64  # passes without CPU rows, while some wait, after which they run whatever the choice says


class Asymmetric(Policy):
    """Two sub-batches, filled with CPU rows one by one while the CPU keeps up.

    Parameters
    ----------
    costs : Costs, optional
        Without it there is nothing to predict with: all CPU rows run, split into halves.
    choice : str
        When to pipeline at all: ``neo`` compares predicted requests per second with those of the GPU rows alone,
        ``eq6`` applies the closed form of APEX, ``always`` does not ask.
    max_rows : int, optional
        CPU rows of a pass at most.
    """

    name = "asymmetric"
    priority = WAITED
    detours_wait = True
    swap_in_below = 0.95

    def __init__(
        self,
        costs: Costs | None = None,
        cpu_fraction: float | None = None,
        choice: str = "neo",
        max_rows: int | None = None,
    ) -> None:
        super().__init__(cpu_fraction)
        if choice not in CHOICES:
            raise InputError(f"choice must be one of {', '.join(CHOICES)}, got '{choice}'")
        if max_rows is not None and max_rows < 1:
            raise InputError(f"max_rows must be at least 1, got {max_rows}")
        self.costs = costs
        self.choice = choice
        self.max_rows = max_rows
        self.launch_cap = 64 if costs is not None else None
        self._followers: set[int] = set()
        self._declined = 0

    # -- verbs -------------------------------------------------------------------------------------------------------

    def ask(self, cohort: CohortView, at: LayerView) -> Verb:
        if cohort.number in self._followers:
            return Verb.SKIP
        return Verb.JOIN if cohort.ready else Verb.WAIT

    def detour(self, cohorts: tuple[CohortView, ...], at: LayerView) -> int | None:
        for c in cohorts:
            if c.layer == at.layer and c.number in self._followers:
                return c.number
        return None

    # -- sub-batches -------------------------------------------------------------------------------------------------

    def launch(self, view: LaunchView) -> tuple[int, ...]:
        rows = min(view.idle_rows, self.max_rows or view.idle_rows)
        if not rows:
            return ()
        if not view.gpu_rows:  # two cohorts take turns
            return shares(rows, rows + view.flying_rows, 2, max(0, 2 - view.cohorts))
        if self.costs is None:
            riders, followers = rows - rows // 2, rows // 2
        else:
            riders, followers = self._split(view, rows)
            if not self._pays(view, riders, followers):
                return ()
            if not riders + followers:  # their turn has come though the CPU is too slow for a single one
                riders = 1
        if self.launch_cap is not None:  # a pass with prompts has room for more rows than the one before
            self.launch_cap = max(2 * (riders + followers) + 64, self.launch_cap * 63 // 64)
        self._followers = {n for n in self._followers if n >= view.next_number - 256}
        if followers:
            self._followers.add(view.next_number + (1 if riders else 0))
        return tuple(n for n in (riders, followers) if n)

    def _split(self, view: LaunchView, rows: int) -> tuple[int, int]:
        """Riders and followers: each CPU row goes where there is more slack, until there is none."""
        costs = self.costs
        assert costs is not None
        window = costs.attention_ns(view.gpu_rows - len(view.prefill), view.gpu_keys, view.prefill)
        tokens = view.gpu_rows - len(view.prefill) + sum(t for t, _ in view.prefill)
        base = costs.cpu_ns(1, 1)
        per_key = (costs.cpu_ns(1, 1_000_001) - base) / 1e6
        copy = costs.down_ns(1) + costs.up_ns(1)
        riders = followers = 0
        rider_ns = follower_ns = float(base + copy)
        for keys in view.idle_keys[:rows]:
            more = keys * per_key
            slack_0 = window + costs.linear_ns(followers) - rider_ns - more
            slack_1 = costs.linear_ns(tokens + riders) - follower_ns - more
            if slack_0 < 0 and slack_1 < 0:
                break
            if slack_0 > slack_1:
                riders, rider_ns = riders + 1, rider_ns + more
            else:
                followers, follower_ns = followers + 1, follower_ns + more
        return riders, followers

    def _pays(self, view: LaunchView, riders: int, followers: int) -> bool:
        if riders + followers and (self.choice == "always" or self._gain(view, riders, followers) > 1):
            self._declined = 0
            return True
        self._declined += 1
        return self._declined % PATIENCE_PASSES == 0

    def _gain(self, view: LaunchView, riders: int, followers: int) -> float:
        """Requests per second with the CPU rows over those without, as NEO's model or eq. 6 has it."""
        costs = self.costs
        assert costs is not None
        mean = sum(view.idle_keys) // max(1, len(view.idle_keys))
        decodes = view.gpu_rows - len(view.prefill)
        tokens = decodes + sum(t for t, _ in view.prefill)
        attention = costs.attention_ns(decodes, view.gpu_keys, view.prefill)
        linear = costs.linear_ns(tokens)
        if self.choice == "eq6" and decodes:
            x = attention / linear
            rate = (decodes / attention) * costs.cpu_ns(64, 64 * mean) / 64
            return eq6_threshold(x) / rate
        pair = neo_iteration_ns(
            1,
            (costs.linear_ns(tokens + riders), costs.linear_ns(followers)),
            attention,
            (costs.cpu_ns(riders, riders * mean), costs.cpu_ns(followers, followers * mean)),
        )
        return (view.gpu_rows + riders + followers) * (linear + attention) / (pair * view.gpu_rows)
