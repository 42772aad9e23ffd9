"""Pieces of the running softmax that decode, prefill and the merges share."""

import triton
import triton.language as tl


@triton.jit
def soft_cap(score, cap):
    """``cap * tanh(score / cap)``; Triton has no portable tanh.

    Near zero ``1 - 2 / (exp(2x) + 1)`` cancels, so a Taylor polynomial serves |x| < 1/4 (its next term is below
    one part in 3e6 there). The clamp at 15, where tanh is 1 in float32, keeps exp from overflowing.
    """
    x = score / cap
    wide = tl.minimum(tl.maximum(x, -15.0), 15.0)
    far = 1.0 - 2.0 / (tl.exp(2.0 * wide) + 1.0)
    near = tl.minimum(tl.maximum(x, -0.25), 0.25)
    square = near * near
    near = near * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    return cap * tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def finite_or_zero(m):
    """A maximum that may be -inf (no key yet), as a number that is safe to subtract."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def advance(score, m, total):
    """One step of the running softmax over the last axis of ``score [rows, keys]``.

    Returns the weights, the factor by which earlier sums shrink, the new maximum and the new sum. A row without a
    key so far has m = -inf and total = 0, and stays so: there is no finite stand-in for minus infinity.
    """
    top = tl.maximum(m, tl.max(score, axis=1))
    safe = finite_or_zero(top)
    weight = tl.exp(score - safe[:, None])
    shrink = tl.exp(m - safe)
    return weight, shrink, top, total * shrink + tl.sum(weight, axis=1)


@triton.jit
def finish(m, total, sink):
    """The factor that turns the running sum into the output, and the natural-log LSE.

    ``sink`` is one more logit in the denominator that has no value row (-inf: none). Without it every factor here
    is exactly 1, so a result that passes through is unchanged bit for bit. A row without keys is empty (0 and -inf)
    with a sink as well, or a merge would count the sink twice.
    """
    top = tl.maximum(m, sink)
    safe = finite_or_zero(top)
    shrink = tl.exp(m - safe)
    denominator = total * shrink + tl.exp(sink - safe)
    some = total > 0.0
    denominator = tl.where(some, denominator, 1.0)
    lse = tl.where(some, safe + tl.log(denominator), float("-inf"))
    return shrink, denominator, lse
