"""Exact paged attention in plain numba: its formula, page by page, with the running softmax of FlashAttention.

    s_j = cap * tanh(scale * (q . k_j) / cap) + slope * (j - query)        cap and slope where they are given
    out = sum_j exp(s_j - lse) v_j,  lse = log(sum_j exp(s_j) + exp(sink))

Over the pages: m is the largest score so far, l the sum of exp(s_j - m), out the sum of exp(s_j - m) v_j.
"""

from __future__ import annotations

import math

import numpy as np

from cpu_kernels.numba_frame import decode_kernel, exp, function, widen


@function
def shaped(score, j, g, row):
    """The scaled score of key j with cap and bias."""
    if row.cap > 0:
        score = row.cap * math.tanh(score / row.cap)
    return score + row.slopes[g] * np.float32(j - row.query)


@function
def add_page(q, keys, values, count, at, row, s, m, l, out):  # noqa: E741
    """Bring m, l and out up to date with `count` keys, the first at position `at`."""
    group, dim = q.shape
    for g in range(group):
        top = m[g]
        for t in range(count):
            dot = np.float32(0)
            for d in range(dim):
                dot += q[g, d] * keys[t, d]
            s[t] = shaped(dot * row.scale, at + t, g, row)
            top = max(top, s[t])
        if top == -np.inf:  # nothing but scores of -inf so far: they weigh nothing
            continue
        shrink, total = math.exp(m[g] - top), np.float32(0)
        for d in range(dim):
            out[g, d] *= shrink
        for t in range(count):
            s[t] = exp(s[t] - top)
        for t in range(count):
            total += s[t]
        fours = count // 4 * 4  # four values at a time: out is read and written once for them
        for t in range(0, fours, 4):
            a, b, c, e = s[t], s[t + 1], s[t + 2], s[t + 3]
            for d in range(dim):
                out[g, d] += a * values[t, d] + b * values[t + 1, d] + c * values[t + 2, d] + e * values[t + 3, d]
        for t in range(fours, count):
            for d in range(dim):
                out[g, d] += s[t] * values[t, d]
        m[g], l[g] = top, l[g] * shrink + total


@function
def finish(row, m, l, out, lse):  # noqa: E741
    """Normalise out, sinks included; a group member without a key that weighs anything stays 0 and -inf."""
    for g in range(len(m)):
        if l[g] > 0:
            lse[g] = m[g] + math.log(l[g])
            if row.sinks[g] > -np.inf:
                lse[g] = max(lse[g], row.sinks[g]) + math.log1p(math.exp(-abs(lse[g] - row.sinks[g])))
            out[g] *= math.exp(m[g] - lse[g])
        else:
            out[g] = 0


@function
def attend(q, kv, row, out, lse):
    """All allowed keys of one row and KV head."""
    (group, dim), size = q.shape, row.page_size
    keys, values = np.empty((size, dim), np.float32), np.empty((size, dim), np.float32)
    s, m, l = np.empty(size, np.float32), np.full(group, -np.inf, np.float32), np.zeros(group, np.float32)  # noqa: E741
    for page in range(row.first // size, (row.last + size - 1) // size):
        a, b = max(row.first - page * size, 0), min(row.last - page * size, size)
        block = kv[row.pages[page], row.head]
        widen(block[a:b], keys)
        widen(block[size + a : size + b], values)
        add_page(q, keys, values, b - a, page * size + a, row, s, m, l, out)
    finish(row, m, l, out, lse)


kernel = decode_kernel(attend)
make = kernel.make
