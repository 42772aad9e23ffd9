"""From a function in plain numba to a kernel of the pool: what stands between a formula and a job's words.

A kernel is a function of one row and one KV head::

    def attend(q, kv, row, out, lse)

    q    float32 [group, head_dim]                  queries of the head's group
    kv   [num_pages, num_kv_heads, rows, head_dim]  blocks of plain pages: K in rows 0 to page_size - 1, V behind it,
                                                    then bounds; bf16 as uint16 bits (`widen` gives float32)
    row  Row                                        the pages, the allowed keys, what the scores are shaped with
    out  float32 [group, head_dim], lse [group]     to be written; zero and -inf when called

`decode_kernel` compiles it together with `_drive` below, by `numba.cfunc`, to the signature that the native workers
call. Nothing of it touches the interpreter, so it runs on the same polled workers as the native kernels.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpu_kernels.codegen.fields import ITEM_WORDS, JOB_WORDS, Item, Job
from cpu_kernels.layout import Layout
from cpu_kernels.native import NativeDecode
from cpu_kernels.plan import DecodeInputs

# As in `cpu_kernels.jit`: nothing that lets a compiler assume that there are no NaN and no infinities.
FAST = {"contract", "reassoc", "arcp", "nsz"}
WHOLE_ROW = 1 << 40  # split_tokens: a row is one piece of work, there is nothing to merge

Row = namedtuple("Row", "pages head page_size first last query scale cap slopes sinks limit")
Row.__doc__ = """One row and KV head.

pages : int32 array, the row's page numbers; head : KV head; page_size : tokens of a page
first, last : the allowed keys, ``first <= j < last``; query : position of the query, counted like them
scale, cap : scale of the scores, soft cap (0: off); slopes, sinks : float32 [group], 0 and -inf where off
limit : the number that the back end was given (0: none)
"""

function = numba.njit(nogil=True, fastmath=FAST, error_model="numpy")


@intrinsic
def _pointer(typingctx: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to elements of a type."""
    pointer = types.CPointer(kind.dtype)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, kind), build


@intrinsic
def _as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], cgutils.ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def _as_bits(typingctx: Any, x: Any) -> Any:
    """The 32 bits of a float32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], cgutils.ir.IntType(32))

    return types.uint32(types.float32), build


def _value(x):
    raise NotImplementedError("value is for compiled code")


@numba.extending.overload(_value, inline="always")
def _value_of(x):
    if x == types.uint16:
        return lambda x: _as_float(np.uint32(np.uint32(x) << np.uint32(16)))
    return lambda x: x


@function
def widen(stored, rows):
    """Stored rows of a block as float32: ``rows[:len(stored)]``."""
    for t in range(stored.shape[0]):
        for d in range(stored.shape[1]):
            rows[t, d] = _value(stored[t, d])


@function
def to_bf16(x):
    """bf16 bits of a float32, rounded to nearest even; NaN stays NaN."""
    bits = _as_bits(x)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@function
def _half_to_float(half):
    sign, size = np.uint32(half & 0x8000) << np.uint32(16), np.uint32(half & 0x7FFF)
    if size >= np.uint32(0x7C00):
        bits = (size << np.uint32(13)) | np.uint32(0x7F800000)
    elif size >= np.uint32(0x400):
        bits = (size << np.uint32(13)) + np.uint32(0x38000000)
    else:
        bits = _as_bits(np.float32(size) * np.float32(2.0**-24))
    return _as_float(np.uint32(sign | bits))


@function
def _float_to_half(x):
    bits = _as_bits(x)
    sign, size = (bits >> np.uint32(16)) & np.uint32(0x8000), bits & np.uint32(0x7FFFFFFF)
    if size > np.uint32(0x7F800000):
        half = np.uint32(0x7E00) | ((size >> np.uint32(13)) & np.uint32(0x3FF))
    elif size >= np.uint32(0x477FF000):
        half = np.uint32(0x7C00)
    elif size < np.uint32(0x38800000):  # subnormal: the addition rounds to nearest even
        half = _as_bits(_as_float(size) + np.float32(0.5)) - np.uint32(0x3F000000)
    else:
        half = (
            size - np.uint32(0x38000000) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
        ) >> np.uint32(13)
    return np.uint16(sign | half)


@function
def _take(address, code, row):
    """A caller's row of fp32 (0), bf16 (1) or fp16 (2) as float32."""
    if code == 0:
        wide = numba.carray(_pointer(address, types.float32), row.shape)
        for d in range(row.size):
            row[d] = wide[d]
    else:
        half = numba.carray(_pointer(address, types.uint16), row.shape)
        for d in range(row.size):
            row[d] = _value(half[d]) if code == 1 else _half_to_float(half[d])


