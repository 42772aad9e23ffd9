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
from hybridattn.policies.base import LayerView, Policy, Verb
from hybridattn.runtime.fleet import Fleet
from hybridattn.runtime.forecast import Forecast
from hybridattn.runtime.submitter import Submitter
from hybridattn.runtime.tally import Tally


class Verbs:
    """Asks the policy, polls and waits for cohorts. ``takes_detours``: the policy may want one at all."""

    __slots__ = (
        "_at", "_device", "_fleet", "_forecast", "_policy", "_submitter", "_tally", "_timeout_ns", "takes_detours",
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
        self._timeout_ns = timeout_ns
        self._at = LayerView(0, num_layers, 0, 0)
        self.takes_detours = type(policy).detour is not Policy.detour

    def begin(self, batch: Batch) -> None:
        """A pass of ``batch`` begins: what stays the same at all its layers."""
        self._at.gpu_rows, self._at.gpu_keys = len(batch.segments), self._tally.gpu_keys

    def join(self, here: list[Cohort], layer: int, batch: Batch, made: Ticket) -> list[Cohort]:
        """Of the cohorts ``here``, those that enter the linear stage of ``layer`` together with the GPU rows."""
        forecast = self._forecast
        if forecast is None:
            return [c for c in tuple(here) if self._ask(c, layer, made)]
        made.wait(self._timeout_ns)  # predictions start from where the GPU is
        forecast.gpu_free_ns = self._device.now_ns() + forecast.attention_ns(batch)
        joined = [c for c in tuple(here) if self._ask(c, layer, made)]
        forecast.gpu_works(self._device.now_ns(), self._tally.gpu_tokens + sum([c.size for c in joined]))
        return joined

    def detours(self, layer: int, attended: Ticket, joined: list[Cohort]) -> None:
        """Linear stages of cohorts elsewhere, as long as the policy wants them.

        Decided when the GPU has come to the linear stage of this layer, which it still has to do meanwhile.
        """
        attended.wait(self._timeout_ns)
        tokens = self._tally.gpu_tokens
        for c in joined:
            tokens += c.size
        if self._forecast is not None:
            self._forecast.gpu_free_ns = self._device.now_ns() + self._forecast.linear_ns(tokens)
        policy, fleet, after = self._policy, self._fleet, layer + 1
        cohorts, standing = fleet.cohorts, fleet.standing
        while self._device.now_ns() >= policy.quiet_until_ns:
            possible = policy.detours_wait and len(cohorts) > len(standing.get(after, ()))
            for c in cohorts:
                c.ready = ready = c.ticket.done()
                if ready and c.layer != after:
                    possible = True
            if not possible:
                return
            at = self._where(layer, tokens)
            chosen = None if policy.rests(at) else policy.detour(cohorts, at)
            if chosen is None:
                return
            one = fleet.by_number[chosen]
            if not one.ready and not self._wait(one, at):
                return
            alone = len(standing[one.layer]) == 1
            beside = [] if alone else [c for c in cohorts if c.ready and c.layer == one.layer and c is not one]
            self._detour([one, *beside])

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

    def _ask(self, cohort: Cohort, layer: int, made: Ticket) -> bool:
        """True when the cohort enters the linear stage of ``layer`` together with the GPU rows.

        If it is not ready yet, the poll is put off until the GPU has come to its attention of this layer (``made`` has
        ended): the driver then is less than a layer ahead, and the GPU still has that attention to do meanwhile.
        """
        if not cohort.ticket.done():
            made.wait(self._timeout_ns)
        ready = self._poll(cohort)
        at = self._where(layer, self._tally.gpu_tokens)
        verb = self._policy.ask(cohort, at)
        if verb is Verb.SKIP or not (ready or self._wait(cohort, at)):
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
            cohort.ready = True
            self._tally.polls_hit += 1
            if self._forecast is not None:
                self._forecast.returned(cohort)
            return True
        if self._device.now_ns() - cohort.submitted_ns > self._timeout_ns:
            raise StallError(f"{ticket.op.describe()} did not end within {self._timeout_ns / 1e9:g} s")
        return False

    def _wait(self, cohort: Cohort, at: LayerView) -> bool:
        """Wait for the cohort within the policy's patience; False when that passed first."""
        self._tally.waits += 1
        patience_ns, ticket = self._policy.patience_ns(cohort, at), cohort.ticket
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

    def _where(self, layer: int, tokens: int) -> LayerView:
        """What the policy sees of the GPU: one object, brought up to date."""
        at = self._at
        at.layer = layer
        at.now_ns = self._device.now_ns()
        at.tokens = tokens
        if self._forecast is not None:
            at.gpu_free_ns = self._forecast.gpu_free_ns
            at.cpu_free_ns = self._forecast.cpu_free_ns
        return at
