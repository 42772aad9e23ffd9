"""One LLM under several threads, and LLMs that nobody closes, copies or sends elsewhere."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hybridattn import SamplingParams
from hybridattn.core.errors import DeviceError
from hybridattn.core.interrupts import interrupts_held
from hybridattn.devices import live
from hybridattn.engine.at_work import AtWork

DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True)


def test_threads_that_share_an_llm_get_their_own_answers(open_tiny):
    prompts = [[i, i + 1, 7] for i in range(12)]
    with open_tiny(gpu_kv_blocks=16, cpu_kv_blocks=32, max_num_seqs=8) as llm:
        alone = [llm.generate([p], DRAWN)[0].token_ids for p in prompts]

        def answer(i):
            if i % 2:
                return llm.generate([prompts[i]], DRAWN)[0].token_ids
            return tuple(piece.token_id for piece in llm.stream([prompts[i]], DRAWN))

        with ThreadPoolExecutor(len(prompts)) as threads:
            assert list(threads.map(answer, range(len(prompts)))) == alone
        assert llm.free_blocks() == {"gpu": 16, "cpu": 32}


def test_an_llm_that_nobody_holds_gives_its_threads_back_when_the_next_opens(open_tiny):
    with open_tiny():
        pass
    before = threading.active_count()
    for _ in range(3):
        open_tiny().generate([[1, 2]])
    piece = next(call := open_tiny().stream([[1, 2]], DRAWN))  # a call holds its LLM
    with open_tiny() as llm:
        used = threading.active_count() - before
        llm.generate([[1, 2]])
    assert piece.finish_reason is None and len(list(call)) == DRAWN.max_tokens - 1
    assert used == 2 * (threading.active_count() - before)  # those of the call's, and of this one


def test_an_abandoned_llm_that_does_not_end_is_not_the_fault_of_the_next(open_tiny, monkeypatch):
    llm = open_tiny()
    device, stop = llm.device, llm.device._stop
    monkeypatch.setattr(device, "_stop", lambda: (stop(), _raise(DeviceError("a lane hangs"))))
    del llm
    with open_tiny() as other:
        assert other.generate([[1, 2]])
    assert device not in live._open_devices


def _raise(error):
    raise error


def test_an_interrupt_while_another_thread_is_at_work_leaves_nothing_held(monkeypatch):
    """On a simulated device nothing was held back, so nothing is to be let go."""
    at_work = AtWork(False, lambda: None)
    at_work.turn = SimpleNamespace(acquire=lambda: _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), at_work:
        pass
    assert interrupts_held._depth == 0


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_not_copied(open_tiny, send):
    with open_tiny() as llm, pytest.raises(TypeError, match="open one in each process"):
        send(llm)
