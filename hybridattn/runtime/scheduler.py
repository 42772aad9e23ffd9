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
from hybridattn.policies.base import Policy, PromptView, RequestView, TierView
from hybridattn.runtime.config import EngineConfig
from hybridattn.runtime.contexts import Contexts
from hybridattn.runtime.request import Request, State


@dataclass(frozen=True, slots=True)
class Move:
    """A request whose K,V goes to the tier that it now names; ``blocks`` of the other tier are held until then.

    ``then`` is what it does next: decode on, prefill what a session's turn adds to its context, or pause.
    """

    request: Request
    blocks: tuple[int, ...]
    tokens: int
    then: State = State.DECODE

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
        self._can_move = can_move
        self._swaps = can_move and policy.swap_in_below is not None
        self._asks_prompts = type(policy).prompts is not Policy.prompts
        self._moves: list[Move] = []  # begun by this pass
        self._under_way: list[Move] = []  # begun and not known to have arrived
        self.contexts = Contexts(self.pools, config.page_size)

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
        if request.keep and reason in ("stop", "length") and request.blocks:
            self._leave_queues(request)
            self.contexts.keep(request)
        else:
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

    def _leave_queues(self, request: Request) -> None:
        for queue in (self._prefilling, self._decoding, self._idle):
            _discard(queue, request)

    def _give_back(self, request: Request) -> None:
        self._leave_queues(request)
        if request.blocks:
            self.pools[request.tier].free(request.blocks)
        request.blocks = []
        request.num_computed = 0

    # -- one pass ----------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> Plan:
        """Reserve blocks and choose the rows of the next pass."""
        self._moves = []
        decodes = [
            Segment(r, GPU_TIER, r.num_tokens - 1, 1, samples=True, prefill=False)
            for r in tuple(self._decoding)
            if r.state is State.DECODE and self._reserve(r)
        ]
        if self._swaps and self._idle and len(decodes) == len(self._decoding):  # no GPU row wants for a page
            self._swap_in()
        idle = self._idle_rows() if self._idle else ()
        segments = decodes + self._prefills(now_ns, decodes, idle)
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
        need = blocks_for(request.num_tokens, self._page)
        if not self._swaps or request.state is not State.DECODE or need > self._room(CPU_TIER):
            return False
        self._move(request, CPU_TIER)
        return True

    def move(self, request: Request, tier: str) -> Move | None:
        """Begin to move a request that decodes to ``tier`` now; None when it cannot: a row of it is in flight, its
        prompt is under way, it is there already, or there is no room."""
        if tier not in TIERS or not self._can_move or request.tier == tier:
            return None
        need = blocks_for(request.num_tokens, self._page)
        if request.state is not State.DECODE or request.in_flight or need > self._room(tier):
            return None
        self._move(request, tier)
        return self._moves.pop()

    def park(self) -> tuple[Move, ...]:
        """Contexts of sessions that have paused leave the GPU tier, as far as the CPU tier has room that is free."""
        self._moves = []
        if self.contexts and self._can_move and self.config.pause_tier == CPU_TIER:
            for held in self.contexts.on_gpu():
                if len(held.blocks) <= self.pools[CPU_TIER].num_free:
                    self._move_context(held, CPU_TIER)
        return tuple(self._moves)

    def _move(self, request: Request, tier: str) -> None:
        _discard(self._decoding if request.tier == GPU_TIER else self._idle, request)
        request.num_computed = request.num_tokens - 1  # the newest token has no K,V yet
        blocks = tuple(request.blocks)
        request.blocks = self._take(tier, blocks_for(request.num_tokens, self._page))
        request.tier = tier
        request.state = State.MOVING
        self._begin(Move(request, blocks, request.num_computed))

    def _move_context(self, held: Request, tier: str) -> None:
        blocks = tuple(held.blocks)
        held.blocks = self._take(tier, len(blocks))
        held.tier = tier
        self._begin(Move(held, blocks, held.num_computed, State.PAUSED))

    def _begin(self, move: Move) -> None:
        move.request.in_flight = True
        self._moves.append(move)
        self._under_way.append(move)

    def moved(self, move: Move, now_ns: int) -> None:
        """The K,V of a moving request has arrived."""
        request = move.request
        self._under_way.remove(move)
        self.pools[move.source].free(list(move.blocks))
        if move.then is State.PAUSED:
            self.contexts.arrived(request)
            return
        if request.state is State.LEAVING:
            self.released(request, now_ns)
            return
        request.in_flight = False
        request.state = move.then
        queue = self._decoding if request.tier == GPU_TIER else self._idle
        insort(self._prefilling if move.then is State.PREFILL else queue, request, key=_arrival)

    def give_up_moves(self) -> None:
        """Nothing is in flight any more: blocks that were moved from go back, and every context is forgotten."""
        for move in self._under_way:
            self.pools[move.source].free(list(move.blocks))
            if move.request.state is State.FINISHED:  # a context that was dropped on its way
                self.contexts.arrived(move.request)
        self._under_way.clear()
        self.contexts.clear()

    def held_by_moves(self, tier: str) -> list[int]:
        """Blocks of a tier that moves under way still read from."""
        return [b for m in self._under_way if m.source == tier for b in m.blocks]

    def _room(self, tier: str) -> int:
        """Blocks that are free, or that contexts of sessions would give up."""
        return self.pools[tier].num_free + (self.contexts.reclaimable(tier) if self.contexts else 0)

    def _take(self, tier: str, count: int) -> list[int]:
        """``count`` blocks; contexts of sessions give theirs up where too few are free."""
        pool = self.pools[tier]
        while pool.num_free < count and self.contexts.evict(tier):
            pass
        return pool.allocate(count)

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
            if self.contexts.evict(request.tier):
                continue
            if any(m.source == request.tier and m.then is State.PAUSED for m in self._under_way):
                return False
            holders = [r for r in self.running if r.tier == request.tier and r.blocks]
            victim = max(holders, key=_younger)
            if request.tier == GPU_TIER and self._swap_out(victim):
                return False
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _prefills(self, now_ns: int, decodes: list[Segment], idle: tuple[CpuRow, ...]) -> list[Segment]:
        segments: list[Segment] = []
        budget = self.config.max_num_batched_tokens - len(decodes)
        wanted: int | None = None
        for request in self._prefilling:
            if budget > 0:
                budget -= self._chunk(request, budget, segments)
        while budget > 0 and self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            held = self.contexts.find(request.session)
            if held is not None and held.in_flight:
                break  # its context is on its way
            tier = self.policy.place(self._view(request), {t: self._tier_view(t) for t in TIERS})
            if tier is None or (tier == CPU_TIER and self._must_wait_for_staging(request, held, budget, segments)):
                break
            if held is not None and not self._can_take_up(held, tier):
                break
            if tier == CPU_TIER and self._asks_prompts:
                if wanted is None:
                    wanted = self._wanted_prompts(budget, segments, decodes, idle)
                if wanted <= 0:
                    break
                wanted -= 1
            self._admit(request, tier, now_ns)
            if request.state is State.PREFILL:
                budget -= self._chunk(request, budget, segments)
        return segments

    def _can_take_up(self, held: Request, tier: str) -> bool:
        """False: the context first has to go down. A prompt that goes on from K,V on the CPU tier needs the staging
        area, which is given to those who are admitted and not to those who arrive."""
        if held.tier == tier:
            return True
        if not self._can_move:
            self.contexts.drop(held.session)
        elif tier == CPU_TIER:
            self._move_context(held, tier)
            return False
        return True

    def _wanted_prompts(
        self, budget: int, segments: list[Segment], decodes: list[Segment], idle: tuple[CpuRow, ...]
    ) -> int:
        """How many of the next prompts the policy wants to read for the CPU tier in this pass.

        Where requests may be swapped out, room for those of the GPU tier is kept, as far as the CPU tier is large.
        """
        candidates: list[int] = []
        pool, seats = self.pools[CPU_TIER], self.config.max_num_seqs - len(self.running)
        kept = min(self.pools[GPU_TIER].num_blocks, pool.num_blocks // 4) if self._swaps and self.running else 0
        free = self._room(CPU_TIER) - kept
        for request in self.waiting[:seats]:
            tokens, need = request.num_tokens, blocks_for(request.num_tokens, self._page)
            if need > free or (tokens > budget and candidates):
                break
            candidates.append(min(tokens, budget))
            free, budget = free - need, budget - candidates[-1]
        if not candidates:
            return 0
        view = PromptView(
            tuple(candidates),
            len(decodes),
            sum([s.start + 1 for s in decodes]),
            tuple([(s.num_tokens, s.start + s.num_tokens) for s in segments]),
            tuple([row.position + 1 for row in idle]),
        )
        return self.policy.prompts(view)

    def _chunk(self, request: Request, budget: int, segments: list[Segment]) -> int:
        start = request.num_computed
        count = min(budget, request.num_tokens - start)
        last = start + count == request.num_tokens
        segments.append(Segment(request, request.tier, start, count, samples=last, prefill=True))
        return count

    def _must_wait_for_staging(
        self, request: Request, held: Request | None, budget: int, segments: list[Segment]
    ) -> bool:
        if held is None:
            return request.num_tokens > budget and self._staging_taken(segments)
        pulled = any(s.tier == CPU_TIER and s.start > 0 for s in segments if s.prefill)  # in this very pass
        return pulled or self._staging_taken(segments)

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
        request.state = State.PREFILL
        self._give_blocks(request)
        if request.scheduled_ns is None:
            request.scheduled_ns = now_ns
        insort(self.running, request, key=_arrival)
        if request.state is State.PREFILL:
            insort(self._prefilling, request, key=_arrival)

    def _give_blocks(self, request: Request) -> None:
        """Pages of all known tokens; those of the session's context are taken up, or filled from the other tier."""
        need, tier = blocks_for(request.num_tokens, self._page), request.tier
        taken = self.contexts.take(request.session, request) if request.session else None
        if taken is None:
            request.blocks = self._take(tier, need)
            return
        held, request.num_computed = taken
        if held.tier == tier:
            request.blocks = held.blocks + self._take(tier, need - len(held.blocks))
            return
        request.blocks = self._take(tier, need)
        request.state = State.MOVING
        self._begin(Move(request, tuple(held.blocks), request.num_computed, State.PREFILL))

    def _view(self, request: Request) -> RequestView:
        page = self.config.page_size
        return RequestView(request.index, blocks_for(request.num_tokens, page), blocks_for(request.max_cached, page))

    def _tier_view(self, tier: str) -> TierView:
        return TierView(self._room(tier), self.pools[tier].num_blocks)


def _arrival(request: Request) -> tuple[int, int]:
    return request.arrival_ns, request.index


def _younger(request: Request) -> tuple[bool, int, int]:
    """Who gives blocks back first: the youngest; one whose K,V is on its way comes last, or it moved for nothing."""
    return request.state is not State.MOVING, *_arrival(request)


def _discard(queue: list[Request], request: Request) -> None:
    """Take ``request`` out of a queue in order of arrival, if it is there."""
    at = bisect_left(queue, _arrival(request), key=_arrival)
    if at < len(queue) and queue[at] is request:
        del queue[at]
