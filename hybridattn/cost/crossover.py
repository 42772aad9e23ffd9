"""Closed forms: from which point on does CPU attention beside a GPU pay? Derived in ``docs/crossover.md``.

Symbols, per step (one step of the GPU over all layers for its own rows):

    T_l, T_a    linear and attention time of the GPU          P = T_l + T_a
    x           T_a / T_l
    N_G, N_C    attention *rates* of GPU and CPU: decode tokens per second of attention time, over all layers
    r           N_G / N_C
    B_G, B_C    requests on the GPU and on the CPU tier
    L           layers;  c = 1 / (N_C L): CPU time of one request at one layer
    R0          GPU-only throughput, N_G T_a / P = B_G / P

All are ideal: linear time independent of the rows (weight-bound), no copies, no head, exact predictions. How far real
settings are from that is a matter for the simulator. ``python -m hybridattn.cost.crossover`` prints every number that
``docs/crossover.md`` quotes.
"""

from __future__ import annotations

import math

from hybridattn.core.errors import InputError
from hybridattn.core.op import GPU
from hybridattn.cost.catalog import shape
from hybridattn.cost.machine import machine
from hybridattn.cost.stages_cost import ModelCost

# (GPU, CPU, link, model, GPU rows, context): machines whose layer times the tables quote. The T4 holds two requests of
# 400 tokens beside a 7B model; the others could hold more than 24 of 1,000 tokens, which keeps them comparable.
LAYER_SETTINGS = (
    ("t4", "xeon-8259cl-8c", "pcie3-x16", "llama2-7b", 2, 400),
    ("a10", "epyc-7r32-8c", "pcie4-x16", "llama3.1-8b", 24, 1000),
    ("a100-80g", "epyc-7r32-32c", "pcie4-x16", "llama3.1-8b", 24, 1000),
    ("h200", "epyc-7r32-32c", "pcie5-x16", "llama3.1-8b", 24, 1000),
)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} must be positive and finite, got {value}")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise InputError(f"{name} must be at least 0 and finite, got {value}")


def capacity_gain_bound(x: float, r: float) -> float:
    """Largest gain when all KV fits on the GPU: both memories read in parallel, ``(1 + x) / (1 + x r / (1 + r))``.

    Parameters
    ----------
    x : float
        Attention time over linear time of the GPU.
    r : float
        Attention rate of the GPU over that of the CPU.
    """
    _positive(x=x, r=r)
    return (1 + x) / (1 + x * r / (1 + r))


def upper_bound_gain(x: float, r: float) -> float:
    """Largest gain of any overlap when GPU memory limits the batch: the CPU never idles, ``1 + (1 + 1/x) / r``."""
    _positive(x=x, r=r)
    return 1 + (1 + 1 / x) / r


def ap_gain(x: float, r: float) -> float:
    """Asymmetric pipelining over GPU-only with the CPU always busy: ``(1 + x)/(2 + x) + (1 + x)/(x r)``."""
    _positive(x=x, r=r)
    return (1 + x) / (2 + x) + (1 + x) / (x * r)


def eq6_threshold(x: float, f: float = 0.0) -> float:
    """Asymmetric pipelining beats GPU-only iff ``N_G / N_C`` lies below this (APEX, arXiv 2506.03296, eq. 6).

    ``2/x + 3 + x`` without prefill. With prefill taking ``f * T_l`` in every step, the window in which CPU
    attention hides grows and the threshold is ``(1 + x + f)(2 + x + f) / x``.
    """
    _positive(x=x)
    _not_negative(f=f)
    return (1 + x + f) * (2 + x + f) / x


def eq6_minimum() -> tuple[float, float]:
    """Where eq. 6 asks most of the CPU: ``x = sqrt(2)``, threshold ``3 + 2 sqrt(2)``."""
    return math.sqrt(2), 3 + 2 * math.sqrt(2)


def ap_min_request_ratio(x: float) -> float:
    """``B_C / B_G`` above which asymmetric pipelining pays while the CPU keeps up: ``T_l / (T_l + T_a)``."""
    _positive(x=x)
    return 1 / (1 + x)


def mixed_window_ns(linear_ns: int, attention_ns: int, prefill_linear_ns: int, prefill_attention_ns: int) -> int:
    """Time that CPU attention can hide behind in a batch with prefill: the sum of all four stages on the GPU."""
    stages = {
        "linear_ns": linear_ns,
        "attention_ns": attention_ns,
        "prefill_linear_ns": prefill_linear_ns,
        "prefill_attention_ns": prefill_attention_ns,
    }
    _not_negative(**stages)
    return sum(stages.values())


def overlap_advance(num_layers: int) -> float:
    """Layers per step of a micro-batch that joins at most once per step: ``a = L / (L + 1)``."""
    _positive(num_layers=num_layers)
    return num_layers / (num_layers + 1)


def overlap_gain(request_ratio: float, d: float, num_layers: int) -> float:
    """One-layer overlap over GPU-only, CPU not saturated: ``(1 + (a / L) B_C / B_G) / (1 + d)``.

    ``d`` is the fraction by which a step stretches because of work that is exposed at its layers.
    """
    _not_negative(request_ratio=request_ratio, d=d)
    return (1 + overlap_advance(num_layers) / num_layers * request_ratio) / (1 + d)


def overlap_crossover(d: float, num_layers: int) -> float:
    """``B_C / B_G`` from which one-layer overlap pays: ``d L / a = d (L + 1)``."""
    _not_negative(d=d)
    return d * num_layers / overlap_advance(num_layers)


def overlap_crossing_exists(cpu_rate: float, gpu_only_rate: float, d: float) -> bool:
    """The CPU is not saturated before the crossover: ``N_C > R0 d / (1 + d)`` (rates in tokens per second)."""
    _positive(cpu_rate=cpu_rate, gpu_only_rate=gpu_only_rate)
    _not_negative(d=d)
    return cpu_rate > gpu_only_rate * d / (1 + d)


def exposed_stretch(exposed_ns: int, layer_ns: int) -> float:
    """The stretch ``d`` that comes from ``exposed_ns`` of extra time at each layer of ``layer_ns``."""
    _not_negative(exposed_ns=exposed_ns)
    _positive(layer_ns=layer_ns)
    return exposed_ns / layer_ns


def saturating_rows(step_ns: int, cpu_row_layer_ns: float) -> float:
    """``B_C`` from which joins alone keep the CPU busy, ``P / c``: each row needs ``c`` once per step."""
    _positive(step_ns=step_ns, cpu_row_layer_ns=cpu_row_layer_ns)
    return step_ns / cpu_row_layer_ns


def same_step_rows(attention_ns: int, cpu_row_layer_ns: float, num_layers: int) -> float:
    """CPU rows that return within the GPU's attention of the same layer, ``T_a / (L c)``: they join at every layer."""
    _positive(attention_ns=attention_ns, cpu_row_layer_ns=cpu_row_layer_ns, num_layers=num_layers)
    return attention_ns / num_layers / cpu_row_layer_ns


def detour_min_rows(gpu_rows: int, x: float) -> float:
    """Rows from which a detour pays if the CPU would idle else: ``B_G T_l / (T_l + T_a)``."""
    _not_negative(gpu_rows=gpu_rows)
    return gpu_rows * ap_min_request_ratio(x)


def full_offload_gain(x: float, r: float) -> float:
    """All attention on the CPU and the CPU the bottleneck, over GPU-only: ``N_C / R0 = (1 + 1/x) / r``."""
    _positive(x=x, r=r)
    return (1 + 1 / x) / r


def neo_iteration_ns(
    num_layers: int, linear_ns: tuple[int, int], gpu_attention_ns: int, cpu_attention_ns: tuple[float, float]
) -> float:
    """NEO's iteration of two sub-batches (arXiv 2411.01142): ``L (max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0))``.

        GPU  |T_l0        |T_l1 + T_ga0      |     each pair starts together and ends with the longer one
        CPU  |T_ca1   |   |T_ca0         |   |

    Parameters
    ----------
    linear_ns, cpu_attention_ns : (int, int)
        Per layer and sub-batch [ns]; sub-batch 0 also holds the GPU rows, whose attention takes ``gpu_attention_ns``.
    """
    _positive(num_layers=num_layers)
    (l0, l1), (ca0, ca1) = linear_ns, cpu_attention_ns
    _not_negative(linear_0=l0, linear_1=l1, gpu_attention_ns=gpu_attention_ns, cpu_0=ca0, cpu_1=ca1)
    return num_layers * (max(l0, ca1) + max(l1 + gpu_attention_ns, ca0))


