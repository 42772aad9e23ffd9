"""Continuous batching over two tiers: what the next step may do.

First come, first served throughout: ``running`` and ``waiting`` are ordered by arrival, the oldest request reserves
first, and when a tier is full the youngest of its requests gives its pages back. So the oldest one always advances.

    Scheduler   what the next step may do
      Queues    requests by what they do next
      Prompts   which requests begin, on which tier, and how much of a prompt a step reads
      Swaps     which requests change their tier
      ColdPages which of their oldest pages lie on the other tier
      Victims   who gives pages up when a tier is full
      Finish    how requests end or are preempted
    KVManager   pages (``hybridattn.kv.manager``); the engine shows it to all of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import CapacityError, StallError
from hybridattn.core.request import Request, State
from hybridattn.core.stages import GPU_TIER, Batch, CpuRow, Segment
from hybridattn.kv.manager import KVManager, Move
from hybridattn.policies.answers import tiers_of
from hybridattn.policies.base import Policy
from hybridattn.scheduler.cold_pages import ColdPages
from hybridattn.scheduler.finish import Finish
from hybridattn.scheduler.prompts import Prompts
from hybridattn.scheduler.queues import Queues
from hybridattn.scheduler.swaps import Swaps
from hybridattn.scheduler.victims import Victims


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What the next step may do.

    Attributes
    ----------
    batch : its GPU rows; None when there are none
    idle : CPU rows whose page is reserved and which may be dispatched, oldest request first
    moves : copies of K,V between the tiers that begin with it
    """

    batch: Batch | None
    idle: tuple[CpuRow, ...]
    moves: tuple[Move, ...]


