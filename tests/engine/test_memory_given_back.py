"""A model that is closed or dropped leaves nothing behind, whether or not the garbage collector comes by."""

from __future__ import annotations

import gc
import weakref

import pytest

from hybridattn import LLM
from hybridattn.models.load import load


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_close_gives_the_pages_back_while_others_still_refer_to_them():
    with LLM("dummy:tiny", policy="sync_offload", cpu_fraction=0.5, gpu_kv_blocks=4, cpu_kv_blocks=4) as llm:
        llm.generate([[1, 2, 3], [4, 5, 6]])
        tier = llm.stages.gpu_tier
        pools = (tier._pages.buffer, tier.cpu_pages.buffer)
        assert all(pool.any() for pool in pools)
    assert not any(pool.any() for pool in pools)
    llm.close()


@pytest.mark.parametrize("policy", ["sync_offload", "async_overlap", "asymmetric", "split"])
def test_a_dropped_model_goes_with_its_last_reference(policy, no_collector):
    with LLM("dummy:tiny", policy=policy, gpu_kv_blocks=4, cpu_kv_blocks=8, share_prefixes=True) as llm:
        llm.generate([[1, 2, 3], [4, 5, 6]])
        gone = weakref.ref(llm.model.weights.embed), weakref.ref(llm.engine), weakref.ref(llm.stages)
    del llm
    assert [ref() for ref in gone] == [None] * 3


def test_a_shared_model_stays(no_collector):
    model = load("dummy:tiny")
    with LLM(model) as llm:
        expected = llm.generate([[1, 2, 3]])[0].token_ids
    with LLM(model) as llm:
        assert llm.generate([[1, 2, 3]])[0].token_ids == expected
