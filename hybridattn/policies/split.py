"""One request over both tiers: the GPU attends to its newest pages and the CPU to its oldest, for the same token."""

from __future__ import annotations

from hybridattn.core.errors import InputError
from hybridattn.core.stages import GPU_TIER
from hybridattn.cost.costs import Costs
from hybridattn.cost.split import SplitLayer, split_layer
from hybridattn.policies.base import ColdView
from hybridattn.policies.fixed import SyncOffload


class Split(SyncOffload):
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
    """

    name = "split"
    tiers = (GPU_TIER,)
    hooks = frozenset({"cold_pages"})

    def __init__(
        self,
        costs: Costs | None = None,
        cold_share: float | None = None,
        max_cold_tokens: int | None = None,
        even_if_it_fits: bool = False,
    ) -> None:
        super().__init__()
        if cold_share is not None and not 0.0 <= cold_share <= 1.0:
            raise InputError(f"cold_share must lie in 0..1, got {cold_share}")
        if max_cold_tokens is not None and max_cold_tokens < 0:
            raise InputError(f"max_cold_tokens must be at least 0, got {max_cold_tokens}")
        if even_if_it_fits and costs is None and cold_share is None:
            raise InputError("even_if_it_fits needs a cost model (a profile of the machine), or a cold_share")
        self.costs = costs
        self.cold_share = cold_share
        self.max_cold_tokens = max_cold_tokens
        self.cold_only_when_full = not even_if_it_fits
        self._layers: dict[tuple[int, int], SplitLayer] = {}

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
        most = view.pages if layer.more_pays(hot) else int(layer.hidden(hot) / view.page_size)
        if not self.cold_only_when_full:
            most = max(most, int(layer.best_share(self._tokens(view)) * view.pages))
        return most

    def _tokens(self, view: ColdView) -> int:
        return max(1, view.pages * view.page_size)

    def _layer(self, view: ColdView) -> SplitLayer:
        """Priced once per number of rows and power of two of the tokens."""
        assert self.costs is not None
        key = view.requests, 1 << self._tokens(view).bit_length()
        if key not in self._layers:
            self._layers[key] = split_layer(self.costs, *key)
        return self._layers[key]