def layer_ns(gpu: str, cpu: str, link: str, model: str, rows: int, context: int) -> tuple[int, int]:
    """Linear and attention time [ns] of one layer, fp16, ``rows`` requests of ``context`` tokens, shipped profiles."""
    cost, pricing = ModelCost(shape(model), "fp16"), machine(gpu, cpu, link)
    return pricing.work_ns(GPU, cost.linear(rows)), pricing.work_ns(GPU, cost.decode_attention(rows, rows * context))


def _table(title: str, header: str, rows: list[str]) -> str:
    return "\n".join([title, header, *rows, ""])


def _eq6_tables() -> list[str]:
    top = eq6_minimum()
    xs = (0.1, 0.25, 0.5, 1.0, top[0], 1.5, 2.0, 3.0)
    rows = [
        f"{x:8.2f} {eq6_threshold(x):9.2f} {100 / eq6_threshold(x):8.1f} % {ap_min_request_ratio(x):9.2f}" for x in xs
    ]
    mixed = [
        f"{x:8.2f}" + "".join(f"{eq6_threshold(x, f):9.2f}" for f in (0.0, 0.5, 1.0, 4.0))
        for x in (0.25, 0.5, 1.0, 2.0)
    ]
    return [
        _table("Asymmetric pipelining (eq. 6)", "       x  N_G/N_C <  N_C/N_G >  B_C/B_G >", rows),
        _table("eq. 6 with prefill of f T_l in every step", "       x    f=0.0    f=0.5    f=1.0    f=4.0", mixed),
    ]


def _bound_tables() -> list[str]:
    rows = []
    for x, r in ((0.5, 3), (0.5, 10), (0.5, 20), (1.0, 3), (1.0, 10), (1.0, 20)):
        values = (capacity_gain_bound(x, r), upper_bound_gain(x, r), ap_gain(x, r), full_offload_gain(x, r))
        rows.append(f"{x:8.2f} {r:5d}" + "".join(f"{v:10.2f}" for v in values))
    header = "       x     r  capacity     upper        AP   offload"
    return [_table("Gain over GPU-only: when all fits, at most, AP, full offload", header, rows)]


def _overlap_tables() -> list[str]:
    ds = (0.0, 0.01, 0.04, 0.1, 0.25, 0.5)
    rows = [f"{d:8.2f} {overlap_crossover(d, 32):9.2f} {overlap_crossover(d, 80):9.2f} {d / (1 + d):9.2f}" for d in ds]
    found = [
        _table(
            "One-layer overlap: B_C/B_G above d (L + 1), and the CPU rate it takes",
            "       d   L = 32    L = 80   N_C/R0 >",
            rows,
        )
    ]
    lines = []
    for setting in LAYER_SETTINGS:
        linear, attention = layer_ns(*setting)
        whole = linear + attention
        cells = "".join(
            f"{d:7.2f} {overlap_crossover(d, 32):5.1f}"
            for d in (exposed_stretch(e * 1000, whole) for e in (50, 150, 200))
        )
        quarter_us = 0.25 * whole / 1e3
        lines.append(
            f"{setting[0]:9} {setting[3]:12} {whole / 1e3:7.0f} {attention / linear:6.2f} {quarter_us:6.0f}{cells}"
        )
    header = "GPU       model       us/layer      x d=0.25  50 us:  d    r 150 us: d    r 200 us: d    r"
    return [
        *found,
        _table("Exposed time per layer, stretch and crossover (computed from shipped profiles)", header, lines),
    ]


def report() -> str:
    """The tables of ``docs/results/closed_forms.md``."""
    return "\n".join(_eq6_tables() + _bound_tables() + _overlap_tables())


if __name__ == "__main__":
    print(report())
