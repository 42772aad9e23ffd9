"""GGUF files as transformers safetensors folders in the user's cache, converted once."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.folders import cache_dir, folder_in_work, publish, remove_leftovers, why_unwritable
from hybridattn.models.config import parse_config
from hybridattn.models.expected import listed
from hybridattn.models.gguf_facts import GgufFacts
from hybridattn.models.gguf_header import GgufHeader, check_header
from hybridattn.models.gguf_tensors import check_places, check_tensors, check_whole

CONVERTER_VERSION = 2  # part of the cache key: raise it when the converted folder changes
_SAMPLE_BYTES = 1 << 20
_WORK = ".converting-"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_uncached: dict[str, tempfile.TemporaryDirectory[str]] = {}  # by key, until the process ends


def converted(path: Path, version: str = "") -> Path:
    """The safetensors folder of a GGUF file; made on the first call, found on later ones.

    Two processes may convert at once: each writes a folder of its own and renames it into place, and whoever comes
    second drops his copy and takes the first one's. Nobody waits, and a half-written folder is never seen.

        process A   |read|convert|write tmp-a|rename -> final|use final
        process B      |read|convert|write tmp-b|rename fails: final exists; drop tmp-b|use final

    Where the cache cannot be written, the folder lives as long as this process, and one sentence says so.
    """
    key = _key(path, version)
    kept = cache_dir()
    models = None if kept is None else kept / "models"
    if models is not None:
        remove_leftovers(models, _WORK)
        if (models / key).is_dir():
            return models / key
    if key in _uncached:
        return Path(_uncached[key].name)
    header = check_header(path)
    check_places(path, header)
    facts = GgufFacts.read(path)
    check_whole(path, facts.metadata, header.tensors)
    models = _writable(models)
    passing = None if models else tempfile.TemporaryDirectory(prefix="hybridattn-", ignore_cleanup_errors=True)
    final = models / key if models else Path(passing.name if passing else "")
    began = time.monotonic()
    _say(f"converting {path.name} ({path.stat().st_size / 1e6:.0f} MB) {'' if passing else 'once '}into {final}")
    with folder_in_work(final.parent, _WORK) as work:
        _convert_or_refuse(path, work, facts, header)
        publish(work, final)
    if passing:
        _uncached[key] = passing
        atexit.register(passing.cleanup)
    _say(f"converted in {time.monotonic() - began:.0f} s")
    return final


def _writable(models: Path | None) -> Path | None:
    """``models``, made if need be; None, and one sentence, where nothing can be written there."""
    try:
        if models is not None:
            models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{models} cannot be made ({error.strerror})"
    else:
        why = why_unwritable(models) or ""
    if why:
        _say(f"{why}: the model is converted for this run only")
    return None if why else models


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _convert_or_refuse(path: Path, work: Path, facts: GgufFacts, header: GgufHeader) -> None:
    try:
        _convert(path, work, facts, header)
    except (InputError, OSError):  # a file that is refused, a disk that is full
        raise
    except Exception as error:  # whatever the libraries make of a file that is not what it says
        refused = _OS_ERROR.search(str(error))
        if refused is not None:  # by the system, which the libraries in Rust say in their own words: a full disk
            raise OSError(int(refused[1]), os.strerror(int(refused[1])), str(work)) from error
        raise InputError(f"{path.name} cannot be converted: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _key(path: Path, version: str) -> str:
    """Names a conversion by file name, version, size and a digest of both ends of the file."""
    size = path.stat().st_size
    with path.open("rb") as f:
        digest = hashlib.sha256(f.read(_SAMPLE_BYTES))
        f.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(f.read())
    parts = [path.stem, version, str(size), digest.hexdigest()[:12], f"c{CONVERTER_VERSION}"]
    return "-".join(p for p in parts if p)


def _convert(path: Path, folder: Path, facts: GgufFacts, header: GgufHeader) -> None:
    """Writes weights, config and tokenizer of ``path`` into ``folder`` through transformers."""
    # Imported here because a start from the cache must not pay for transformers (seconds).
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**where)
    _correct(config, facts)
    decoder = parse_config(config.to_dict(), name=path.name)
    facts.check_heads(path.name, decoder.shape.head_dim)
    check_tensors(path, header, decoder)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(folder)
    _set_pre_tokenizer(folder / "tokenizer.json", facts.pre_tokenizer)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **where, config=config, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    _check_report(path.name, report)
    # transformers refuses to save what it loaded from a GGUF, although the weights are plain float32 by now. A fresh
    # model of the same config, without the mark, can be saved.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig.from_model_config(config)
    plain.save_pretrained(folder)
    del model, plain
    gc.collect()


def _correct(config: Any, facts: GgufFacts) -> None:
    """What transformers reads otherwise than the file means it: rotary settings, and the window of its own default."""
    config.rope_parameters = {**config.rope_parameters, "rope_theta": facts.rope_theta, **facts.rope_scaling}
    if getattr(config, "sliding_window", None) is not None:  # the facts refuse a file that declares one
        config.sliding_window = None


def _check_report(name: str, report: Mapping[str, Any]) -> None:
    """InputError for what the loader itself says about missing, unread and misshapen tensors."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in report.get(kind) or ())
        if keys:
            raise InputError(f"{name}: {kind.removesuffix('_keys')} when loaded: {listed(keys)}")


def _set_pre_tokenizer(path: Path, pre_tokenizer: dict[str, Any] | None) -> None:
    """Splits text before BPE as the file's tag says; transformers knows some tags and ignores the others."""
    if pre_tokenizer is None:
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    content["pre_tokenizer"] = pre_tokenizer
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
