"""Fixed policies: GPU only, CPU only, a fixed share, blocking offload, asynchronous overlap."""

from __future__ import annotations

from collections.abc import Sequence

from hybridattn.core.errors import InputError
from hybridattn.core.op import SKIPPED, WAITED
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.policies.base import Decision, DispatchView, LayerView, MicroBatchView, Policy


def shares(idle: int, rows: int, micro_batches: int, free: int) -> tuple[int, ...]:
    """Sizes of at most ``free`` micro-batches made of ``idle`` rows, each as large as ``rows`` split into
    ``micro_batches``."""
    each = max(1, -(-rows // micro_batches))
    return tuple(min(each, idle - at) for at in range(0, idle, each))[:free]


class GpuOnly(Policy):
    """Everything on the GPU; what does not fit waits in the queue.

    Parameters
    ----------
    swap : bool
        When the GPU tier runs full, park the youngest request's K,V in host memory until there is room again, instead
        of computing it anew. Nothing is computed there.
    moves_block : bool
        A step waits for the copies that begin with it.
    """

    name = "gpu_only"
    tiers = (GPU_TIER,)

    def __init__(self, cpu_fraction: float | None = None, swap: bool = False, moves_block: bool = False) -> None:
        super().__init__(cpu_fraction)
        self.swap_in_below = 1.0 if swap else None
        self.dispatch_cap = 0 if swap else None
        self.moves_block = moves_block

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        return ()

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        raise InputError("policy 'gpu_only' was asked about a micro-batch of CPU rows")


class SyncOffload(Policy):
    """Blocking offload: the GPU waits at every layer for the CPU rows, which finish a token in one step.

    gpu.compute   |attn|....wait....|linear|attn|....wait....|linear|
    cpu.attention |--- attention ---|      |--- attention ---|

    Parameters
    ----------
    max_rows : int, optional
        CPU rows of a step at most, oldest requests first; the others wait for their turn. With as many as the CPU
        serves during the GPU's own attention, nothing waits.
    """

    name = "sync_offload"
    priority = WAITED

    def __init__(self, cpu_fraction: float | None = None, max_rows: int | None = None) -> None:
        super().__init__(cpu_fraction)
        if max_rows is not None and max_rows < 1:
            raise InputError(f"max_rows must be at least 1, got {max_rows}")
        self.max_rows = max_rows
        self.dispatch_cap = max_rows

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        rows = min(view.idle_rows, self.max_rows or view.idle_rows)
        return (rows,) if rows else ()

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        return Decision.JOIN if micro_batch.ready else Decision.WAIT


class FixedFraction(SyncOffload):
    """A fixed share of the requests lives on the CPU tier, whatever fits where; the GPU waits for it at every layer."""

    name = "fixed_fraction"

    def __init__(self, cpu_fraction: float = 0.5) -> None:
        super().__init__(cpu_fraction)


class CpuOnly(Policy):
    """All decode attention on the CPU (FastDecode): micro-batches take turns, linear stages on the GPU.

    gpu.compute   |linear A|linear B|linear A|linear B|      prompts join whatever is ready
    cpu.attention |    B   |    A   |    B   |

    Parameters
    ----------
    micro_batches : int
        How many take turns.
    """

    name = "cpu_only"
    hooks = frozenset({"detour"})
    tiers = (CPU_TIER,)
    priority = WAITED

    def __init__(self, micro_batches: int = 2) -> None:
        super().__init__()
        if micro_batches < 1:
            raise InputError(f"micro_batches must be at least 1, got {micro_batches}")
        self.micro_batches = micro_batches

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        free = self.micro_batches - view.micro_batches
        if not view.idle_rows or free < 1:
            return ()
        each = -(-view.idle_rows // free)
        return tuple(min(each, view.idle_rows - at) for at in range(0, view.idle_rows, each))

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        return Decision.JOIN if micro_batch.ready else Decision.SKIP

    def detour(self, micro_batches: Sequence[MicroBatchView], at: LayerView) -> int | None:
        return next((c.number for c in micro_batches if c.ready and c.layer != at.layer + 1), None)


class AsyncOverlap(Policy):
    """One layer per step: a micro-batch joins when it is ready as the GPU comes by, and is skipped otherwise.

        gpu.compute   |a0|lin0|a1|lin1| ... |aL-1|linL-1|a0|lin0|a1|lin1| ...
        cpu.attention      join ^ |---- attention of layer 1 ----|  ^ join at layer 1, one step later

    Parameters
    ----------
    max_micro_batches : int
        Micro-batches in flight at most; rows that become idle meanwhile leave together with the next one.
    same_step : bool
        Also join a micro-batch whose attention was submitted during this very step, when it is ready already. Off, a
        micro-batch advances one layer per step, as in the closed form of docs/crossover.md.
    equal : bool
        Split the CPU rows into ``max_micro_batches`` equal micro-batches and dispatch one of them per step, so that
        they spread over the layers, instead of dispatching all that are idle as one.
    max_rows : int, optional
        CPU rows in flight at most.
    max_wait_us : float
        How long the GPU waits at most, at a layer where a micro-batch stands that is not ready yet [us]. 0 as
        published; as long as a small micro-batch takes beyond the GPU's own attention, it advances several layers per
        step.
    """

    name = "async_overlap"
    priority = SKIPPED

    def __init__(
        self,
        cpu_fraction: float | None = None,
        max_micro_batches: int = 4,
        same_step: bool = True,
        equal: bool = False,
        max_rows: int | None = None,
        max_wait_us: float = 0.0,
    ) -> None:
        super().__init__(cpu_fraction)
        if max_micro_batches < 1:
            raise InputError(f"max_micro_batches must be at least 1, got {max_micro_batches}")
        if max_rows is not None and max_rows < 1:
            raise InputError(f"max_rows must be at least 1, got {max_rows}")
        self.max_rows = max_rows
        self.max_micro_batches = max_micro_batches
        self.same_step = same_step
        self.equal = equal
        if not 0 <= max_wait_us < float("inf"):
            raise InputError(f"max_wait_us must be a number of microseconds, at least 0, got {max_wait_us}")
        self._max_wait_ns = round(max_wait_us * 1000)

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        idle = view.idle_rows
        if self.max_rows is not None:
            idle = min(idle, max(0, self.max_rows - view.flying_rows))
        free = self.max_micro_batches - view.micro_batches
        if free < 1 or idle < 1:
            return ()
        if not self.equal:
            return (idle,)
        return shares(idle, idle + view.flying_rows, self.max_micro_batches, 1)

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        if micro_batch.same_step and not self.same_step:
            return Decision.SKIP
        if micro_batch.ready:
            return Decision.JOIN
        return Decision.WAIT if self._max_wait_ns else Decision.SKIP

    def max_wait_ns(self, micro_batch: MicroBatchView, at: LayerView) -> int | None:
        return self._max_wait_ns
