"""Greedy decoding by transformers itself: what token ids are held against."""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hybridattn.core.errors import InputError
from hybridattn.models.load import load
from hybridattn.models.locate import resolve


@lru_cache(maxsize=1)
def greedy_reference(model: str, prompts: tuple[str, ...], max_tokens: int) -> list[list[int]]:
    """New token ids of each prompt, decoded alone in fp32 (end-of-sequence token included, as everywhere)."""
    source = resolve(model)
    if source.folder is None:
        raise InputError(f"model '{model}' has random weights and no tokenizer: there is no reference text")
    tokenizer = load(model).tokenizer
    assert tokenizer is not None
    logging.disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_id,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers
