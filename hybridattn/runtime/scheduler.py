"""Continuous batching over two tiers: admission, chunked prefill, block reservation, preemption by recompute.

First come, first served throughout: ``running`` and ``waiting`` are ordered by arrival, the oldest request reserves
first, and when a tier is full the youngest of its requests gives its blocks back. So the oldest one always advances.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from hybridattn.core.errors import CapacityError, InputError
from hybridattn.core.stages import CPU_TIER, GPU_TIER, TIERS, Batch, CpuRow, Segment
from hybridattn.kv.blocks import BlockPool, blocks_for
from hybridattn.policies.base import Policy, RequestView, TierView
from hybridattn.runtime.config import EngineConfig
from hybridattn.runtime.request import Request, State


@dataclass(frozen=True, slots=True)
class Move:
    """A request whose K,V goes to the tier that it now names; ``blocks`` of the other tier are held until then."""

    request: Request
    blocks: tuple[int, ...]
    tokens: int

    @property
    def source(self) -> str:
        return CPU_TIER if self.request.tier == GPU_TIER else GPU_TIER


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next pass may do: GPU rows, and CPU rows whose block is reserved and which may be launched."""

    batch: Batch | None
    idle: tuple[CpuRow, ...]
    moves: tuple[Move, ...] = ()


class Scheduler:
    """Queues and blocks. ``on_end`` is called once for every request that ends, with its blocks freed.

    ``running`` is also kept apart by what its requests do next, so that a pass costs what its rows cost and not what
    the queues hold: prompts under way, GPU rows, and CPU rows that wait for their next token.
    """

    def __init__(
        self, config: EngineConfig, policy: Policy, on_end: Callable[[Request], None], can_move: bool = False
    ) -> None:
        self.config = config
        self.policy = policy
        self.pools = {
            GPU_TIER: BlockPool(GPU_TIER, config.gpu_kv_blocks, config.page_size),
            CPU_TIER: BlockPool(CPU_TIER, config.cpu_kv_blocks, config.page_size),
        }
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._on_end = on_end
        self.leaving = 0  # requests that left while a row of theirs is in flight
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []  # on the GPU tier
        self._idle: list[Request] = []  # on the CPU tier; those launched since the last pass are still in it
        self._page = config.page_size
        self._swaps = can_move and policy.swap_in_below is not None
        self._moves: list[Move] = []  # begun by this pass

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    # -- arrival and end ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that has arrived (see :meth:`refuse_impossible`)."""
        insort(self.waiting, request, key=_arrival)

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
        """End a request. With a row in flight it leaves first: its blocks are held until that ticket has ended."""
        if request.state is State.FINISHED:
            return
        request.finish_reason = request.finish_reason or reason
        request.end_ns = now_ns
        request.requeue = False
        if request.in_flight:
            self._leave(request)
            return
        (self.waiting if request.state is State.WAITING else self.running).remove(request)
        self._give_back(request)
        request.state = State.FINISHED
        self._on_end(request)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away; it will be recomputed from its known tokens."""
        request.preemptions += 1
        request.requeue = True
        if request.in_flight:
            self._leave(request)
        else:
            self._requeue(request)

    def _leave(self, request: Request) -> None:
        self.leaving += request.state is not State.LEAVING
        request.state = State.LEAVING

    def released(self, request: Request, now_ns: int) -> None:
        """The row of a leaving request is no longer in flight: its blocks may go."""
        request.in_flight = False
        if request.state is not State.LEAVING:
            return
        self.leaving -= 1
        if request.requeue:
            self._requeue(request)
        else:
            self.end(request, request.finish_reason or "abort", request.end_ns or now_ns)

    def _requeue(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.state = State.WAITING
        request.requeue = False
        insort(self.waiting, request, key=_arrival)

    def _give_back(self, request: Request) -> None:
        for queue in (self._prefilling, self._decoding, self._idle):
            _discard(queue, request)
        if request.blocks:
            self.pools[request.tier].free(request.blocks)
        request.blocks = []
        request.num_computed = 0

    # -- one pass ----------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> Plan:
        """Reserve blocks and choose the rows of the next pass."""
        self._moves = []
        if self._swaps and self._idle:
            self._swap_in()
        decodes = [
            Segment(r, GPU_TIER, r.num_tokens - 1, 1, samples=True, prefill=False)
            for r in tuple(self._decoding)
            if r.state is State.DECODE and self._reserve(r)
        ]
        idle = self._idle_rows() if self._idle else ()
        segments = decodes + self._prefills(self.config.max_num_batched_tokens - len(decodes), now_ns)
        return Plan(Batch(tuple(segments)) if segments else None, idle, tuple(self._moves))

    def _swap_in(self) -> None:
        """Requests of the CPU tier move up while the GPU tier has room, the oldest first."""
        pool, share = self.pools[GPU_TIER], self.policy.swap_in_below
        assert share is not None
        for request in tuple(self._idle):
            need = blocks_for(request.num_tokens, self._page)
            if pool.num_blocks - pool.num_free + need > share * pool.num_blocks:
                return
            if request.state is State.DECODE and not request.in_flight:
                self._move(request, GPU_TIER)

    def _swap_out(self, request: Request) -> bool:
        """Move a GPU request down instead of preempting it; False when the CPU tier has no room for it either."""
        free = self.pools[CPU_TIER].num_free
        if not self._swaps or request.state is not State.DECODE or blocks_for(request.num_tokens, self._page) > free:
            return False
        self._move(request, CPU_TIER)
        return True

    def _move(self, request: Request, tier: str) -> None:
        _discard(self._decoding if request.tier == GPU_TIER else self._idle, request)
        request.num_computed = request.num_tokens - 1  # the newest token has no K,V yet
        self._moves.append(Move(request, tuple(request.blocks), request.num_computed))
        request.tier = tier
        request.blocks = self.pools[tier].allocate(blocks_for(request.num_tokens, self._page))
        request.state = State.MOVING
        request.in_flight = True

    def moved(self, move: Move, now_ns: int) -> None:
        """The K,V of a moving request has arrived."""
        request = move.request
        self.pools[move.source].free(list(move.blocks))
        if request.state is State.LEAVING:
            self.released(request, now_ns)
            return
        request.in_flight = False
        request.state = State.DECODE
        insort(self._decoding if request.tier == GPU_TIER else self._idle, request, key=_arrival)

    def _idle_rows(self) -> tuple[CpuRow, ...]:
        """CPU rows that may be launched, oldest request first, as many as the policy wants to see."""
        self._idle = [r for r in self._idle if not r.in_flight]
        cap = self.policy.launch_cap
        rows: list[CpuRow] = []
        for r in tuple(self._idle):
            if cap is not None and len(rows) >= cap:
                break
            if r.state is State.DECODE and self._reserve(r):
                rows.append(CpuRow(r, len(r.token_ids) - 1))
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
                _discard(self._prefilling, request)
                insort(self._decoding if request.tier == GPU_TIER else self._idle, request, key=_arrival)

    def returned(self, request: Request) -> None:
        """A CPU row got its token and goes on: it waits for the next launch."""
        at = bisect_left(self._idle, _arrival(request), key=_arrival)
        if at == len(self._idle) or self._idle[at] is not request:
            self._idle.insert(at, request)

    def cpu_load(self) -> tuple[int, int]:
        """Requests that decode on the CPU tier, and the keys that they attend to."""
        keys = [len(r.token_ids) for r in self.running if r.tier == CPU_TIER and r.state is State.DECODE]
        return len(keys), sum(keys)

    def quiet_passes(self, batch: Batch) -> int:
        """How many passes after the coming one are certain to have exactly its rows: until one ends or blocks run out.

        The caller stops earlier when a request arrives. 0 where anything else may happen: prompts under way, CPU rows,
        or a queue whose head might be admitted.
        """
        if self._prefilling or self._idle or len(self._decoding) != len(batch.segments):
            return 0
        if len(self.running) != len(self._decoding):
            return 0
        passes = min(r.max_tokens - r.num_output for r in self._decoding) - 1
        free = self.pools[GPU_TIER].num_free
        while passes > 0 and sum(self._missing(r, passes) for r in self._decoding) > free:
            passes //= 2
        return max(0, passes)

    def _missing(self, request: Request, more: int) -> int:
        return blocks_for(request.num_tokens + more, self._page) - len(request.blocks)

    def reserve_ahead(self, batch: Batch, passes: int) -> None:
        """Pages for ``passes`` passes beyond what is known, for every row; never more than ``quiet_passes`` said."""
        pool = self.pools[GPU_TIER]
        for s in batch.segments:
            request = s.request
            assert isinstance(request, Request)
            missing = self._missing(request, passes - 1)
            if missing > 0:
                request.blocks += pool.allocate(missing)

    def _reserve(self, request: Request) -> bool:
        """Make sure that the page of the request's newest token is there; False when it must wait or was preempted."""
        if len(request.blocks) * self._page >= len(request.token_ids):
            return True
        pool = self.pools[request.tier]
        while len(request.blocks) * self.config.page_size < request.num_tokens:
            if pool.num_free:
                request.blocks += pool.allocate(1)
                continue
            if any(r.state is State.LEAVING and r.tier == request.tier for r in self.running):
                return False  # blocks are on their way back
            if any(m.source == request.tier for m in self._moves):
                return False  # as above, once a move is through
            victim = max((r for r in self.running if r.tier == request.tier and r.blocks), key=_arrival)
            if request.tier == GPU_TIER and self._swap_out(victim):
                return False
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _prefills(self, budget: int, now_ns: int) -> list[Segment]:
        segments: list[Segment] = []
        for request in self._prefilling:
            if budget > 0:
                budget -= self._chunk(request, budget, segments)
        while budget > 0 and self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            tier = self.policy.place(self._view(request), {t: self._tier_view(t) for t in TIERS})
            if tier is None or (tier == CPU_TIER and request.num_tokens > budget and self._staging_taken(segments)):
                break
            self._admit(request, tier, now_ns)
            budget -= self._chunk(request, budget, segments)
        return segments

    def _chunk(self, request: Request, budget: int, segments: list[Segment]) -> int:
        start = request.num_computed
        count = min(budget, request.num_tokens - start)
        last = start + count == request.num_tokens
        segments.append(Segment(request, request.tier, start, count, samples=last, prefill=True))
        return count

    def _staging_taken(self, segments: list[Segment]) -> bool:
        """A chunked CPU-tier prefill that goes on after this pass owns the staging area of earlier K,V."""
        through = {id(s.request) for s in segments if s.samples}
        return any(r.tier == CPU_TIER and id(r) not in through for r in self._prefilling)

    def _admit(self, request: Request, tier: str, now_ns: int) -> None:
        if tier not in TIERS:
            raise InputError(
                f"policy '{self.policy.name}' placed request {request.request_id} on the unknown tier '{tier}'"
            )
        self.waiting.pop(0)
        request.tier = tier
        request.blocks = self.pools[tier].allocate(blocks_for(request.num_tokens, self.config.page_size))
        request.state = State.PREFILL
        if request.scheduled_ns is None:
            request.scheduled_ns = now_ns
        insort(self.running, request, key=_arrival)
        insort(self._prefilling, request, key=_arrival)

    def _view(self, request: Request) -> RequestView:
        page = self.config.page_size
        return RequestView(request.index, blocks_for(request.num_tokens, page), blocks_for(request.max_cached, page))

    def _tier_view(self, tier: str) -> TierView:
        pool = self.pools[tier]
        return TierView(pool.num_free, pool.num_blocks)


def _arrival(request: Request) -> tuple[int, int]:
    return request.arrival_ns, request.index


def _discard(queue: list[Request], request: Request) -> None:
    """Take ``request`` out of a queue in order of arrival, if it is there."""
    at = bisect_left(queue, _arrival(request), key=_arrival)
    if at < len(queue) and queue[at] is request:
        del queue[at]
