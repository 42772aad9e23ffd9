"""Memory of results: no two elements in one place, none of an input's unless it is exactly that input's."""

from collections.abc import Sequence

import torch

from gpu_kernels.checks import refuse


def check_result(name: str, tensor: torch.Tensor) -> None:
    """Refuse a result whose elements lie over each other (an expanded tensor)."""
    end = 1
    for stride, count in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < end and tensor.numel():
            refuse(
                name,
                f"strides {tensor.stride()} lay its elements over each other (expanded?): results need a place each",
            )
        end += stride * (count - 1)


def refuse_overlap(
    name: str, result: torch.Tensor, others: Sequence[tuple[str, torch.Tensor | None]], *, in_place: bool = True
) -> None:
    """Refuse a result that shares memory with another tensor, unless (``in_place``) it is exactly that tensor."""
    low, high = _span(result)
    for other_name, other in others:
        if other is None:
            continue
        start, stop = _span(other)
        if start >= high or low >= stop or low == high or start == stop:
            continue
        if in_place and _same_place(result, other):
            continue
        a, b = _rows(result), _rows(other)
        sizes = [x.shape[-1] * x.element_size() for x in (result, other)]
        before = torch.searchsorted(b, a + sizes[0]) - 1  # the last row of `other` that begins before a's row ends
        if bool(((before >= 0) & (b[before.clamp(min=0)] + sizes[1] > a)).any()):
            exact = " other than in exactly its place" if in_place else ""
            refuse(name, f"shares memory with {other_name}{exact}: one would overwrite the other")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last; an empty tensor has none."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():
        return start, start
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * size


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.data_ptr(), a.dtype, a.shape) != (b.data_ptr(), b.dtype, b.shape):
        return False
    return all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Addresses of the contiguous rows (all axes but the last), ascending."""
    at = torch.tensor([tensor.data_ptr()])
    for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        at = (at[:, None] + torch.arange(n) * (s * tensor.element_size())).flatten()
    return at.sort().values
