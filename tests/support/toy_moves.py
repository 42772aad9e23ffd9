"""The toy model with moves between its tiers. A move reads and writes when its op runs, so whoever reads too early,
or gives the blocks away too soon, gets a wrong token."""

from __future__ import annotations

import json
from collections.abc import Sequence

from toy_stages import ToyStages

from hybridattn.core.op import D2H, H2D, Op, Work
from hybridattn.core.stages import GPU_TIER


class MovingToyStages(ToyStages):
    def read_page(self, page: int) -> bytes:
        size = self.cpu.page_size
        return json.dumps([values[page * size : (page + 1) * size] for values in self.cpu.values]).encode()

    def write_page(self, page: int, data: bytes) -> None:
        size = self.cpu.page_size
        for values, mine in zip(self.cpu.values, json.loads(data), strict=True):
            values[page * size : (page + 1) * size] = mine

    def move(self, request, source: str, blocks: Sequence[int], tokens: int) -> Op:
        there, here = list(blocks), list(request.pages.arriving)
        lane, pools = (D2H, (self.gpu, self.cpu)) if source == GPU_TIER else (H2D, (self.cpu, self.gpu))

        def run() -> None:
            old, new = pools
            for layer in range(self.num_layers):
                for p, value in enumerate(old.read(layer, there, tokens)):
                    new.values[layer][new.slot(here, p)] = value

        return Op("move", lane, Work("copy", 0, 0, tokens), run, requests=(request.request_id,))
