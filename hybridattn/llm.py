"""The front door for Python users: prompts in, text out."""

from __future__ import annotations

import math
import operator
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridattn.core.config import PAGE_SIZES, EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.interrupts import interrupts_held
from hybridattn.core.params import NoEffectWarning, SamplingParams, as_number
from hybridattn.core.provenance import git_commit
from hybridattn.core.records import RunRecords
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.core.terminal import CountLine
from hybridattn.core.trace import Trace
from hybridattn.cost.profile import Profile
from hybridattn.devices.live import close_abandoned
from hybridattn.devices.registry import open_device
from hybridattn.engine.call import Call, Output
from hybridattn.engine.engine import Engine
from hybridattn.engine.session import Session
from hybridattn.kv.storage import best_page_size
from hybridattn.kv.store import KVStore
from hybridattn.models.gpu_tier import GpuTier
from hybridattn.models.load import load
from hybridattn.models.stream import TextStream
from hybridattn.models.torch_stages import TorchStages
from hybridattn.planning.choice import PolicyChoice
from hybridattn.planning.planner import Planner
from hybridattn.policies.base import Policy

_IMPATIENT_S = 1.0  # for lanes to end after a second Ctrl-C
_FOREVER_S = 1e9  # 32 years: as long as any wait needs to be
GPU_TOKENS, CPU_TOKENS = 4096, 8192  # that the tiers hold unless told otherwise
LATEST_SPANS = 16_384  # some 4 MB: about a hundred steps of a model with 30 layers


