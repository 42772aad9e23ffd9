"""Continuous batching over two tiers: what the next step may do.

First come, first served throughout: ``running`` and ``waiting`` are ordered by arrival, the oldest request reserves
first, and when a tier is full the youngest of its requests gives its blocks back. So the oldest one always advances.

    queues <- departures (end, preempt) <- swaps (moves between the tiers) <- reservation (pages), prompts (admission)
    room (pools and contexts of sessions) below all of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import CapacityError, StallError
from hybridattn.core.request import Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch, CpuRow, Segment
from hybridattn.kv.blocks import BlockPool, blocks_for
from hybridattn.policies.base import Policy
from hybridattn.scheduler.contexts import Contexts
from hybridattn.scheduler.finish import Finish
from hybridattn.scheduler.prompts import Prompts
from hybridattn.scheduler.queues import Queues
from hybridattn.scheduler.reservation import Reservation
from hybridattn.scheduler.room import Room
from hybridattn.scheduler.swaps import Move, Swaps


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step may do: GPU rows, and CPU rows whose block is reserved and which may be launched."""

    batch: Batch | None
    idle: tuple[CpuRow, ...]
    moves: tuple[Move, ...] = ()


class Scheduler:
    """Queues and blocks. ``on_end`` is called once for every request that ends, with its blocks freed."""

    def __init__(
        self, config: EngineConfig, policy: Policy, on_end: Callable[[Request], None], can_move: bool = False
    ) -> None:
        self.config = config
        self.policy = policy
        self._queues = queues = Queues()
        self._room = room = Room(config)
        self._finish = Finish(queues, room, on_end)
        self.swaps = Swaps(queues, room, policy, can_move, self._finish.released)
        self._reservation = Reservation(queues, room, self.swaps, config.page_size, self._finish.preempt)
        self._prompts = Prompts(config, policy, queues, room, self.swaps)
        self._parks = can_move and config.pause_tier == CPU_TIER

    @property
    def waiting(self) -> list[Request]:
        return self._queues.waiting

    @property
    def running(self) -> list[Request]:
        return self._queues.running

    @property
    def pools(self) -> dict[str, BlockPool]:
        return self._room.pools

    @property
    def contexts(self) -> Contexts:
        """K,V that sessions left behind."""
        return self._room.contexts

    @property
    def unfinished(self) -> int:
        return len(self._queues)

    @property
    def leaving(self) -> int:
        """Requests that left while a row of theirs is in flight."""
        return self._finish.leaving

    def stall(self) -> StallError:
        """The error of an engine that has unfinished requests and nothing to do."""
        stuck = (self.running + self.waiting)[0]
        return StallError(
            f"request {stuck.request_id} is {stuck.state.value} with nothing in flight and nothing to schedule "
            f"({self.unfinished} unfinished)"
        )

    # -- arrival and end ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that has arrived (see :meth:`refuse_impossible`)."""
        self._queues.wait(request)

    def refuse_impossible(self, request: Request) -> None:
        """CapacityError when no tier that the policy allows could ever hold the request."""
        need = blocks_for(request.max_cached, self.config.page_size)
        tiers = self.policy.allowed(request.index)
        if all(need > self.pools[tier].num_blocks for tier in tiers):
            have = " and ".join(f"the {tier} tier has {self.pools[tier].num_blocks}" for tier in tiers)
            raise CapacityError(
                f"request {request.request_id} needs {need} blocks of {self.config.page_size} tokens "
                f"({request.num_prompt} prompt + up to {request.max_tokens} output tokens), but {have}"
            )

    def end(self, request: Request, reason: str, now_ns: int) -> None:
        """End a request. With a row in flight it leaves first: its blocks are held until that future has ended."""
        self._finish.end(request, reason, now_ns)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away; it will be recomputed from its known tokens."""
        self._finish.preempt(request)

    def released(self, request: Request, now_ns: int) -> None:
        """The row of a leaving request is no longer in flight: its blocks may go."""
        self._finish.released(request, now_ns)

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> Plan:
        """Reserve blocks and choose the rows of the next step."""
        queues, swaps, reserve = self._queues, self.swaps, self._reservation.newest
        swaps.begun = []
        decodes = [
            Segment(r, GPU_TIER, r.num_tokens - 1, 1, samples=True, prefill=False)
            for r in tuple(queues.decoding)
            if r.state is State.DECODE and reserve(r)
        ]
        if swaps.wanted and queues.idle and len(decodes) == len(queues.decoding):  # no GPU row wants for a page
            swaps.swap_in()
        idle = self._idle_rows() if queues.idle else ()
        segments = decodes + self._prompts.segments(now_ns, decodes, idle)
        return Plan(Batch(tuple(segments)) if segments else None, idle, tuple(swaps.begun))

    def _idle_rows(self) -> tuple[CpuRow, ...]:
        """CPU rows that may be launched, oldest request first, as many as the policy wants to see.

        Most waited already when the step before was planned: their rows are made and their pages are there.
        """
        self._queues.drop_dispatched()
        cap, reserve = self.policy.dispatch_cap, self._reservation.newest
        rows: list[CpuRow] = []
        for r in tuple(self._queues.idle):
            if cap is not None and len(rows) >= cap:
                break
            row = r.row
            if row is None:
                if r.state is not State.DECODE or not reserve(r):
                    continue
                row = r.row = CpuRow(r, len(r.token_ids) - 1)
            rows.append(row)
        return tuple(rows)

    def passed(self, batch: Batch) -> None:
        """The ops of ``batch`` are submitted and its tokens sampled: its K,V counts as computed."""
        for s in batch.segments:
            if not s.prefill:
                s.request.num_computed = s.start + 1  # type: ignore[attr-defined]
                continue
            request = s.request
            assert isinstance(request, Request)
            request.num_computed = s.start + s.num_tokens
            if s.samples:
                request.state = State.DECODE
                self._queues.prefilled(request)

    def returned(self, request: Request) -> None:
        """A CPU row got its token and goes on: it waits for the next launch."""
        self._queues.returned(request)

    def cpu_load(self) -> tuple[int, int]:
        """Requests that decode on the CPU tier, and the keys that they attend to."""
        return self._queues.cpu_load()

    def quiet_steps(self, batch: Batch) -> int:
        """How many steps after the coming one are certain to have exactly its rows (see ``Reservation``)."""
        return self._reservation.quiet_steps(batch)

    def reserve_ahead(self, batch: Batch, steps: int) -> None:
        """Pages for ``steps`` steps beyond what is known; never more than ``quiet_steps`` said."""
        self._reservation.ahead(batch, steps)

    # -- moves between the tiers -------------------------------------------------------------------------------------

    def move(self, request: Request, tier: str) -> Move | None:
        """Begin to move a request that decodes to ``tier`` now; None when it cannot (see ``Swaps``)."""
        return self.swaps.move(request, tier)

    def park(self) -> tuple[Move, ...]:
        """Contexts of sessions that have paused leave the GPU tier, where the engine is configured so."""
        return self.swaps.park() if self._parks and self.contexts else ()

    def moved(self, move: Move, now_ns: int) -> None:
        """The K,V of a moving request has arrived."""
        self.swaps.moved(move, now_ns)

    def give_up_moves(self) -> None:
        """Nothing is in flight any more: blocks that were moved from go back, and every context is forgotten."""
        self.swaps.give_up()

    def held_by_moves(self, tier: str) -> list[int]:
        """Blocks of a tier that moves under way still read from."""
        return self.swaps.held(tier)
