"""When it pays to keep a request's oldest K,V in host memory and to attend to them there, by closed forms.

One layer, with ``hot`` tokens read on the GPU and ``cold`` ones on the CPU at the same time:

    gpu.compute   |attention: T = hot * gpu_token_ns|.. wait ..|linear_ns|
    the others    |tau_ns: q down, out up, merge|cold * cpu_token_ns|        linear_ns + max(T, tau_ns + cold * ...)

Derived in docs/crossover.md, section 6. Rates are constants here, and all rows pass through one linear stage whose time
does not depend on their number.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridattn.core.errors import InputError
from hybridattn.core.op import D2H, GPU, H2D
from hybridattn.cost.costs import Costs


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """Times of one layer.

    Attributes
    ----------
    linear_ns : float
        Everything but attention.
    gpu_token_ns, cpu_token_ns : float
        Attention of one K,V token on each processor.
    tau_ns : float
        What a cold part costs beside that: the way down, the hand-over, the way up and the merge.
    """

    linear_ns: float
    gpu_token_ns: float
    cpu_token_ns: float
    tau_ns: float

    def __post_init__(self) -> None:
        if not (self.linear_ns >= 0 and self.gpu_token_ns > 0 and self.cpu_token_ns > 0 and self.tau_ns >= 0):
            raise InputError(f"{self}: the times of a token must be positive, and the others at least 0")

    @property
    def ratio(self) -> float:
        """How many times as fast the GPU reads K,V (r)."""
        return self.cpu_token_ns / self.gpu_token_ns

    def layer_ns(self, hot: float, cold: float) -> float:
        """A layer over these tokens."""
        cold_ns = self.tau_ns + cold * self.cpu_token_ns if cold else 0.0
        return self.linear_ns + max(hot * self.gpu_token_ns, cold_ns)

    def hidden(self, hot: float) -> float:
        """Cold tokens that cost no time beside ``hot`` ones (C*)."""
        return max(0.0, (hot * self.gpu_token_ns - self.tau_ns) / self.cpu_token_ns)

    def more_pays(self, hot: float) -> bool:
        """Cold tokens beyond the hidden ones go on paying, where GPU memory limits the batch to ``hot``."""
        return (self.linear_ns + self.tau_ns) / self.cpu_token_ns > hot

    def within(self, hot: float, limit: float) -> float:
        """Cold tokens beside ``hot`` ones with which a layer takes at most ``limit`` times as long as without."""
        return max(0.0, (limit * self.layer_ns(hot, 0) - self.linear_ns - self.tau_ns) / self.cpu_token_ns)

    def left(self, hot: float, cold: float) -> float:
        """Tokens of whole requests that the CPU can attend to in a layer, while no cold part keeps it busy."""
        return self.layer_ns(hot, cold) / self.cpu_token_ns - cold

    def gain(self, hot: float) -> float:
        """Throughput with the hidden tokens over that without, where GPU memory limits the batch to ``hot`` (gain*)."""
        return 1 + self.hidden(hot) / hot

    def gain_together(self, hot: float) -> float:
        """The same with micro-batches of whole requests for all that the CPU has left: the bound of section 2."""
        return 1 + self.layer_ns(hot, 0) / (self.cpu_token_ns * hot)

    def best_share(self, tokens: float) -> float:
        """Share of ``tokens`` that is best cold where all would fit (f*)."""
        return self.hidden(tokens) / tokens * self.ratio / (1 + self.ratio)


def split_layer(costs: Costs, rows: int, tokens: int) -> SplitLayer:
    """The times of a layer of ``rows`` rows, priced at about ``tokens`` K,V tokens.

    What attention costs beside its tokens belongs to the linear stages on the GPU, and to tau, less that, on the CPU.
    """
    few, many = rows + tokens // 2, rows + max(tokens, 2)
    gpu, cpu = ([price(rows, n) for n in (few, many)] for price in (costs.attention_ns, costs.cpu_ns))
    gpu_token_ns, cpu_token_ns = (max((p[1] - p[0]) / (many - few), 1e-6) for p in (gpu, cpu))
    gpu_rest, cpu_rest = max(0.0, gpu[0] - few * gpu_token_ns), max(0.0, cpu[0] - few * cpu_token_ns)
    work, price = costs.cost, costs.pricing.work_ns
    ways = price(D2H, work.send_q(rows)) + price(H2D, work.fetch_cold(rows)) + price(GPU, work.merge(rows))
    return SplitLayer(
        costs.linear_ns(rows) + gpu_rest, gpu_token_ns, cpu_token_ns, max(0.0, ways + cpu_rest - gpu_rest)
    )


@dataclass(frozen=True, slots=True)
class SplitOutlook:
    """What requests over both tiers promise, by closed forms.

    Attributes
    ----------
    case : see :func:`split_case`
    cold_tokens : what is best cold, all requests together
    gain : throughput over ``over``
    together : the same with micro-batches of whole requests beside them; None where no request is left for these
    """

    case: int
    cold_tokens: int
    gain: float
    over: str
    together: float | None = None

    def __str__(self) -> str:
        why = ("GPU memory limits the batch", "everything fits", "not even one request fits on the GPU")[self.case - 1]
        beside = f", up to {self.together:.2f}x with whole requests on the CPU tier beside" if self.together else ""
        return f"case {self.case}, {why}: {self.cold_tokens:,} cold tokens, {self.gain:.2f}x {self.over}{beside}"


def split_outlook(costs: Costs, requests: int, context: int, gpu_tokens: int) -> SplitOutlook:
    """Which case ``requests`` requests of ``context`` tokens are beside ``gpu_tokens`` tokens of room, and its gain."""
    case = split_case(requests, context, gpu_tokens)
    if case == 3:
        layer, cold = split_layer(costs, 1, context), context - gpu_tokens
        return SplitOutlook(
            3, cold, layer.layer_ns(0, context) / layer.layer_ns(gpu_tokens, cold), "the CPU tier alone"
        )
    rows = min(requests, gpu_tokens // context)
    hot = rows * context
    layer = split_layer(costs, rows, hot)
    if case == 2:
        cold = round(layer.best_share(hot) * hot)
        return SplitOutlook(2, cold, layer.layer_ns(hot, 0) / layer.layer_ns(hot - cold, cold), "GPU-only")
    wanting = (requests - rows) * context
    cold = wanting if layer.more_pays(hot) else min(wanting, int(layer.hidden(hot)))
    gain = (hot + cold) / hot * layer.layer_ns(hot, 0) / layer.layer_ns(hot, cold)
    together = min(layer.gain_together(hot), 1 + wanting / hot) if wanting > cold else None
    return SplitOutlook(1, cold, gain, "GPU-only", together)


def split_case(requests: int, context: int, gpu_tokens: int) -> int:
    """Which case of docs/crossover.md, section 6, a load is.

    1: GPU memory limits the batch. 2: everything fits. 3: not even one request does.
    """
    if context > gpu_tokens:
        return 3
    return 2 if requests * context <= gpu_tokens else 1
