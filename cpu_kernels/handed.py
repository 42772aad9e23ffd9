"""What a caller hands to one run of a plan, looked at once, the same for every back end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cpu_kernels.arrays import View, refuse_inside, refuse_overlap
from cpu_kernels.codegen.fields import Code

if TYPE_CHECKING:
    from cpu_kernels.plan import DecodeInputs


class Handed(NamedTuple):
    """Checked arrays of a run; `lse`, `k` and `v` are None where they are not given."""

    q: View
    out: View
    lse: View | None
    k: View | None
    v: View | None


def take(inputs: DecodeInputs, q: Any, out: Any, lse: Any, k_new: Any, v_new: Any) -> Handed:
    """Check the arrays of a run; those of a ``Handed`` in place of ``q`` were checked before.

    Raises
    ------
    ValueError, TypeError
        For a wrong shape, dtype, byte order, stride or device; for results that are read-only, lie over themselves,
        share memory with an input other than in exactly its place, or lie in the pages; and for two rows that would
        append to one slot.
    """
    pages = inputs.pages
    shape = (inputs.num_seqs, inputs.num_q_heads, pages.head_dim)
    if isinstance(q, Handed):
        return Handed(q.q.check(shape), *q[1:])
    a, b = View("q", q).check(shape), View("out", out).check_result(shape)
    (q_low, q_high), (low, high) = a.span(), b.span()
    if q_low < high and low < q_high:
        refuse_overlap(b, a)
    start, size = pages.memory
    if low < start + size and start < high:
        refuse_inside(b, start, size)
    sums = None if lse is None else _sums(lse, shape[:2], (a, b), (start, size))
    if k_new is None and v_new is None:
        return Handed(a, b, sums, None, None)
    if k_new is None or v_new is None:
        raise ValueError("k_new and v_new come together; one of them is missing")
    rows = (shape[0], pages.num_kv_heads, shape[2])
    k, v = View("k_new", k_new).check(rows), View("v_new", v_new).check(rows)
    if k.code != v.code:
        raise TypeError(f"k_new is {k.code.name.lower()} and v_new is {v.code.name.lower()}; both must agree")
    for x in (k, v):
        x_low, x_high = x.span()
        if x_low < high and low < x_high:
            refuse_overlap(b, x)
        if x_low < start + size and start < x_high:
            refuse_inside(x, start, size)
        if sums is not None:
            refuse_overlap(sums, x, in_place=False)
    if inputs.shared_slot:
        raise ValueError(inputs.shared_slot)
    return Handed(a, b, sums, k, v)


def _sums(lse: Any, shape: tuple[int, ...], others: tuple[View, View], memory: tuple[int, int]) -> View:
    """The array of log-sum-exps, which has memory of its own."""
    sums = View("lse", lse).check_result(shape)
    if sums.code != Code.FP32:
        raise TypeError(f"lse must be float32, got {sums.code.name.lower()}")
    refuse_overlap(sums, *others, in_place=False)
    refuse_inside(sums, *memory)
    return sums
