"""Steps that are certain to hold exactly the same rows: on a device of prices many of them pass in one call."""

from __future__ import annotations

from hybridattn.core.request import Request
from hybridattn.core.stages import Batch
from hybridattn.engine.request_queue import RequestQueue
from hybridattn.executor.fast_path import FastExecutor
from hybridattn.kv.manager import KVManager
from hybridattn.scheduler.scheduler import Scheduler


class QuietSteps:
    """Takes such steps for an engine.

    step       | prompts | decode | decode | decode | decode | an arrival or an end
    here                  |------- one call ----------|
    """

    __slots__ = ("_executor", "_kv", "_plans", "_queue", "_scheduler")

    def __init__(self, executor: FastExecutor, scheduler: Scheduler, kv: KVManager, queue: RequestQueue) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._kv = kv
        self._queue = queue
        self._plans = "begin" in executor.policy.hooks

    def take(self, batch: Batch) -> bool:
        """As many steps of these rows as are certain; False: none is.

        Their tokens go to the requests without events, so that a request which wants events or may stop by itself takes
        one step after the other.
        """
        if not self._executor.can_repeat or (self._plans and self._scheduler.queues.waiting):
            return False  # a policy that plans may let in who waits
        steps = self._scheduler.quiet_steps(batch)
        requests: list[Request] = [s.request for s in batch.segments]  # type: ignore[misc]
        if steps < 1 or any(r.params is not None or r.events is not None or r.text is not None for r in requests):
            return False
        times_ns = self._executor.repeat(batch, steps, self._queue.next_ns)
        self._kv.reserve_ahead(requests, len(times_ns))
        ids = [0] * len(times_ns)
        for request in requests:
            request.token_ids.extend(ids)
            request.token_ns.extend(times_ns)
            request.num_computed = len(request.token_ids) - 1
        return True
