"""One request over both tiers: the GPU attends to its newest pages and the CPU to its oldest, for the same token."""

from __future__ import annotations

from hybridattn.core.errors import InputError
from hybridattn.core.stages import GPU_TIER, TIERS
from hybridattn.cost.costs import Costs
from hybridattn.cost.split import SplitLayer, split_layer
from hybridattn.policies.base import ColdView
from hybridattn.policies.delegate import Delegate
from hybridattn.policies.fixed import AsyncOverlap, SyncOffload


class Split(Delegate):
    """Cold pages where the GPU tier is full, as many as hide behind the GPU's own attention.

        gpu.compute   |attention: hot parts|merge|linear|
        cpu.attention    |cold parts|

    A request longer than the GPU tier is served once no other runs there. With room for everything this is
    ``gpu_only``, op by op. As a layout it may find whole requests on the CPU tier, which are waited for at every layer.

    Parameters
    ----------
    costs : Costs, optional
        Says how much hides (``hybridattn.cost.split``). Without it, and without a fixed bound, all that the GPU tier
        has no room for is cold.
    cold_share : float, optional
        At most this share of all K,V is cold, whatever hides.
    max_cold_tokens : int, optional
        At most so many tokens are cold, whatever hides.
    even_if_it_fits : bool
        Do not wait for the GPU tier to be full: ``cold_share``, or else the best share by the cost model, is cold at
        any time.
    gpu_limit : float, optional
        No more is cold than lets a token take this multiple of what it takes on the GPU alone, by the cost model.
    micro_batches : int
        Requests for which no more may be cold go to the CPU tier as a whole, in so many micro-batches, which have what
        the cold parts leave of the CPU's time (0: they wait).
    max_rows : int, optional
        Rows of these micro-batches at most.
    """

    name = "split"
    tiers: tuple[str, ...] = (GPU_TIER,)
    hooks = frozenset({"cold_pages"})

    def __init__(
        self,
        costs: Costs | None = None,
        cold_share: float | None = None,
        max_cold_tokens: int | None = None,
        even_if_it_fits: bool = False,
        gpu_limit: float | None = None,
        micro_batches: int = 0,
        max_rows: int | None = None,
    ) -> None:
        super().__init__()
        if cold_share is not None and not 0.0 <= cold_share <= 1.0:
            raise InputError(f"cold_share must lie in 0..1, got {cold_share}")
        if max_cold_tokens is not None and max_cold_tokens < 0:
            raise InputError(f"max_cold_tokens must be at least 0, got {max_cold_tokens}")
        if even_if_it_fits and costs is None and cold_share is None:
            raise InputError("even_if_it_fits needs a cost model (a profile of the machine), or a cold_share")
        if gpu_limit is not None and (costs is None or not gpu_limit >= 1):
            raise InputError(f"gpu_limit needs a cost model (a profile of the machine) and 1 at least, got {gpu_limit}")
        if micro_batches < 0:
            raise InputError(f"micro_batches must be at least 0, got {micro_batches}")
        self.tiers = TIERS if micro_batches else self.tiers
        self.policy = (
            AsyncOverlap(None, micro_batches, equal=True, max_rows=max_rows) if micro_batches else SyncOffload()
        )
        self.gpu_limit = gpu_limit
        self.costs = costs
        self.cold_share = cold_share
        self.max_cold_tokens = max_cold_tokens
        self.cold_only_when_full = not even_if_it_fits
        self._layers: dict[tuple[int, int], SplitLayer] = {}

    @property
    def splits_first(self) -> bool:  # type: ignore[override]
        return self.tiers is TIERS

    def cold_pages(self, view: ColdView) -> tuple[int, int]:
        least, most = 0, self._most(view)
        if not self.cold_only_when_full and view.requests:
            share = self.cold_share if self.cold_share is not None else self._layer(view).best_share(self._tokens(view))
            least = int(share * view.pages)
        return min(least, most), most

    def _most(self, view: ColdView) -> int:
        if self.max_cold_tokens is not None:
            return self.max_cold_tokens // view.page_size
        if self.cold_share is not None:
            return int(self.cold_share * view.pages)
        if self.costs is None or view.requests <= 1:  # one that is too long for the GPU tier is served all the same
            return view.pages
        hot = (min(view.gpu_pages, view.pages) - view.requests / 2) * view.page_size  # each newest page is half full
        layer = self._layer(view)
        most = layer.hidden(hot) / view.page_size
        if layer.more_pays(hot) and not self.splits_first:
            most = view.pages
        if not self.cold_only_when_full:
            most = max(most, layer.best_share(self._tokens(view)) * view.pages)
        if self.gpu_limit is not None:
            most = min(most, layer.within(hot, self.gpu_limit) / view.page_size)
        return int(most)

    def _tokens(self, view: ColdView) -> int:
        return max(1, view.pages * view.page_size)

    def _layer(self, view: ColdView) -> SplitLayer:
        """Priced once per number of rows and power of two of the tokens."""
        assert self.costs is not None
        key = view.requests, 1 << self._tokens(view).bit_length()
        if key not in self._layers:
            self._layers[key] = split_layer(self.costs, *key)
        return self._layers[key]
