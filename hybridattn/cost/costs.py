"""What the stages of one model take on one machine, as integers: the cost model that a policy is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Work
from hybridattn.cost.pricing import PriceModel, Pricing
from hybridattn.cost.stages_cost import ModelCost

MOST_KEPT = 65_536  # prices of each sort that are remembered
MOST_CORRECTED = 64  # cost models for another speed of the CPU


@dataclass(frozen=True, slots=True)
class Scaled:
    """A price times a constant factor: a CPU that is misjudged, or whose speed was learnt."""

    model: PriceModel
    factor: float

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise InputError(f"factor must be positive, got {self.factor}")

    def price_ns(self, work: Work) -> int:
        return round(self.model.price_ns(work) * self.factor)


def with_cpu_factor(pricing: Pricing, factor: float) -> Pricing:
    """``pricing`` with every price on cpu.attention times ``factor``; its fingerprint says so."""
    if factor == 1.0:
        return pricing
    models = {k: Scaled(m, factor) if k[0] == CPU else m for k, m in pricing.models.items()}
    return replace(pricing, fingerprint=f"{pricing.fingerprint} cpu x{factor:.3g}", models=models)


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of one layer's stages [ns]. All without contention, all memoised by their arguments where these repeat.

    ``round_trip_ns`` is what waking up the lanes' threads adds to a round trip over the CPU, for closed forms.
    """

    cost: ModelCost
    pricing: Pricing
    round_trip_ns: int = 0
    _linear: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _ends: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _firsts: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _attention: dict[tuple[str, int, int], int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _layers: dict[tuple[int, int, int], int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _copies: dict[tuple[str, int], int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _corrected: dict[float, Costs] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def num_layers(self) -> int:
        return self.cost.shape.num_layers

    def linear_ns(self, rows: int) -> int:
        """post and pre of one layer for ``rows`` rows; 0 for none."""
        found = self._linear.get(rows)
        if found is None:
            found = self._linear[rows] = self.pricing.work_ns(GPU, self.cost.linear(rows)) if rows else 0
        return found

    def last_ns(self, rows: int) -> int:
        """post of the last layer and the head for ``rows`` rows."""
        found = self._ends.get(rows)
        if found is None:
            found = self._ends[rows] = self.pricing.work_ns(GPU, self.cost.last(rows, rows)) if rows else 0
        return found

    def layer_ns(self, tokens: int, rows: int, kv_tokens: int) -> int:
        """Linear stage of ``tokens`` rows and GPU attention of ``rows`` decode rows."""
        found = self._layers.get((tokens, rows, kv_tokens))
        if found is None:
            if len(self._layers) > MOST_KEPT:
                self._layers.clear()
            found = self._layers[tokens, rows, kv_tokens] = self.linear_ns(tokens) + self.attention_ns(rows, kv_tokens)
        return found

    def step_linear_ns(self, rows: int) -> int:
        """All linear stages of a step: embedding and pre(0), L - 1 layers, the last one with the head."""
        if not rows:
            return 0
        first = self._firsts.get(rows)
        if first is None:
            first = self._firsts[rows] = self.pricing.work_ns(GPU, self.cost.first(rows))
        return first + (self.num_layers - 1) * self.linear_ns(rows) + self.last_ns(rows)

    def attention_ns(self, rows: int, kv_tokens: int, prefill: Iterable[tuple[int, int]] = ()) -> int:
        """GPU attention of one layer: decode rows with ``kv_tokens`` keys in all, and prompt chunks (tokens, keys)."""
        chunks = tuple(prefill)
        if not chunks:
            return self._kept(GPU, rows, kv_tokens)
        return self.pricing.work_ns(GPU, self.cost.attention(rows, max(rows, kv_tokens), chunks))

    def cpu_ns(self, rows: int, kv_tokens: int) -> int:
        """CPU attention of one layer for ``rows`` rows with ``kv_tokens`` keys in all."""
        return self._kept(CPU, rows, kv_tokens)

    def _kept(self, lane: str, rows: int, kv_tokens: int) -> int:
        """Decode attention on a lane, kept by its arguments (all forgotten when there are too many)."""
        if not rows:
            return 0
        found = self._attention.get((lane, rows, kv_tokens))
        if found is None:
            if len(self._attention) > MOST_KEPT:
                self._attention.clear()
            found = self.pricing.work_ns(lane, self.cost.decode_attention(rows, max(rows, kv_tokens)))
            self._attention[lane, rows, kv_tokens] = found
        return found

    def down_ns(self, rows: int) -> int:
        """q, k, v of ``rows`` rows go down."""
        found = self._copies.get((D2H, rows))
        if found is None:
            found = self._copies[D2H, rows] = self.pricing.work_ns(D2H, self.cost.send_qkv(rows))
        return found

    def up_ns(self, rows: int) -> int:
        """Attention output of ``rows`` rows goes up."""
        found = self._copies.get((H2D, rows))
        if found is None:
            found = self._copies[H2D, rows] = self.pricing.work_ns(H2D, self.cost.fetch_output(rows))
        return found

    def pays_to_move_up(self, tokens: int, left: int) -> bool:
        """K,V of ``tokens`` tokens on the CPU tier: bringing them up for the next ``left`` tokens of their request is
        sooner done than attending to them where they lie."""
        there = self.cpu_ns(1, tokens) + self.down_ns(1) + self.up_ns(1) - self.attention_ns(1, tokens)
        return self.pricing.work_ns(H2D, self.cost.move_request(tokens)) <= left * self.num_layers * there

    def step_ns(self, rows: int, kv_tokens: int) -> int:
        """A whole step of ``rows`` GPU rows without CPU rows."""
        return self.step_linear_ns(rows) + self.num_layers * self.attention_ns(rows, kv_tokens)

    def corrected(self, cpu_factor: float) -> Costs:
        """The same with CPU attention times ``cpu_factor``; remembered, with the prices that it remembers."""
        if cpu_factor == 1.0:
            return self
        found = self._corrected.get(cpu_factor)
        if found is None:
            if len(self._corrected) >= MOST_CORRECTED:
                self._corrected.clear()
            found = self._corrected[cpu_factor] = replace(self, pricing=with_cpu_factor(self.pricing, cpu_factor))
        return found
