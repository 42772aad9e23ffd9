"""Prompts: which go on or begin in a step, on which tier, and how many of their tokens.

First come, first served: a head of the queue that cannot begin holds back those behind it. What does not fit into the
rows of a step goes on in the next ones, from the K,V of the chunks before; for a request of the CPU tier these come up
into one staging area, so only one such prompt is under way at a time. The oldest prompt takes all rows that are left:
how long a short one may wait behind it is said in docs/limits.md.
"""

from __future__ import annotations

from functools import partial

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.params import as_integer
from hybridattn.core.request import Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER, TIERS, CpuRow, Segment
from hybridattn.kv.manager import KVManager
from hybridattn.policies.answers import refused
from hybridattn.policies.base import Policy, PromptView, RequestView, TierView
from hybridattn.scheduler.cold_pages import ColdPages
from hybridattn.scheduler.queues import Queues
from hybridattn.scheduler.swaps import Swaps


class Prompts:
    """Admission and chunked prefill."""

    __slots__ = ("_asks", "_cold_pages", "_config", "_kv", "_policy", "_queues", "_swaps")

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        queues: Queues,
        kv: KVManager,
        swaps: Swaps,
        cold_pages: ColdPages,
    ) -> None:
        self._config = config
        self._policy = policy
        self._queues = queues
        self._kv = kv
        self._swaps = swaps
        self._cold_pages = cold_pages
        self._asks = "prompts" in policy.hooks

    def resume(self, now_ns: int) -> None:
        """Admit those in front of the queue that were preempted and lack no K,V but their newest token's: there is
        nothing to read."""
        queues, contexts = self._queues, self._kv.contexts
        while queues.waiting and len(queues.running) < self._config.max_num_seqs:
            request = queues.waiting[0]
            held = contexts.preempted(request)
            if held is None or held.in_flight or held.num_computed != request.num_tokens - 1:
                break
            tier, cold = self._place(request, held)
            if tier is None or not self._can_take_up(request, held, tier, cold):
                break
            self._admit(request, tier, cold, now_ns)

    def segments(self, now_ns: int, decodes: list[Segment], idle: tuple[CpuRow, ...]) -> list[Segment]:
        """Chunks for the coming step, beside its decode rows and the idle CPU rows."""
        queues = self._queues
        segments: list[Segment] = []
        budget = self._config.max_num_batched_tokens - len(decodes)
        wanted: int | None = None
        for request in queues.prefilling:
            if budget > 0:
                budget -= self._chunk(request, budget, segments)
        while budget > 0 and queues.waiting and len(queues.running) < self._config.max_num_seqs:
            request = queues.waiting[0]
            tier, cold = self._tier_for(request, budget, segments)
            if tier is None:
                break
            if tier == CPU_TIER and self._asks:
                if wanted is None:
                    wanted = self._wanted(budget, segments, decodes, idle)
                if wanted <= 0:
                    break
                wanted -= 1
            self._admit(request, tier, cold, now_ns)
            if request.state is State.PREFILL:
                budget -= self._chunk(request, budget, segments)
        return segments

    # -- may it begin? -----------------------------------------------------------------------------------------------

    def _tier_for(self, request: Request, budget: int, segments: list[Segment]) -> tuple[str | None, int]:
        """The tier that takes the request now, and how many of its pages lie on the CPU tier beside; None: it waits,
        for room, for the staging area, or for its context."""
        held = self._kv.contexts.find(request)
        if held is not None and held.in_flight:
            return None, 0  # its context is on its way
        whole = held is not None and held.num_computed >= request.num_computed  # or it lost some since
        if not whole and self._kv.must_wait(request, self._queues.prefilling):
            return None, 0
        tier, cold = self._place(request, held)
        if tier is None:
            return None, 0
        if (tier == CPU_TIER or cold) and self._must_wait_for_staging(request, cold, held, budget, segments):
            return None, 0
        if held is not None and not self._can_take_up(request, held, tier, cold):
            return None, 0
        return tier, cold

    def _place(self, request: Request, held: Request | None) -> tuple[str | None, int]:
        """The policy's choice, and how many pages are cold; K,V that lie on the CPU tier stay there where both tiers
        have room and attending to them is sooner done than bringing them up."""
        kv, policy, queues = self._kv, self._policy, self._queues
        served = len(queues.decoding) + sum([r.tier == GPU_TIER for r in queues.prefilling])
        now, most = kv.need(request), kv.need_at_most(request)
        view = RequestView(request.index, now, most, request.num_tokens, len(queues.waiting), served)
        free = kv.free if held is not None else partial(kv.free_for, request)
        rooms = {t: TierView(free(t), kv.pools[t].num_blocks) for t in TIERS}
        tier = policy.place(view, rooms)
        if self._cold_pages.wanted and (tier != CPU_TIER or policy.splits_first):
            cold = self._cold_pages.at_admission(request, waits=tier != CPU_TIER)
            if cold is not None or tier != CPU_TIER:
                return (None, 0) if cold is None else (GPU_TIER, cold)
        costs = policy.costs
        if tier != GPU_TIER or held is None or held.tier != CPU_TIER or costs is None:
            return tier, 0
        if CPU_TIER not in policy.allowed(request.index) or not rooms[CPU_TIER].admits(view):
            return tier, 0
        left = request.max_tokens - request.num_output
        return (tier if costs.pays_to_move_up(held.num_computed, left) else CPU_TIER), 0

    def _must_wait_for_staging(
        self, request: Request, cold: int, held: Request | None, budget: int, segments: list[Segment]
    ) -> bool:
        if held is None and not self._kv.has_prefix(request, CPU_TIER):
            return bool(cold or request.num_tokens > budget) and self._staging_taken(segments)
        pulled = any(s.loads for s in segments if s.prefill)  # in this very step
        return pulled or self._staging_taken(segments)

    def _staging_taken(self, segments: list[Segment]) -> bool:
        """A chunked prefill with K,V on the CPU tier that goes on after this step owns the staging area of earlier
        K,V."""
        through = {id(s.request) for s in segments if s.samples}
        begun = (r for r in self._queues.running if r.state in (State.PREFILL, State.MOVING))
        return any(r.pages.stays_cold and id(r) not in through for r in begun)

    def _can_take_up(self, request: Request, held: Request, tier: str, cold: int) -> bool:
        """False: the context first has to go down, where its pages, or more of them, are to be cold. A prompt that goes
        on from K,V on the CPU tier needs the staging area, which is given to those who are admitted and not to those
        who arrive. One that cannot go where it is wanted is dropped."""
        hot = len(held.pages.hot)
        down = hot > 0 and (tier == CPU_TIER or cold > held.pages.num_cold)
        if not down and (held.tier == tier or self._swaps.possible):
            return True
        if self._swaps.possible and hot <= self._kv.free(CPU_TIER) - held.pages.num_cold:
            self._kv.move_context(held, CPU_TIER)
            return False
        contexts = self._kv.contexts
        contexts.drop(request if contexts.preempted(request) is held else held.session)
        return True

    def _wanted(self, budget: int, segments: list[Segment], decodes: list[Segment], idle: tuple[CpuRow, ...]) -> int:
        """How many of the next prompts the policy wants to read for the CPU tier in this step."""
        candidates = self._candidates(budget)
        if not candidates:
            return 0
        view = PromptView(
            candidates,
            len(decodes),
            sum([s.start + 1 for s in decodes]),
            tuple([(s.num_tokens, s.start + s.num_tokens) for s in segments]),
            tuple([row.position + 1 for row in idle]),
        )
        wanted = as_integer(answer := self._policy.prompts(view))
        if wanted is None or wanted < 0:
            raise refused(self._policy, "prompts", "how many prompts to read", answer)
        return wanted

    def _candidates(self, budget: int) -> tuple[int, ...]:
        """Tokens of the next prompts that the CPU tier has room for, cut to what one step can read.

        Where requests may be swapped out, room for those of the GPU tier is kept, as far as the CPU tier is large.
        """
        candidates: list[int] = []
        running, pools = self._queues.running, self._kv.pools
        most = min(pools[GPU_TIER].num_blocks, pools[CPU_TIER].num_blocks // 4)
        free = self._kv.free(CPU_TIER) - (most if self._swaps.wanted and running else 0)
        for request in self._queues.waiting[: self._config.max_num_seqs - len(running)]:
            tokens, need = request.num_tokens, self._kv.need(request)
            if need > free or (tokens > budget and candidates):
                break
            candidates.append(min(tokens, budget))
            free, budget = free - need, budget - candidates[-1]
        return tuple(candidates)

    # -- it begins ---------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, tier: str, cold: int, now_ns: int) -> None:
        if tier not in TIERS:
            raise InputError(
                f"policy '{self._policy.name}' placed request {request.request_id} on the unknown tier '{tier}'"
            )
        self._queues.waiting.pop(0)
        request.state = State.PREFILL
        self._kv.admit(request, tier, cold)
        if request.scheduled_ns is None:
            request.scheduled_ns = now_ns
        self._queues.admit(request)

    def _chunk(self, request: Request, budget: int, segments: list[Segment]) -> int:
        """The next tokens of a prompt, at most ``budget`` and all of one tier; returns how many."""
        start, cold = request.num_computed, len(request.pages.cold) * self._config.page_size
        on_cpu = start < cold
        count = min(budget, min(cold, request.num_tokens) - start if on_cpu else request.num_tokens - start)
        last = start + count == request.num_tokens
        tier = CPU_TIER if on_cpu else GPU_TIER
        segments.append(Segment(request, tier, start, count, last, prefill=True, cold=0 if on_cpu else cold))
        return count
