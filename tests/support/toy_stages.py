"""A decoder over integers, exact and sensitive: any stale, lost or misplaced byte changes every later token.

It does what a real model does - embeds, writes K,V into pages, attends over all earlier positions in order, hands
rows up and down through exchange buffers - with 61-bit hashes for vectors. Closures touch the buffers when they run,
so on ``SimDevice(execute=True)`` every race that the executor allows shows up as a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch, MicroBatch, Segment

PRIME = (1 << 61) - 1
VOCAB = 50


def mix(*values: int, start: int = 1469598103934665603) -> int:
    x = start
    for v in values:
        x = ((x ^ (v & PRIME)) * 1099511628211 + 2654435761) % PRIME
    return x


def attend(q: int, kvs: Sequence[int]) -> int:
    return mix(q, *kvs)


def merge(cold: int, hot: Sequence[int]) -> int:
    """``attend`` over cold and hot values from what it gives over the cold ones."""
    for value in hot:
        cold = mix(value, start=cold)
    return cold


def reference(prompt: Sequence[int], count: int, num_layers: int, window: int | None = None) -> list[int]:
    """The first ``count`` output tokens of the toy model, whose queries see the last ``window`` positions."""
    tokens: list[int] = []
    kv: list[list[int]] = [[] for _ in range(num_layers)]
    for position in range(len(prompt) + count - 1):
        token = prompt[position] if position < len(prompt) else tokens[position - len(prompt)]
        x = mix(token, position)
        for layer in range(num_layers):
            kv[layer].append(mix(x, layer, 2))
            x = mix(x, attend(mix(x, layer, 1), kv[layer][-window:] if window else kv[layer]), layer)
        if position >= len(prompt) - 1:
            tokens.append(x % VOCAB)
    return tokens


class Pages:
    """K,V per layer and slot; a slot never written reads as None and blows up in ``mix``."""

    def __init__(self, num_layers: int, num_blocks: int, page_size: int) -> None:
        self.page_size = page_size
        self.values: list[list[int | None]] = [[None] * (num_blocks * page_size) for _ in range(num_layers)]

    def slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.page_size] * self.page_size + position % self.page_size

    def read(self, layer: int, blocks: Sequence[int], count: int) -> list[int]:
        return [self.values[layer][self.slot(blocks, p)] for p in range(count)]  # type: ignore[misc]


class ToyStages:
    window: int | None = None

    def __init__(self, num_layers: int, gpu_blocks: int, cpu_blocks: int, page_size: int, max_rows: int) -> None:
        self.num_layers = num_layers
        self.gpu = Pages(num_layers, gpu_blocks, page_size)
        self.cpu = Pages(num_layers, cpu_blocks, page_size)
        self.residual: list[int | None] = [None] * max_rows
        self.dev_qkv: list[tuple[int, int] | None] = [None] * max_rows
        self.host_qkv: list[tuple[int, int] | None] = [None] * max_rows
        self.host_out: list[int | None] = [None] * max_rows
        self.dev_out: list[int | None] = [None] * max_rows
        self.staging: list[int] = []
        self.cold_q: list[int] = []  # of the split rows, on the host
        self.cold_out: list[int] = []
        self.cold_up: list[int] = []  # on the device
        self.plans: dict[int, list[tuple[list[int], int, bool]]] = {}  # micro-batch -> (blocks, place in them, dead)
        self.tokens: dict[int, list[int]] = {}
        self.open_micro_batches = 0

    # -- planning ----------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self.rows = []  # (segment index, position, token, blocks, position of the first key in them) of every GPU row
        self.state: dict[str, list] = {"x": [], "q": [], "out": []}
        self.kv: dict[int, list[int]] = {}
        for i, s in enumerate(batch.segments):
            for p in range(s.start, s.start + s.num_tokens):
                self.rows.append((i, p, s.request.token_ids[p], list(s.request.pages.on(s.tier)), s.hot_from))

    def dispatch(self, micro_batch: MicroBatch) -> None:
        self.open_micro_batches += 1
        self.tokens[micro_batch.number] = [r.request.token_ids[r.position] for r in micro_batch.rows]
        self.replan(micro_batch)

    def replan(self, micro_batch: MicroBatch) -> None:
        self.plans[micro_batch.number] = [
            ([], r.position, True)
            if i in micro_batch.dead
            else (list(r.request.pages.cold), r.position - r.request.pages.gone * self.cpu.page_size, False)
            for i, r in enumerate(micro_batch.rows)
        ]

    def finish(self, micro_batch: MicroBatch) -> None:
        self.open_micro_batches -= 1
        del self.plans[micro_batch.number], self.tokens[micro_batch.number]

    # -- ops ---------------------------------------------------------------------------------------------------------

    def attention(self, layer: int, batch: Batch) -> Op:
        state, kv, rows = self.state, self.kv, self.rows

        def run() -> None:
            state["out"] = []
            for (i, p, _, blocks, first), q, own in zip(rows, state["q"], kv[layer], strict=True):
                s = batch.segments[i]
                if s.tier == GPU_TIER:
                    self.gpu.values[layer][self.gpu.slot(blocks, p - first)] = own
                    seen = self.gpu.read(layer, blocks, p + 1 - first)
                    if s.cold and not s.prefill:
                        state["out"].append(self.last(seen, p))  # until the merge
                        continue
                    seen = self.staging[: s.cold] + seen
                else:
                    mine = [v for (j, *_), v in zip(rows, kv[layer], strict=True) if j == i]
                    seen = (self.staging[: s.start] + mine)[: p + 1]
                state["out"].append(attend(q, self.last(seen, p)))

        return Op("attention", GPU, Work("decode_attention", 0, 0, len(rows)), run, layer=layer)

    def last(self, values: list[int], newest: int, end: int | None = None) -> list[int]:
        """Those of ``values``, which stand up to position ``end``, by default ``newest``, that a query at ``newest``
        sees."""
        behind = (newest if end is None else end) - newest
        return values if self.window is None else values[max(0, len(values) - max(0, self.window + behind)) :]

    def linear(self, layer: int, batch: Batch | None, micro_batches: Sequence[MicroBatch]) -> Op:
        state, kv, rows = (self.state, self.kv, self.rows) if batch is not None else ({}, {}, [])
        segments = batch.segments if batch is not None else ()
        parts = [
            (range(c.first_slot, c.first_slot + len(c.rows)), [r.position for r in c.rows], self.tokens[c.number])
            for c in micro_batches
        ]
        last = layer == self.num_layers - 1

        def run() -> list[int] | None:
            if batch is not None:
                if layer < 0:
                    state["x"] = [mix(t, p) for _, p, t, *_ in rows]
                else:
                    state["x"] = [mix(x, o, layer) for x, o in zip(state["x"], state["out"], strict=True)]
                if not last:
                    state["q"] = [mix(x, layer + 1, 1) for x in state["x"]]
                    kv[layer + 1] = [mix(x, layer + 1, 2) for x in state["x"]]
            for slots, positions, tokens in parts:
                for slot, position, token in zip(slots, positions, tokens, strict=True):
                    if layer < 0:
                        self.residual[slot] = mix(token, position)
                    else:
                        self.residual[slot] = mix(self.residual[slot], self.dev_out[slot], layer)
                    x = self.residual[slot]
                    self.dev_qkv[slot] = None if last else (mix(x, layer + 1, 1), mix(x, layer + 1, 2))
            if not last:
                return None
            ends = [max(k for k, r in enumerate(rows) if r[0] == i) for i, s in enumerate(segments) if s.samples]
            sampled = [state["x"][k] % VOCAB for k in ends]
            return sampled + [self.residual[slot] % VOCAB for slots, _, _ in parts for slot in slots]

        requests = tuple(s.request.request_id for s in segments) + tuple(r for c in micro_batches for r in c.requests)
        count = len(rows) + sum(len(c.rows) for c in micro_batches)
        return Op("linear", GPU, Work("linear", 0, 0, count), run, layer=layer, requests=requests)

    def send_qkv(self, micro_batch: MicroBatch) -> Op:
        slots = range(micro_batch.first_slot, micro_batch.first_slot + len(micro_batch.rows))

        def run() -> None:
            for slot in slots:
                self.host_qkv[slot] = self.dev_qkv[slot]

        return self._micro_batch_op("send_qkv", D2H, "copy", micro_batch, run)

    def cpu_attention(self, micro_batch: MicroBatch, priority: int) -> Op:
        plan, layer = self.plans[micro_batch.number], micro_batch.layer

        def run() -> None:
            for k, (blocks, at, dead) in enumerate(plan):
                slot = micro_batch.first_slot + k
                if dead:
                    self.host_out[slot] = 0
                    continue
                q, own = self.host_qkv[slot]
                self.cpu.values[layer][self.cpu.slot(blocks, at)] = own
                self.host_out[slot] = attend(q, self.last(self.cpu.read(layer, blocks, at + 1), at))

        op = self._micro_batch_op("cpu_attention", CPU, "decode_attention", micro_batch, run)
        op.priority = priority
        return op

    def fetch_output(self, micro_batch: MicroBatch) -> Op:
        slots = range(micro_batch.first_slot, micro_batch.first_slot + len(micro_batch.rows))

        def run() -> None:
            for slot in slots:
                self.dev_out[slot] = self.host_out[slot]

        return self._micro_batch_op("fetch_output", H2D, "copy", micro_batch, run)

    def send_q(self, layer: int, batch: Batch) -> Op:
        state, count = self.state, len(batch.split)

        def run() -> None:
            self.cold_q = state["q"][:count]

        return self._split_op("send_q", D2H, "copy", layer, batch, run)

    def cold_attention(self, layer: int, batch: Batch) -> Op:
        parts = [(s, list(s.request.pages.cold)) for s in batch.split]

        def run() -> None:
            seen = [self.last(self.cpu.read(layer, pages, s.cold), s.start, s.hot_from - 1) for s, pages in parts]
            self.cold_out = [attend(q, values) for q, values in zip(self.cold_q, seen, strict=True)]

        return self._split_op("cold_attention", CPU, "decode_attention", layer, batch, run)

    def fetch_cold(self, layer: int, batch: Batch) -> Op:
        def run() -> None:
            self.cold_up = self.cold_out

        return self._split_op("fetch_cold", H2D, "copy", layer, batch, run)

    def merge(self, layer: int, batch: Batch) -> Op:
        state = self.state

        def run() -> None:
            for i, cold in enumerate(self.cold_up):
                state["out"][i] = merge(cold, state["out"][i])

        return self._split_op("merge", GPU, "other", layer, batch, run)

    def _split_op(self, name: str, lane: str, kind: str, layer: int, batch: Batch, run) -> Op:
        requests = tuple(s.request.request_id for s in batch.split)
        return Op(name, lane, Work(kind, 0, 0, len(batch.split)), run, layer=layer, requests=requests)

    def load_kv(self, layer: int, segment: Segment) -> Op:
        blocks = list(segment.request.pages.cold)

        def run() -> None:
            self.staging = self.cpu.read(layer, blocks, segment.loads)

        return Op(
            "load_kv", H2D, Work("copy", 0, 0, segment.loads), run, layer=layer, requests=(segment.request.request_id,)
        )

    def offload_kv(self, layer: int, segment: Segment) -> Op:
        kv, rows, index = self.kv, self.rows, self.batch.segments.index(segment)
        assert segment.tier == CPU_TIER
        blocks = list(segment.request.pages.cold)

        def run() -> None:
            for (i, p, *_), value in zip(rows, kv[layer], strict=True):
                if i == index:
                    self.cpu.values[layer][self.cpu.slot(blocks, p)] = value

        return Op(
            "offload_kv",
            D2H,
            Work("copy", 0, 0, segment.num_tokens),
            run,
            layer=layer,
            requests=(segment.request.request_id,),
        )

    def _micro_batch_op(self, name: str, lane: str, kind: str, micro_batch: MicroBatch, run) -> Op:
        work = Work(kind, 0, 0, len(micro_batch.rows))
        return Op(name, lane, work, run, layer=micro_batch.layer, requests=micro_batch.requests)