@function
def _give(row, address, code):
    """A float32 row as the caller's fp32, bf16 or fp16."""
    if code == 0:
        wide = numba.carray(_pointer(address, types.float32), row.shape)
        for d in range(row.size):
            wide[d] = row[d]
    else:
        half = numba.carray(_pointer(address, types.uint16), row.shape)
        for d in range(row.size):
            half[d] = to_bf16(row[d]) if code == 1 else _float_to_half(row[d])


def _put(stored, row):
    raise NotImplementedError("put is for compiled code")


@numba.extending.overload(_put)
def _put_of(stored, row):
    if stored.dtype == types.uint16:

        def put(stored, row):
            for d in range(row.size):
                stored[d] = to_bf16(row[d])
    else:

        def put(stored, row):
            for d in range(row.size):
                stored[d] = row[d]

    return put


@function
def exp(x):
    """exp of a float32 that is at most 0, in a form that becomes vectors (a call of the C library does not).

    2**n times a polynomial in the rest: within 1e-7 of the value near 0, 4e-6 at -87; below it is 0, and NaN stays NaN.
    """
    y = x * np.float32(1.4426950408889634)
    near = y if y > np.float32(-126) else np.float32(-126)
    n = np.floor(near + np.float32(0.5))
    r = near - n
    p = np.float32(1.5252734e-5)
    p = p * r + np.float32(1.5403530e-4)
    p = p * r + np.float32(1.3333558e-3)
    p = p * r + np.float32(9.6181291e-3)
    p = p * r + np.float32(5.5504109e-2)
    p = p * r + np.float32(2.4022651e-1)
    p = p * r + np.float32(6.9314718e-1)
    p = p * r + np.float32(1)
    whole = _as_float(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
    if y > np.float32(-126):
        return p * whole
    return np.float32(0) if y <= np.float32(-126) else y


@function
def bounds_of(block, page_size):
    """Minimum and maximum of each dim of a block's keys, float32 ``[2, head_dim]`` (pages of ``plain_bounds``)."""
    return numba.carray(_pointer(block[2 * page_size :].ctypes.data, types.float32), (2, block.shape[1]))


@function
def _append(kv, page_size, slot, head, job, seq, row):
    """Write the newest token of a row into its page, as `append_kv` does, and bring the page's bounds up to date."""
    block = kv[slot // page_size, head]
    code = job[Job.NEW_CODE]
    for which in range(2):
        word = Job.K_NEW + 3 * which
        _take(job[word] + seq * job[word + 1] + head * job[word + 2], code, row)
        _put(block[which * page_size + slot % page_size], row)
    if block.shape[0] > 2 * page_size:
        low = bounds_of(block, page_size)
        low[0, :], low[1, :] = np.inf, -np.inf
        for t in range(page_size):
            for d in range(row.size):
                x = _value(block[t, d])
                if np.isfinite(x):
                    low[0, d], low[1, d] = min(low[0, d], x), max(low[1, d], x)


def _driver(attend: Callable[..., None], layout: Layout, group: int, element: Any) -> Callable[..., None]:
    """The loop over units that the workers call, for one layout and group."""
    dim, page_size = layout.head_dim, layout.page_size
    rows = layout.head_bytes // (dim * layout.element_bytes)
    job_words, item_words = JOB_WORDS, ITEM_WORDS
    many = 1 << 40  # pages that an address may have: the table says which ones are there

    def drive(job_at, first_unit, last_unit):
        job = numba.carray(job_at, (job_words,))
        heads, table_pages = job[Job.NUM_KV_HEADS], job[Job.TABLE_STRIDE] // 4
        kv = numba.carray(_pointer(job[Job.BASE], element), (many // heads, heads, rows, dim))
        scale = _as_float(np.uint32(job[Job.SM_SCALE]))
        cap = _as_float(np.uint32(job[Job.SOFT_CAP]))
        q, out = np.empty((group, dim), np.float32), np.empty((group, dim), np.float32)
        lse, line = np.empty(group, np.float32), np.empty(dim, np.float32)
        slopes, sinks = np.zeros(group, np.float32), np.full(group, -np.inf, np.float32)
        for unit in range(first_unit, last_unit):
            item = numba.carray(
                _pointer(job[Job.ITEMS] + (unit // job[Job.UNITS_PER_ITEM]) * item_words * 8, types.int64),
                (item_words,),
            )
            seq = item[Item.SEQ]
            begin = (unit % job[Job.UNITS_PER_ITEM]) * job[Job.UNIT_HEADS]
            pages = numba.carray(_pointer(job[Job.TABLE] + seq * job[Job.TABLE_STRIDE], types.int32), (table_pages,))
            for head in range(begin, min(begin + job[Job.UNIT_HEADS], heads)):
                if item[Item.APPEND_SLOT] >= 0 and job[Job.K_NEW] != 0:
                    _append(kv, page_size, item[Item.APPEND_SLOT], head, job, seq, line)
                for g in range(group):
                    query_head = head * group + g
                    _take(job[Job.Q] + seq * job[Job.Q_ROW] + query_head * job[Job.Q_HEAD], job[Job.Q_CODE], q[g])
                    if job[Job.ALIBI] != 0:
                        at = job[Job.ALIBI] + seq * job[Job.ALIBI_ROW] + query_head * 4
                        slopes[g] = numba.carray(_pointer(at, types.float32), (1,))[0]
                    if job[Job.SINKS] != 0:
                        at = job[Job.SINKS] + seq * job[Job.SINKS_ROW] + query_head * 4
                        sinks[g] = numba.carray(_pointer(at, types.float32), (1,))[0]
                out[:, :] = 0.0
                lse[:] = -np.inf
                if item[Item.FIRST] < item[Item.LAST]:
                    row = Row(
                        pages, head, page_size, item[Item.FIRST], item[Item.LAST], item[Item.SEQ_LEN] - 1, scale, cap,
                        slopes, sinks, job[Job.LIMIT],
                    )  # fmt: skip
                    attend(q, kv, row, out, lse)
                for g in range(group):
                    query_head = head * group + g
                    _give(
                        out[g],
                        job[Job.OUT] + seq * job[Job.OUT_ROW] + query_head * job[Job.OUT_HEAD],
                        job[Job.OUT_CODE],
                    )
                    if job[Job.LSE] != 0:
                        at = job[Job.LSE] + seq * job[Job.LSE_ROW] + query_head * 4
                        numba.carray(_pointer(at, types.float32), (1,))[0] = lse[g]

    return drive


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecodeKernel:
    """A numba function as a back end; made by `decode_kernel`.

    Attributes
    ----------
    attend : function
        Compiled by `function`; see the top of this file.
    order : str
        Layout that its pages must have: ``plain`` (``plain_bounds`` as well) or ``plain_bounds``.
    approximate : bool
        Whether it leaves allowed keys out. Rows of experiments and benchmarks say so.
    limit : int
        What `Row.limit` holds.
    """

    attend: Any
    order: str = "plain"
    approximate: bool = False
    limit: int = 0

    def limited(self, limit: int) -> DecodeKernel:
        """The same kernel with another number in `Row.limit`."""
        return dataclasses.replace(self, limit=limit)

    def make(self, inputs: DecodeInputs, isa: str | None) -> NativeDecode:
        """Build the back end for checked inputs (the `make` of a back end's module)."""
        layout = inputs.pages.layout
        if isa is not None:
            raise ValueError(f"isa={isa!r} has no meaning for a kernel in numba: it is compiled for this processor")
        if layout.order not in (self.order, "plain_bounds"):
            raise ValueError(f"this kernel reads pages of layout {self.order!r}, these are {layout.order!r}")
        if layout.dtype not in ("fp32", "bf16"):
            raise ValueError(f"kernels in numba read pages of fp32 and bf16, these are {layout.dtype}")
        address = _compiled(self.attend, layout, inputs.group).address
        whole = dataclasses.replace(inputs, split_tokens=WHOLE_ROW)
        return NumbaDecode(whole, "numba", address, self.limit)


class NumbaDecode(NativeDecode):
    """A numba kernel with the native work table; its plans run on the pool like the native ones."""

    def __init__(self, inputs: DecodeInputs, level: str, kernel: int, limit: int) -> None:
        self._limit = limit
        super().__init__(inputs, level, kernel)

    def _make_tail(self) -> tuple[int, ...]:
        words = list(super()._make_tail())
        words[Job.LIMIT - Job.SM_SCALE] = self._limit
        return tuple(words)


def decode_kernel(attend: Callable[..., None], **options: Any) -> DecodeKernel:
    """Make a back end of a function of one row and KV head; its `make` is what a module of a back end has to offer."""
    return DecodeKernel(attend if hasattr(attend, "py_func") else function(attend), **options)


@cache
def _compiled(attend: Any, layout: Layout, group: int) -> Any:
    element = types.uint16 if layout.element_bytes == 2 else types.float32
    signature = types.void(types.CPointer(types.int64), types.int64, types.int64)
    return numba.cfunc(signature, nopython=True, error_model="numpy", fastmath=FAST)(
        _driver(attend, layout, group, element)
    )
