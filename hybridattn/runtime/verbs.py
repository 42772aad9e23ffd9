"""The four verbs: what the policy says about a cohort, carried out.

    gpu.compute    |attention l of G|linear l of G (+ those that JOIN)|linear m of one (a DETOUR)|attention l+1 ...
    driver       ask, cohorts at l: JOIN, SKIP or WAIT     detour? one at m, ready     detour? none

Asked as late as may be: the driver first lets the GPU come to the op before, so that polls are fresh, and the GPU still
has the op under way to do while the policy thinks.
"""

from __future__ import annotations

from hybridattn.core.device import Device, Ticket
from hybridattn.core.errors import StallError
from hybridattn.core.stages import Batch, Cohort
from hybridattn.policies.base import CohortView, LayerView, Policy, Verb
from hybridattn.runtime.fleet import Fleet
from hybridattn.runtime.forecast import Forecast
from hybridattn.runtime.submitter import Submitter
from hybridattn.runtime.tally import Tally


class Verbs:
    """Asks the policy, polls and waits for cohorts. ``takes_detours``: the policy may want one at all."""

    __slots__ = (
        "_device", "_fleet", "_forecast", "_num_layers", "_policy", "_submitter", "_tally", "_timeout_ns",
        "takes_detours",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        policy: Policy,
        fleet: Fleet,
        tally: Tally,
        forecast: Forecast | None,
        submitter: Submitter,
        num_layers: int,
        timeout_ns: int,
    ) -> None:
        self._device = device
        self._policy = policy
        self._fleet = fleet
        self._tally = tally
        self._forecast = forecast
        self._submitter = submitter
        self._num_layers = num_layers
        self._timeout_ns = timeout_ns
        self.takes_detours = type(policy).detour is not Policy.detour

    def join(self, here: list[Cohort], layer: int, batch: Batch, made: Ticket) -> list[Cohort]:
        """Of the cohorts ``here``, those that enter the linear stage of ``layer`` together with the GPU rows."""
        forecast = self._forecast
        if forecast is None:
            return [c for c in tuple(here) if self._ask(c, layer, batch, made)]
        made.wait(self._timeout_ns)  # predictions start from where the GPU is
        forecast.gpu_free_ns = self._device.now_ns() + forecast.attention_ns(batch, self._tally.gpu_keys)
        joined = [c for c in tuple(here) if self._ask(c, layer, batch, made)]
        forecast.gpu_works(self._device.now_ns(), self._tally.gpu_tokens + sum([c.size for c in joined]))
        return joined

    def detours(self, layer: int, batch: Batch, attended: Ticket, joined: list[Cohort]) -> None:
        """Linear stages of cohorts elsewhere, as long as the policy wants them.

        Decided when the GPU has come to the linear stage of this layer, which it still has to do meanwhile.
        """
        attended.wait(self._timeout_ns)
        tokens = self._tally.gpu_tokens + sum([c.size for c in joined])
        if self._forecast is not None:
            self._forecast.gpu_free_ns = self._device.now_ns() + self._forecast.linear_ns(tokens)
        policy, cohorts, after = self._policy, self._fleet.cohorts, layer + 1
        while self._device.now_ns() >= policy.quiet_until_ns:
            ready = [c.ticket.done() for c in cohorts]
            for c, r in zip(cohorts, ready, strict=True):
                if c.layer != after and (r or policy.detours_wait):
                    break
            else:
                return
            at = self._where(layer, batch, tokens)
            if policy.rests(at):
                return
            views = tuple([self._view(c, r) for c, r in zip(cohorts, ready, strict=True)])
            chosen = policy.detour(views, at)
            if chosen is None:
                return
            where = [c.number for c in cohorts].index(chosen)
            if not ready[where] and not self._wait(cohorts[where], views[where], at):
                return
            chosen_one = cohorts[where]
            ready[where] = False
            beside = [c for c, r in zip(cohorts, ready, strict=True) if r and c.layer == chosen_one.layer]
            self._detour([chosen_one, *beside])

    def _detour(self, cohorts: list[Cohort]) -> None:
        """Cohorts at one layer share a detour: its weights are read once for all of them."""
        for cohort in cohorts:
            self._poll(cohort)
        self._tally.detours += len(cohorts)
        if self._forecast is not None:
            self._forecast.gpu_works(self._device.now_ns(), sum([c.size for c in cohorts]))
        self._submitter.linear(cohorts[0].layer, None, cohorts)

    def round(self) -> None:
        """No GPU rows: wait, bounded, for the earliest cohort, then give each ready one its linear stage."""
        cohorts = self._fleet.cohorts
        if not cohorts:
            return
        self._device.wait_any([c.ticket for c in cohorts], self._timeout_ns)
        by_layer: dict[int, list[Cohort]] = {}
        for cohort in cohorts:
            if self._poll(cohort):
                by_layer.setdefault(cohort.layer, []).append(cohort)
        for layer, ready in by_layer.items():
            self._tally.detours += len(ready)
            if self._forecast is not None:
                self._forecast.gpu_works(self._device.now_ns(), sum([c.size for c in ready]))
            self._submitter.linear(layer, None, ready)

    # -- one cohort --------------------------------------------------------------------------------------------------

    def _ask(self, cohort: Cohort, layer: int, batch: Batch, made: Ticket) -> bool:
        """True when the cohort enters the linear stage of ``layer`` together with the GPU rows.

        If it is not ready yet, the poll is put off until the GPU has come to its attention of this layer (``made`` has
        ended): the driver then is less than a layer ahead, and the GPU still has that attention to do meanwhile.
        """
        if not cohort.ticket.done():
            made.wait(self._timeout_ns)
        ready = self._poll(cohort)
        view, at = self._view(cohort, ready), self._where(layer, batch, self._tally.gpu_tokens)
        verb = self._policy.ask(view, at)
        if verb is Verb.SKIP or not (ready or self._wait(cohort, view, at)):
            self._tally.skips += 1
            return False
        self._tally.joins += 1
        return True

    def _poll(self, cohort: Cohort) -> bool:
        """Ask whether the cohort's attention has ended; raises its error, and StallError past the time-out."""
        ticket = cohort.ticket
        self._tally.polls_made += 1
        if ticket.done():
            if ticket.error is not None:
                ticket.wait(0)  # raises with the op's name
            self._tally.polls_hit += 1
            if self._forecast is not None:
                self._forecast.returned(cohort)
            return True
        if self._device.now_ns() - cohort.submitted_ns > self._timeout_ns:
            raise StallError(f"{ticket.op.describe()} did not end within {self._timeout_ns / 1e9:g} s")
        return False

    def _wait(self, cohort: Cohort, view: CohortView, at: LayerView) -> bool:
        """Wait for the cohort within the policy's patience; False when that passed first."""
        self._tally.waits += 1
        patience_ns, ticket = self._policy.patience_ns(view, at), cohort.ticket
        if patience_ns is None or patience_ns >= self._timeout_ns:
            ticket.wait(self._timeout_ns)
        elif not ticket.done():
            try:
                ticket.wait(max(0, patience_ns))
            except StallError:  # not the device's failure: the policy gives up and asks again later
                return False
        if self._forecast is not None:
            self._forecast.returned(cohort)
        return True

    # -- what the policy sees ----------------------------------------------------------------------------------------

    def _view(self, cohort: Cohort, ready: bool) -> CohortView:
        return CohortView(
            cohort.number,
            cohort.size,
            cohort.layer,
            ready,
            cohort.submitted_pass == self._tally.number,
            self._device.now_ns() - cohort.submitted_ns,
            cohort.keys,
            cohort.return_ns,
        )

    def _where(self, layer: int, batch: Batch, tokens: int) -> LayerView:
        return LayerView(
            layer,
            self._num_layers,
            len(batch.segments),
            self._device.now_ns(),
            self._tally.gpu_keys,
            tokens,
            self._forecast.gpu_free_ns if self._forecast is not None else 0,
            self._forecast.cpu_free_ns if self._forecast is not None else 0,
        )
