"""Choosing the next token of each row.

The order of the steps: penalties, blocked ids, temperature, top-k, top-p on what top-k left, min-p, draw. A draw
depends on the row's logits and its (seed, output position) only, never on the batch or on earlier draws, so that a
request gets the same tokens whatever runs beside it and after a preemption.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridattn.core.errors import InputError
from hybridattn.core.params import SamplingParams
from hybridattn.core.stages import RequestLike, RowFault


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What sampling needs to know of one row.

    ``seed`` may be None for a greedy row. ``position`` is the number of tokens that the request has generated before
    this one. ``history`` (prompt, then output) and ``num_prompt`` are read only if a penalty is set. ``blocked`` ids
    cannot be drawn; those that the vocabulary does not have are ignored.
    """

    params: SamplingParams
    seed: int | None
    position: int
    history: tuple[int, ...] = ()
    num_prompt: int = 0
    blocked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.seed is None and not self.params.greedy:
            raise InputError("a sampled row needs a seed; give the request one when it is made")
        if self.position < 0:
            raise InputError(f"output position must be at least 0, got {self.position}")

    @classmethod
    def of(cls, request: RequestLike, seed: int | None, eos_ids: Collection[int], unseen: int = 0) -> SampleRow:
        """The row of a request as it stands now, with ``unseen`` tokens more that are not known yet; copies its tokens
        if a penalty needs them."""
        params: SamplingParams = request.params
        position = len(request.token_ids) + unseen - request.num_prompt
        return cls(
            params=params,
            seed=seed,
            position=position,
            history=tuple(request.token_ids) if params.penalised else (),
            num_prompt=request.num_prompt if params.penalised else 0,
            blocked=tuple(sorted(params.ending_ids(eos_ids))) if position < params.min_tokens else (),
        )

    @property
    def plain(self) -> bool:
        """The likeliest token of the untouched logits."""
        return self.params.greedy and not self.params.penalised and not self.blocked


def sample_each(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | RowFault]:
    """One token id per row, or why that row has none: the fault of one row is its own, the others draw as if alone.

    Parameters
    ----------
    logits : float32 ``[n, vocab_size]``; left as they are
    rows : one per row of ``logits``

    Returns
    -------
    Per row a token id, or a `RowFault`: a maximum that is not finite (NaN, an infinity), penalties that make it so, or
    no token that is allowed.

    Raises
    ------
    InputError : another number of rows
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise InputError(f"logits have shape {tuple(logits.shape)} for {len(rows)} rows")
    best = argmax_each(logits)
    return [
        found if row.plain or isinstance(found, RowFault) else _choose(logits[i], row, i)
        for i, (row, found) in enumerate(zip(rows, best, strict=True))
    ]


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """As `sample_each`, where the fault of any row is an InputError."""
    return _all_tokens(sample_each(logits, rows))


def argmax(logits: torch.Tensor) -> list[int]:
    """As `argmax_each`, where the fault of any row is an InputError."""
    return _all_tokens(argmax_each(logits))


def _all_tokens(found: list[int | RowFault]) -> list[int]:
    tokens = []
    for token in found:
        if isinstance(token, RowFault):
            raise InputError(str(token))
        tokens.append(token)
    return tokens


def argmax_each(logits: torch.Tensor) -> list[int | RowFault]:
    """Index of the largest logit of each row of ``[n, vocab_size]``, the lowest index among equals.

    ``torch.argmax`` promises no order among equals. A row whose maximum is not finite has a `RowFault` instead.
    """
    if logits.device.type == "cpu":
        values = logits.detach().float().numpy()
        indices = values.argmax(axis=1)  # documented: the first one; NaN counts as largest
        top = values[np.arange(len(values)), indices]
    else:
        indices, top = (t.cpu().numpy() for t in first_maximum(logits))
    return [token_or_fault(row, int(token), value) for row, (token, value) in enumerate(zip(indices, top, strict=True))]


def token_or_fault(row: int, token: int, top: float) -> int | RowFault:
    """The token of a row whose largest logit is ``top``, unless that is not finite."""
    return token if math.isfinite(top) else RowFault(row, f"have the maximum {top}, expected a finite number")


def first_maximum(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest index of the largest logit of each row, and that logit in float32; for devices without NumPy."""
    most = logits.amax(dim=1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(logits == most, ids, logits.shape[1]).amin(dim=1), most[:, 0].float()


@np.errstate(all="ignore")  # extreme penalties and temperatures overflow; what that leaves is looked at below
def _choose(logits: torch.Tensor, row: SampleRow, index: int) -> int | RowFault:
    values = logits.detach().cpu().numpy().astype(np.float64)  # by NumPy: torch would wake its thread pool for it
    _penalise(values, row)
    top = values.max()
    values[[i for i in row.blocked if i < len(values)]] = -math.inf
    allowed = values.max()
    reason = why_no_token(row, top, allowed)
    if reason is not None:
        return RowFault(index, reason)
    return int(values.argmax()) if row.params.greedy else _draw(values, row, allowed)


def why_no_token(row: SampleRow, top: float, allowed: float) -> str | None:
    """Why a row has no token, by its largest logit after penalties and the largest one that is not blocked; None where
    it has one."""
    if not math.isfinite(top):
        after = f" after {_penalties(row.params)}" if row.params.penalised else ""
        return f"have the maximum {top}{after}, expected a finite number"
    if allowed == -math.inf:
        return f"leave no token that is allowed: {len(row.blocked)} ids are blocked until min_tokens"
    return None


def _penalties(p: SamplingParams) -> str:
    return (
        f"repetition_penalty {p.repetition_penalty:g}, presence_penalty {p.presence_penalty:g} and "
        f"frequency_penalty {p.frequency_penalty:g}"
    )


def _penalise(values: np.ndarray, row: SampleRow) -> None:
    """Repetition (Keskar et al. 2019, CTRL, section 4.1) over prompt and output, then presence and frequency (the
    published formula of the OpenAI API) over the output; in place."""
    p = row.params
    if p.repetition_penalty != 1.0:
        seen = _within(np.unique(np.array(row.history, dtype=np.int64)), values)
        old = values[seen]
        values[seen] = np.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        output = np.array(row.history[row.num_prompt :], dtype=np.int64)
        seen, counts = np.unique(_within(output, values), return_counts=True)
        values[seen] -= p.presence_penalty + p.frequency_penalty * counts


def _within(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Ids that have a logit: a tokenizer may have more than the model."""
    return ids[ids < len(values)]


def _draw(values: np.ndarray, row: SampleRow, top: float) -> int:
    """Inverse of the cumulative distribution, over the kept ids in ascending order."""
    p = row.params
    ids = np.flatnonzero(values > -math.inf)
    ids = ids[_top_k(values[ids], p.top_k)]
    weights = np.exp((values[ids] - top) / p.temperature)
    kept = _top_p(weights, values[ids], p.top_p) & (weights >= p.min_p) & (weights > 0)  # the largest weight is 1
    ids, weights = ids[kept], weights[kept]
    assert row.seed is not None  # checked when the row was made
    cumulative = weights.cumsum()
    at = np.searchsorted(cumulative, uniform(row.seed, row.position) * cumulative[-1], side="right")
    return int(ids[min(at, len(ids) - 1)])


def _top_k(values: np.ndarray, k: int) -> np.ndarray:
    """Mask of the k largest; among equals at the edge the lowest ids."""
    if k < 1 or k >= len(values):
        return np.ones(len(values), dtype=bool)
    edge = np.partition(values, len(values) - k)[len(values) - k]
    mask = values > edge
    mask[np.flatnonzero(values == edge)[: k - int(mask.sum())]] = True
    return mask


def _top_p(weights: np.ndarray, values: np.ndarray, top_p: float) -> np.ndarray:
    """Mask of the smallest set of largest weights whose share reaches ``top_p`` (Holtzman et al. 2019), never empty.

    ``values`` order weights that a high temperature makes equal.

    Weights below ``(1 - top_p) / n`` of the total cannot belong to it: together they hold less than what may be left
    out. Only the others are sorted.
    """
    if top_p >= 1.0:
        return np.ones(len(weights), dtype=bool)
    total = weights.sum()
    near = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    order = near[np.argsort(-values[near], kind="stable")]
    count = int(np.searchsorted(weights[order].cumsum(), top_p * total, side="left")) + 1
    mask = np.zeros(len(weights), dtype=bool)
    mask[order[:count]] = True
    return mask


def uniform(seed: int, position: int) -> float:
    """The draw of a request at an output position: a number in [0, 1), a function of both integers alone.

    Counter-based (Salmon et al. 2011, Philox 4x64-10): the seed is the key, the position the counter.
    """
    generator = np.random.Philox(key=seed, counter=[0, position, 0, 0])
    return float(int(generator.random_raw()) >> 11) * 2.0**-53
