"""Choosing the next token of each row where the logits are: no logit leaves the card, one id per row does.

The same steps and the same draws as ``hybridattn.models.sampling``, for all rows at once and in float64:

    logits --penalties, blocked ids--> values --temperature--> scaled --top-k, top-p, min-p--> weights --draw--> id

Sums over the vocabulary run in another order than on the host: a draw that falls within rounding (1e-13 or so) of the
border between two tokens may take the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridattn.core.stages import RowFault
from hybridattn.models.sampling import SampleRow, first_maximum, uniform, why_no_token

ToDevice = Callable[[np.ndarray], torch.Tensor]
NONE = -torch.inf
AT_ONCE = 32  # rows: what a choice needs beside the logits is 14 numbers of 8 bytes or fewer for each of theirs


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tensors of one entry per row, where the logits are.

    ``ids`` int64; ``top`` float64, the largest logit after penalties; ``allowed`` float64, the largest one that is not
    blocked. A row whose ``top`` is not finite or whose ``allowed`` is -inf has no token.
    """

    ids: torch.Tensor
    top: torch.Tensor
    allowed: torch.Tensor


def choose(logits: torch.Tensor, rows: Sequence[SampleRow], to_device: ToDevice) -> Chosen:
    """Enqueue the choice of a token for every row.

    Parameters
    ----------
    logits : ``[n, vocab_size]``, left as they are
    rows : one per row of ``logits``
    to_device : brings a host array to the device of ``logits`` without waiting
    """
    if all(row.plain for row in rows):
        ids, top = first_maximum(logits)
        return Chosen(ids, top.double(), top.double())
    parts = [slice(i, i + AT_ONCE) for i in range(0, len(rows), AT_ONCE)]
    found = [_choose(logits[part], rows[part], to_device) for part in parts]
    return Chosen(*(torch.cat([getattr(c, name) for c in found]) for name in ("ids", "top", "allowed")))


def working_bytes(num_rows: int, vocab_size: int) -> int:
    """What ``choose`` holds at a time beside the logits, at most."""
    return min(num_rows, AT_ONCE) * vocab_size * 14 * 8


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow], to_device: ToDevice) -> Chosen:
    values = logits.double()
    _penalise(values, rows, to_device)
    top = values.amax(dim=1)
    _block(values, rows, to_device)
    ids = first_maximum(values)[0]
    allowed = values.amax(dim=1)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        at = to_device(np.array(drawn, np.int64))
        ids[at] = _draw(values[at], allowed[at], [rows[i] for i in drawn], to_device)
    return Chosen(ids, top, allowed)


def tokens_of(
    ids: Sequence[int], top: Sequence[float], allowed: Sequence[float], rows: Sequence[SampleRow]
) -> list[int | RowFault]:
    """The host's view of what was chosen: a token per row, or why it has none."""
    found: list[int | RowFault] = []
    for i, row in enumerate(rows):
        reason = why_no_token(row, top[i], allowed[i])
        found.append(int(ids[i]) if reason is None else RowFault(i, reason))
    return found


def _penalise(values: torch.Tensor, rows: Sequence[SampleRow], to_device: ToDevice) -> None:
    vocab = values.shape[1]
    seen, counted = _Entries(), _Entries()
    for i, row in enumerate(rows):
        p = row.params
        if p.repetition_penalty != 1.0:
            ids = np.unique(np.array(row.history, np.int64))
            seen.add(i, ids[ids < vocab], p.repetition_penalty)
        if p.presence_penalty or p.frequency_penalty:
            ids, counts = np.unique(np.array(row.history[row.num_prompt :], np.int64), return_counts=True)
            inside = ids < vocab
            counted.add(i, ids[inside], p.presence_penalty + p.frequency_penalty * counts[inside])
    if seen:
        at, factor = seen.placed(to_device)
        old = values[at]
        values[at] = torch.where(old > 0, old / factor, old * factor)
    if counted:
        at, less = counted.placed(to_device)
        values[at] = values[at] - less


def _block(values: torch.Tensor, rows: Sequence[SampleRow], to_device: ToDevice) -> None:
    blocked = _Entries()
    for i, row in enumerate(rows):
        ids = np.array(row.blocked, np.int64)
        blocked.add(i, ids[ids < values.shape[1]], 0.0)
    if blocked:
        at, _ = blocked.placed(to_device)
        values[at] = NONE


class _Entries:
    """Places in ``[row, id]`` with a number each, gathered on the host and sent in one go."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []

    def __bool__(self) -> bool:
        return any(len(ids) for ids in self._ids)

    def add(self, row: int, ids: np.ndarray, numbers: np.ndarray | float) -> None:
        self._rows.append(np.full(len(ids), row, np.int64))
        self._ids.append(ids)
        self._numbers.append(np.broadcast_to(np.asarray(numbers, np.float64), ids.shape))

    def placed(self, to_device: ToDevice) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        at = to_device(np.stack([np.concatenate(self._rows), np.concatenate(self._ids)]))
        return (at[0], at[1]), to_device(np.concatenate(self._numbers))


def _draw(values: torch.Tensor, allowed: torch.Tensor, rows: Sequence[SampleRow], to_device: ToDevice) -> torch.Tensor:
    """Inverse of the cumulative distribution over the kept ids in ascending order, one draw per row."""
    numbers = [
        (
            row.params.temperature,
            row.params.min_p,
            row.params.top_p,
            row.params.top_k,
            uniform(row.seed or 0, row.position),
        )
        for row in rows
    ]
    temperature, min_p, top_p, top_k, draw = to_device(np.array(numbers, np.float64).T.copy())[:, :, None]
    scaled = torch.where(values > NONE, (values - allowed[:, None]) / temperature, NONE)
    weights = scaled.exp()
    kept = (weights >= min_p) & (weights > 0)  # the largest weight is 1
    if any(0 < row.params.top_k < values.shape[1] or row.params.top_p < 1.0 for row in rows):
        kept &= _among_the_likeliest(values, weights, top_k, top_p)
    cumulative = torch.where(kept, weights, 0.0).cumsum(dim=1)
    at = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)[:, 0]
    last = torch.where(kept, torch.arange(values.shape[1], device=values.device), -1).amax(dim=1)
    return torch.minimum(at, last)


def _among_the_likeliest(
    values: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Mask of what top-k leaves (among equals at its edge the lowest ids), and of the smallest set of the largest
    weights of those whose share reaches ``top_p``, the one that crosses it included. ``values`` order weights that a
    high temperature makes equal."""
    order = values.sort(dim=1, descending=True, stable=True).indices
    rank = torch.arange(values.shape[1], device=values.device)[None, :]
    limit = torch.where(top_k < 1, float(values.shape[1]), top_k)
    sorted_weights = torch.where(rank < limit, weights.gather(1, order), 0.0)
    cumulative = sorted_weights.cumsum(dim=1)
    reached = torch.where(top_p < 1.0, top_p * cumulative[:, -1:], torch.inf)
    before = cumulative - sorted_weights
    inside = (rank < limit) & ((before < reached) | (rank == 0))
    return torch.zeros_like(inside).scatter(1, order, inside)
