"""When a request ends: length, end-of-sequence, stop ids, stop strings."""

from __future__ import annotations

from hybridattn.core.request import Request


def stop_reason(request: Request, eos_ids: frozenset[int]) -> str | None:
    """Why the request ends after its newest token, or None.

    A stop id of the user's own ends it even under ``ignore_eos``; an end-of-sequence token counts only from
    ``min_tokens`` on (sampling blocks it before). A request without params (simulation) ends by length only.
    """
    params = request.params
    if params is not None:
        token = request.token_ids[-1]
        if token in params.stop_token_ids:
            return "stop"
        if token in eos_ids and not params.ignore_eos and request.num_output >= params.min_tokens:
            return "stop"
        if request.text is not None and request.text.stopped:
            return "stop"
    return "length" if request.num_output >= request.max_tokens else None