class Scheduler:
    """Chooses rows and reserves their pages.

    Parameters
    ----------
    on_end : called once for every request that ends, with its pages freed or kept as a session's context
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        kv: KVManager,
        on_end: Callable[[Request], None],
    ) -> None:
        self.queues = Queues()
        self.finish = Finish(self.queues, kv, on_end)
        self.swaps = Swaps(config, policy, self.queues, kv, self.finish)
        self._cold_pages = ColdPages(config, policy, self.queues, kv)
        self._victims = Victims(self.queues, self.swaps, self._cold_pages, self.finish)
        self._prompts = Prompts(config, policy, self.queues, kv, self.swaps, self._cold_pages)
        self._config = config
        self._policy = policy
        self._kv = kv

    def refuse_impossible(self, request: Request) -> None:
        """CapacityError when no tier that the policy allows could ever hold the request."""
        need, pools = self._kv.need_at_most(request), self._kv.pools
        tiers = tiers_of(self._policy, self._policy.allowed(request.index))
        if self._cold_pages.wanted and pools[GPU_TIER].num_blocks and need <= sum(p.num_blocks for p in pools.values()):
            return
        if all(need > pools[tier].num_blocks for tier in tiers):
            have = " and ".join(f"the {tier} tier has {pools[tier].num_blocks}" for tier in tiers)
            raise CapacityError(
                f"request {request.request_id} needs {need} blocks of {self._config.page_size} tokens "
                f"({request.num_prompt} prompt + up to {request.max_tokens} output tokens), but {have}"
            )

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> SchedulerOutput:
        """Choose the rows of the next step and reserve their pages: decode rows, CPU rows, then prompts. Whoever was
        preempted and has its K,V comes back before the CPU rows, among which it may be."""
        queues, swaps = self.queues, self.swaps
        decodes = self._decode_rows()
        if swaps.wanted and queues.idle and len(decodes) == len(queues.decoding):  # no GPU row wants for a page
            swaps.swap_in()
        if swaps.upwards and queues.idle:
            swaps.move_up()
        if self._kv.contexts and queues.waiting:
            self._prompts.resume(now_ns)
        idle = self._idle_rows() if queues.idle else ()
        segments = decodes + self._prompts.segments(now_ns, decodes, idle)
        if not segments and not idle:  # who was admitted with all its K,V has a row now
            segments, idle = self._decode_rows(), self._idle_rows()
        if self._cold_pages.wanted:
            self._cold_pages.balance()
        return SchedulerOutput(Batch(tuple(segments)) if segments else None, idle, self._kv.take_begun())

    def _decode_rows(self) -> list[Segment]:
        """GPU rows whose page is there, oldest request first, but those with cold pages before the others."""
        reserve, victims, page = self._kv.reserve, self._victims, self._config.page_size
        rows = [
            Segment(r, GPU_TIER, r.num_tokens - 1, 1, True, False, len(r.pages.cold) * page, r.pages.gone * page)
            for r in tuple(self.queues.decoding)
            if r.state is State.DECODE and reserve(r, victims)
        ]
        return sorted(rows, key=_is_whole) if self._cold_pages.wanted else rows

    def _idle_rows(self) -> tuple[CpuRow, ...]:
        """CPU rows that may be dispatched, oldest request first, as many as the policy wants to see.

        Most waited already when the step before was planned: their rows are made and their pages are there.
        """
        self.queues.drop_dispatched()
        cap, reserve, victims = self._policy.dispatch_cap, self._kv.reserve, self._victims
        rows: list[CpuRow] = []
        for r in tuple(self.queues.idle):
            if cap is not None and len(rows) >= cap:
                break
            row = r.row
            if row is None:
                if r.state is not State.DECODE or not reserve(r, victims):
                    continue
                row = r.row = CpuRow(r, len(r.token_ids) - 1)
            rows.append(row)
        return tuple(rows)

    def computed(self, batch: Batch) -> None:
        """The ops of ``batch`` are submitted and its tokens sampled: K,V of its prompts counts as computed."""
        for s in batch.prefills:
            request = s.request
            assert isinstance(request, Request)
            request.num_computed = s.start + s.num_tokens
            self._kv.computed(request)
            if s.samples:
                request.state = State.DECODE
                self.queues.prefilled(request)

    # -- when nothing else can happen --------------------------------------------------------------------------------

    def quiet_steps(self, batch: Batch) -> int:
        """How many steps after the coming one are certain to have exactly its rows: until one ends or pages run out.

        The caller stops earlier when a request arrives. 0 where anything else may happen: prompts under way, CPU rows,
        pages that go down, or a queue whose head might be admitted.
        """
        queues = self.queues
        decoding = queues.decoding
        if self._cold_pages.busy(batch):
            return 0
        if queues.prefilling or queues.idle or len(decoding) != len(batch.segments):
            return 0
        if len(queues.running) != len(decoding):
            return 0
        return self._kv.steps_ahead(decoding, max(0, min(r.max_tokens - r.num_output for r in decoding) - 1))

    def following(self, batch: Batch) -> Batch | None:
        """The decode rows of the step after that of ``batch``, before its tokens are known, with their pages reserved;
        None where another step may come. A row whose request then turns out to have ended is in vain."""
        queues, kv = self.queues, self._kv
        if queues.waiting or len(queues.running) != len(queues.decoding) or batch.prefills or kv.window is not None:
            return None
        rows = {s.request.request_id for s in batch.segments}
        go_on = [r for r in queues.decoding if r.num_output + 1 < r.max_tokens]
        if not go_on or self._cold_pages.wanted or any(r.session or r.request_id not in rows for r in queues.decoding):
            return None
        if kv.steps_ahead(go_on, 1) < 1:
            return None
        kv.reserve_ahead(go_on, 2)
        return Batch(tuple([Segment(r, GPU_TIER, r.num_tokens, 1, samples=True, prefill=False) for r in go_on]))

    def stall(self) -> StallError:
        """The error of an engine that has unfinished requests and nothing to do."""
        stuck = (self.queues.running + self.queues.waiting)[0]
        return StallError(
            f"request {stuck.request_id} is {stuck.state.value} with nothing in flight and nothing to schedule "
            f"({len(self.queues)} unfinished)"
        )


def _is_whole(row: Segment) -> bool:
    return row.cold == 0