class LLM:
    """A model on a device under a policy.

    While one with the device ``host`` is open, torch computes with that device's number of threads in the whole process
    (1 by default); closing puts the old number back.

    Parameters
    ----------
    model : str, path or LoadedModel
        ``smollm2-135m`` (embedded), a safetensors folder, a GGUF file, or ``dummy:<shape>``. What
        ``hybridattn.models.load.load`` returned may be given instead, to share weights between several LLMs.
    device : str
        ``host``; ``cuda`` is refused with the reason where it cannot be used, never replaced.
    policy : str or Policy
        ``gpu_only``, ``sync_offload``, ``async_overlap``, ``asymmetric``, ``adaptive``, ``auto``, or ``module:Class``.
        The last two plan by a profile of this machine, in a process of their own.
    dtype : str
        ``fp32``, ``bf16`` or, on ``cuda`` only, ``fp16`` (cards without bf16): weights, activations and, unless
        ``kv_dtype`` is given, K and V.
    gpu_kv_blocks, cpu_kv_blocks : int, optional
        Pages per tier, all layers included; default: as many as hold 4,096 and 8,192 tokens.
    page_size : int, optional
        Tokens per page: 16, 32, 64 or 128; default: what ``hybridattn calibrate`` found best for this processor, else
        what a table says of it.
    pause_tier : str
        Where K,V of a :meth:`session` rest between its turns: ``cpu`` or ``gpu``.
    share_prefixes : bool
        Requests that begin with the same tokens share the whole pages of them, within one ``cache_salt`` of their
        parameters. Off by default: who shares can see from times what others asked before.
    kv_store_dir : str or Path, optional
        With ``share_prefixes``: a folder where K,V of prefixes and sessions go when the CPU tier needs their room, and
        at :meth:`close`, so that they survive the process. What was said can be read from its files: the folder is made
        for its owner alone.
    kv_store_bytes : int
        Most bytes of such files, for this model and layout.
    cpu_fraction : float, optional
        Force this share of the requests onto the CPU tier.
    profile : str, Path or Profile, optional
        Measured machine that ``adaptive`` and ``auto`` plan by; default: what ``hybridattn calibrate`` wrote.
        ``asymmetric`` decides by it where it is given, else it lets all CPU rows run.
    policy_options, device_options : dict, optional
        Passed to the policy and the device.
    record : int or bool
        Keep about this many of the latest spans for :meth:`trace`; True keeps all of them, False none.

    Attributes
    ----------
    interrupted : outputs of the latest ``generate`` where Ctrl-C ended it: the answers that were ready, and with the
        reason ``abort`` what there was of the others; else empty

    Warns
    -----
    NoEffectWarning
        An option cannot act beside the others: ``profile`` with a policy that reads none, a policy that uses the CPU
        tier without pages there.

    Raises
    ------
    InputError
        Unknown model, policy, device or dtype; limits that cannot be met; not enough memory.

    Examples
    --------
    >>> from hybridattn import LLM, SamplingParams
    >>> with LLM(model="smollm2-135m", policy="async_overlap") as llm:
    ...     out = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))
    """

    def __init__(
        self,
        model: Any = "smollm2-135m",
        device: str = "host",
        policy: str | Policy = "async_overlap",
        *,
        dtype: str = "fp32",
        kv_dtype: str | None = None,
        gpu_kv_blocks: int | None = None,
        cpu_kv_blocks: int | None = None,
        page_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        run_ahead: int = 2,
        op_timeout_s: float = 60.0,
        pause_tier: str = CPU_TIER,
        share_prefixes: bool = False,
        kv_store_dir: str | Path | None = None,
        kv_store_bytes: int = 1 << 30,
        cpu_fraction: float | None = None,
        profile: str | Path | Profile | None = None,
        policy_options: dict[str, Any] | None = None,
        device_options: dict[str, Any] | None = None,
        backend: str = "native",
        record: bool | int = LATEST_SPANS,
    ) -> None:
        if not isinstance(record, int) or record < 0:
            raise InputError(f"record must be True, False or a number of spans of at least 0, got {record!r}")
        options = _options("policy_options", policy_options)
        of_device = _options("device_options", device_options)
        if cpu_fraction is not None:
            options["cpu_fraction"] = cpu_fraction
        choice = PolicyChoice(policy, options, profile)
        dtypes = ("fp32", "bf16", "fp16") if device == "cuda" else ("fp32", "bf16")
        if dtype not in dtypes:
            raise InputError(f"dtype must be {' or '.join(dtypes)} on device '{device}', got '{dtype}'")
        op_timeout_ns = _nanoseconds("op_timeout_s", op_timeout_s)
        self.interrupted: list[Output] = []
        self.device: Any = None
        self.planner: Planner | None = None
        self._saves: Engine | None = None  # to the file tier, once
        self._holds: GpuTier | None = None  # pages, until it is closed
        try:
            with interrupts_held:  # or an interrupt would leave threads behind that nobody knows
                close_abandoned()
                self.device = open_device(device, record=record, **of_device)
            where = getattr(self.device, "torch_device", "cpu")
            self.model = load(model, dtype=dtype, device=where) if isinstance(model, str | os.PathLike) else model
            if not hasattr(self.model, "weights"):
                raise InputError(
                    f"model must be a name, a path or what hybridattn.models.load.load returned, got {model!r}"
                )
            limit = self.model.config.shape.max_model_len
            page = best_page_size() if page_size is None else page_size
            config = EngineConfig(
                gpu_kv_blocks=_blocks(gpu_kv_blocks, GPU_TOKENS, page),
                cpu_kv_blocks=_blocks(cpu_kv_blocks, CPU_TOKENS, page),
                page_size=page,
                max_model_len=min(limit, 2048) if max_model_len is None else max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                run_ahead=run_ahead,
                op_timeout_ns=op_timeout_ns,
                pause_tier=pause_tier,
                share_prefixes=share_prefixes,
            )
            if kv_store_dir is not None and not share_prefixes:
                raise InputError(f"kv_store_dir '{kv_store_dir}' keeps shared pages: it needs share_prefixes=True")
            if config.max_model_len > limit:
                name = self.model.config.shape.name
                raise InputError(f"max_model_len {max_model_len} exceeds the {limit} positions of model '{name}'")
            self.stages = TorchStages(self.model, self.device, config, kv_dtype or dtype, backend)
            self._holds = self.stages.gpu_tier
            with interrupts_held:
                self.policy, self.planner = choice.make(
                    self.model.config.shape, self.stages.cost.dtype, kv_dtype or dtype, self.device.profile
                )
            self._record = bool(record)
            self._say_what_cannot_act(config.cpu_kv_blocks)
            self._start_engine(config, kv_store_dir, kv_store_bytes)
        except BaseException as error:
            self.close()  # or its threads would outlive a refused argument
            if _out_of_memory(error):
                raise InputError(f"this machine has too little memory for what was asked: {error}") from error
            raise

    def _say_what_cannot_act(self, cpu_kv_blocks: int) -> None:
        if (CPU_TIER in self.policy.tiers or "cold_pages" in self.policy.hooks) and not cpu_kv_blocks:
            warnings.warn(
                f"policy '{self.policy.name}' uses the CPU tier, but cpu_kv_blocks 0 leaves no room there: all "
                "requests stay on the GPU tier",
                NoEffectWarning,
                stacklevel=3,
            )

    def _start_engine(self, config: EngineConfig, kv_store_dir: str | Path | None, kv_store_bytes: int) -> None:
        self.config = config
        self._sessions = self._traced_ns = 0
        self._new_text: Callable[[SamplingParams], Any] | None = None
        if self.model.tokenizer is not None:
            pieces = self.model.tokenizer.piece_table
            self._new_text = lambda p: TextStream(pieces, p.stop, p.skip_special_tokens)
        stop_planning = self.planner.close if self.planner is not None else lambda: None
        eos_ids = frozenset(self.model.config.eos_ids)
        open_store = None
        if kv_store_dir is not None:
            open_store = partial(KVStore, kv_store_dir, self.stages.fingerprint(), kv_store_bytes)
        self.engine = Engine(self.stages, self.device, self.policy, config, eos_ids, stop_planning, open_store)
        self.device.owner = weakref.ref(self.engine)
        self._saves = self.engine if open_store is not None else None

    # -- text --------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Answer all prompts, batched; outputs in the order of the prompts.

        Parameters
        ----------
        prompts : str, list of str, or list of token id lists
        params : SamplingParams, or one per prompt; default greedy, 16 tokens
        progress : count answers and tokens on the error stream meanwhile

        Raises
        ------
        InputError
            A prompt that is empty, too long or fits no tier; nothing of the call has run then.
        DeviceError
            A lane failed or stopped; the error names op, lane and requests, and this LLM cannot be used any more. A
            request that fails alone raises nothing: its output has the reason ``error``, and ``error`` says why.
        KeyboardInterrupt
            After the step under way; what was ready is in ``interrupted``, and the LLM can go on.
        """
        self.interrupted = []
        with self.stream(prompts, params) as call:
            try:
                _count(call) if progress else deque(call, maxlen=0)
            except KeyboardInterrupt:
                call.close()
                self.interrupted = call.outputs()
                raise
        return call.outputs()

    def stream(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Call:
        """Like :meth:`generate`, but an iterator that yields each token as it comes; it also has ``outputs()``.

        Closing it, begun or not, or letting go of it aborts what is unfinished.
        """
        return Call(self.engine, self._new_text, *self._checked(prompts, params))

    start = stream  # for who does not read the tokens one by one

    def session(self, name: str | None = None) -> Session:
        """A conversation: each turn goes on from the one before, whose K,V are kept and found again.

        Between turns they rest on the CPU tier where it has room (argument ``pause_tier``), and give way to requests
        that run; a turn that does not find them computes its history again, with the same tokens.

        Examples
        --------
        >>> with LLM() as llm, llm.session() as chat:
        ...     plan = chat.generate("Name a city.", SamplingParams(max_tokens=8))
        ...     answer = chat.generate(" Tool result: sunny. So")
        """
        if name is None:
            self._sessions += 1
            name = f"session-{self._sessions}"
        if not isinstance(name, str) or not name:
            raise InputError(f"a session's name must be a text that is not empty, got {name!r}")
        return Session(name, self._begin_turn, self.engine.end_session)

    def _begin_turn(
        self,
        name: str,
        context: list[int],
        prompt: Any,
        params: SamplingParams | None,
        on_end: Callable[[list[Output]], None],
    ) -> Call:
        one = prompt if isinstance(prompt, str) else [prompt]
        (((text, ids),), (chosen,)) = self._checked(one, params)
        tokenizer = self.model.tokenizer
        prefix = list(tokenizer.prefix_ids) if tokenizer is not None and context and text is not None else []
        if prefix and ids[: len(prefix)] == prefix:
            ids = ids[len(prefix) :]  # a context begins only once
        return Call(self.engine, self._new_text, [(text, context + ids)], [chosen], name, on_end)

    def _checked(self, prompts: Any, params: Any) -> tuple[list[tuple[str | None, list[int]]], list[SamplingParams]]:
        """Encoded prompts and one SamplingParams for each."""
        if not isinstance(prompts, str | Sequence) or isinstance(prompts, bytes):
            raise InputError(f"prompts must be a text or a sequence of prompts, got {type(prompts).__name__}")
        encoded = [self._encode(i, p) for i, p in enumerate([prompts] if isinstance(prompts, str) else prompts)]
        if params is None or isinstance(params, SamplingParams):
            return encoded, [params or SamplingParams()] * len(encoded)
        chosen = list(params) if isinstance(params, Sequence) else [params]
        wrong = next((p for p in chosen if not isinstance(p, SamplingParams)), None)
        if wrong is not None or None in chosen:
            raise InputError(f"params must be a SamplingParams or one per prompt, got {wrong!r}")
        if len(chosen) != len(encoded):
            raise InputError(
                f"params must hold one SamplingParams per prompt: {len(chosen)} for {len(encoded)} prompts"
            )
        return encoded, chosen

    def _encode(self, index: int, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            return None, self._token_ids(index, prompt)
        if self.model.tokenizer is None:
            raise InputError("a dummy model has no tokenizer: give token ids instead of text")
        return prompt, self.model.tokenizer.encode(prompt) if prompt else []

    def _token_ids(self, index: int, prompt: Any) -> list[int]:
        """Integers of any kind (numpy's and torch's included), within the vocabulary."""
        try:
            ids = [operator.index(t) for t in prompt]
        except TypeError as error:
            raise InputError(f"prompt {index} must be a text or a sequence of integer token ids: {error}") from error
        vocab = self.model.config.shape.vocab_size
        outside = next((t for t in ids if not 0 <= t < vocab), None)
        if outside is not None:
            raise InputError(f"prompt {index}: token id {outside} lies outside the vocabulary 0..{vocab - 1}")
        return ids

    # -- what happened -----------------------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """The spans since the last call, with where they come from. Waits (bounded) for ops still running.

        Only the latest are kept (argument ``record``): a warning and ``Trace.dropped`` say how many were not.
        """
        if not self._record:
            raise InputError("this LLM keeps no spans for a trace: open it with record=True")
        spans = self.engine.drain()
        spread_ns, dropped = getattr(self.device, "clock_spread_ns", 0), self.device.dropped
        if dropped:
            warnings.warn(
                f"the trace begins late: {dropped} older spans were not kept; record=True keeps all", stacklevel=2
            )
        since_ns, self._traced_ns = self._traced_ns, self.device.now_ns()
        layouts = [c for c in self.policy.choices if c.at_ns >= since_ns]
        origin = self.device.name, self.device.kind, self.device.profile, git_commit()
        return Trace(*origin, spans, spread_ns, dropped, layouts)

    def take_records(self) -> RunRecords:
        """Records of the requests that ended, of the steps, and of what a policy that plans chose, since the last call
        (see ``hybridattn.metrics``)."""
        return self.engine.take_records()

    def free_blocks(self) -> dict[str, int]:
        """Free pages per tier; equal to ``gpu_kv_blocks`` and ``cpu_kv_blocks`` when nothing is unfinished and no
        session is open."""
        with self.engine.at_work:
            self.engine.finish_moves()
            return {tier: self.engine.kv.pools[tier].num_free for tier in (GPU_TIER, CPU_TIER)}

    def close(self, timeout_s: float | None = None) -> None:
        """Stop planning and the lanes, bounded (``timeout_s`` can shorten that), after what a file tier is to keep was
        written, and give the pages' memory back; idempotent."""
        if self.planner is not None:
            self.planner.close()
        saves, self._saves = self._saves, None
        try:
            if saves is not None:
                saves.save_pages()
        finally:
            if self.device is not None:
                self.device.close(timeout_s)
        holds, self._holds = self._holds, None
        if holds is not None:
            holds.release()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an LLM holds threads and memory of this process: open one in each process instead of copying it"
        )

    def __repr__(self) -> str:
        return f"<LLM {self.model.config.shape.name} on {self.device.name}, {self.policy.name}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        impatient = kind is KeyboardInterrupt and self.engine.broken is not None  # a lane may hang
        self.close(_IMPATIENT_S if impatient else None)


def _count(call: Call) -> None:
    """Runs a call to its end and shows how far it is."""
    line, tokens, ended, of = CountLine(), 0, 0, call.num_prompts
    for piece in call:
        tokens, ended = tokens + 1, ended + (piece.finish_reason is not None)
        line.show(f"{ended} of {of} answers, {tokens} tokens", last=ended == of)


def _out_of_memory(error: BaseException) -> bool:
    """Of the host (torch's is a RuntimeError) or of a card."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _blocks(given: int | None, tokens: int, page_size: int) -> int:
    """The pages that are asked for, else those that hold ``tokens``; `EngineConfig` refuses other page sizes."""
    if given is None:
        return tokens // int(page_size) if page_size in PAGE_SIZES else 0
    return given


def _nanoseconds(name: str, seconds: Any) -> int:
    number = as_number(seconds)
    if number is None or not 0 < number < math.inf:
        raise InputError(f"{name} must be a positive number of seconds, got {seconds!r}")
    return max(1, int(min(number, _FOREVER_S) * 1e9))


def _options(name: str, given: Any) -> dict[str, Any]:
    """A copy of a dict by names; None is an empty one."""
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        raise InputError(f"{name} must be a dict of names and values, got {given!r}")
    return dict(given or {})
