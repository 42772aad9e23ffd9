"""What the parts of one executor share."""

from __future__ import annotations

from collections.abc import Callable

from hybridattn.core.device import Device
from hybridattn.core.request import Request
from hybridattn.core.stages import Stages
from hybridattn.executor.forecast import Forecast, NoForecast
from hybridattn.executor.in_flight import InFlight
from hybridattn.executor.step_stats import StepStats
from hybridattn.policies.base import Policy


class Shared:
    """Model, device and policy of an executor, and what it keeps about them.

        Executor     the layer loop
          Decisions    asks the policy, polls and waits
            Submitter    puts ops onto the lanes, collects the tokens
              Shared       micro-batches in flight, the step's statistics, the forecast

    Parameters
    ----------
    max_rows : CPU rows in flight at most
    timeout_ns : longest wait for any op
    on_release : called for a leaving request once its row is no longer in flight
    any_leaving : whether there is a leaving request at all, so that micro-batches are searched only then
    """

    __slots__ = ("device", "forecast", "in_flight", "policy", "stages", "stats", "timeout_ns")

    def __init__(
        self,
        stages: Stages,
        device: Device,
        policy: Policy,
        max_rows: int,
        timeout_ns: int,
        on_release: Callable[[Request], None],
        any_leaving: Callable[[], bool],
    ) -> None:
        self.stages = stages
        self.device = device
        self.policy = policy
        self.timeout_ns = timeout_ns
        self.stats = StepStats()
        wanted = policy.forecasts and policy.costs is not None
        self.forecast: Forecast | NoForecast = Forecast(policy.costs) if wanted else NoForecast()  # type: ignore[arg-type]
        self.in_flight = InFlight(stages, max_rows, self.forecast, on_release, any_leaving)
