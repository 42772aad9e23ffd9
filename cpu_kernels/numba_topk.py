"""APPROXIMATE paged attention in plain numba: of each row, the pages whose keys can score highest, as in Quest.

A page knows the minimum and maximum of each dim of its keys (``plain_bounds``), so no key of it can score more than

    bound = sum_d max(scale q_d min_d, scale q_d max_d)        with cap and bias as for a score

The `limit` pages (32 by default, ``numba_topk_approx:64`` takes 64) with the highest bound of any query head of the
group are read, the newest among them always; out and lse are those of attention over their keys alone. A row of no more
pages than that is exact. Quest: Tang et al. 2024, arXiv 2406.10774; bounds there are per query head, here per KV head.
"""

from __future__ import annotations

import numpy as np

from cpu_kernels.numba_exact import add_page, finish, shaped
from cpu_kernels.numba_frame import bounds_of, decode_kernel, function, widen


@function
def bound(q, low_high, at, row):
    """The most that a key between the bounds, at one of the positions around `at`, can score for any query head."""
    group, dim = q.shape
    best = np.float32(-np.inf)
    for g in range(group):
        most = np.float32(0)
        for d in range(dim):
            x = q[g, d] * row.scale
            most += max(x * low_high[0, d], x * low_high[1, d])
        best = max(best, shaped(most, at, g, row))
    return best


@function
def choose(q, kv, row, start, bounds):
    """Mark the pages to read: their entry of `bounds` becomes +inf."""
    size = row.page_size
    for i in range(len(bounds)):
        low_high = bounds_of(kv[row.pages[start + i], row.head], size)
        bounds[i] = bound(q, low_high, min((start + i + 1) * size, row.last) - 1, row)
    bounds[-1] = np.inf
    for _ in range(row.limit - 1):
        best = -1
        for i in range(len(bounds)):
            if bounds[i] < np.inf and (best < 0 or bounds[i] > bounds[best]):
                best = i
        if best < 0:
            break
        bounds[best] = np.inf


@function
def attend(q, kv, row, out, lse):
    """The keys of the chosen pages of one row and KV head."""
    (group, dim), size = q.shape, row.page_size
    start, stop = row.first // size, (row.last + size - 1) // size
    bounds = np.full(stop - start, np.inf, np.float32)
    if len(bounds) > row.limit:
        choose(q, kv, row, start, bounds)
    keys, values = np.empty((size, dim), np.float32), np.empty((size, dim), np.float32)
    s, m, l = np.empty(size, np.float32), np.full(group, -np.inf, np.float32), np.zeros(group, np.float32)  # noqa: E741
    for page in range(start, stop):
        if bounds[page - start] < np.inf:
            continue
        a, b = max(row.first - page * size, 0), min(row.last - page * size, size)
        block = kv[row.pages[page], row.head]
        widen(block[a:b], keys)
        widen(block[size + a : size + b], values)
        add_page(q, keys, values, b - a, page * size + a, row, s, m, l, out)
    finish(row, m, l, out, lse)


kernel = decode_kernel(attend, order="plain_bounds", approximate=True, limit=32)
make = kernel.make
