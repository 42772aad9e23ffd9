"""The file tier: what survives a process, what is refused, and that no file system can fail a request."""

from __future__ import annotations

import logging
import os
import stat

import pytest

from hybridattn import LLM, SamplingParams
from hybridattn.core.errors import InputError
from hybridattn.executor.submission import Submitter
from hybridattn.kv.store import KVStore

PAGES = {1: b"first page" * 10, 2: b"other page" * 10, 3: b"third page" * 10}
NAMES = {page: bytes([page]) * 16 for page in PAGES}


def store(folder, max_bytes=10_000, fingerprint=b"model"):
    made = KVStore(
        folder, fingerprint, max_bytes, lambda page: PAGES[page], lambda page, data: made.got.update({page: data})
    )
    made.got = {}
    return made


def file_of(folder, page):
    (path,) = folder.glob(f"*/{NAMES[page].hex()}.kv")
    return path


def test_what_one_process_saved_another_finds(tmp_path):
    one = store(tmp_path / "kv")
    assert not one.has(NAMES[1])
    for page in PAGES:
        one.save(NAMES[page], page)
    other = store(tmp_path / "kv")
    assert all(other.has(name) and other.load(name, page) for page, name in NAMES.items())
    assert other.got == PAGES and (one.saved, other.loaded, other.refused) == (3, 3, 0)
    folder = file_of(tmp_path / "kv", 1).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not list(folder.glob("*.part"))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def edit(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


def swap(path):
    path.write_bytes(path.with_name(f"{NAMES[2].hex()}.kv").read_bytes())


@pytest.mark.parametrize("spoil", [truncate, empty, edit, lengthen, swap])
def test_a_file_that_is_not_what_was_written_is_refused_and_removed(tmp_path, spoil, caplog):
    made = store(tmp_path)
    for page in (1, 2):
        made.save(NAMES[page], page)
    spoil(file_of(tmp_path, 1))
    again = store(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert again.load(NAMES[1], 1) is False and again.refused == 1 and again.got == {}
    assert "is not what was written there" in caplog.text and not again.has(NAMES[1])
    assert again.load(NAMES[2], 2) and not list(tmp_path.glob(f"*/{NAMES[1].hex()}.kv"))


def test_a_file_of_another_model_is_not_seen_and_one_moved_there_is_refused(tmp_path):
    one, other = store(tmp_path, fingerprint=b"a"), store(tmp_path, fingerprint=b"b")
    one.save(NAMES[1], 1)
    other.save(NAMES[2], 2)
    assert not store(tmp_path, fingerprint=b"b").has(NAMES[1])
    os.rename(file_of(tmp_path, 1), file_of(tmp_path, 2).with_name(file_of(tmp_path, 1).name))
    foreign = store(tmp_path, fingerprint=b"b")
    assert foreign.has(NAMES[1]) and foreign.load(NAMES[1], 1) is False and foreign.refused == 1


def test_the_bytes_are_bounded_and_the_longest_unused_goes_first(tmp_path):
    size = store(tmp_path / "one")
    size.save(NAMES[1], 1)
    one = file_of(tmp_path / "one", 1).stat().st_size
    made = store(tmp_path / "kv", 2 * one)
    for page in (1, 2):
        made.save(NAMES[page], page)
    made.save(NAMES[1], 1)  # used again
    made.save(NAMES[3], 3)
    assert [made.has(NAMES[page]) for page in (1, 2, 3)] == [True, False, True]
    assert sum(path.stat().st_size for path in (tmp_path / "kv").glob("*/*")) == 2 * one
    assert sum(store(tmp_path / "kv", one).has(name) for name in NAMES.values()) == 1  # a lower bound, later
    tiny = store(tmp_path / "tiny", 10)
    tiny.save(NAMES[1], 1)
    assert not tiny.has(NAMES[1])
    with pytest.raises(InputError, match="kv_store_bytes must be an integer of at least 1, got 0"):
        store(tmp_path, 0)


@pytest.mark.parametrize("call", ["replace", "fdopen", "utime"])
def test_errors_of_the_file_system_are_counted_and_go_no_further(tmp_path, monkeypatch, call, caplog):
    made = store(tmp_path)
    made.save(NAMES[1], 1)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        for page in (2, 3):
            made.save(NAMES[page], page)
        assert made.load(NAMES[1], 1)
    if call != "utime":
        assert (made.failed, made.saved) == (2, 1) and caplog.text.count("No space left on device") == 1
        assert len(list(tmp_path.glob("*/*"))) <= 1 + (call == "fdopen") * 2


def test_a_folder_that_is_a_file_and_files_that_are_gone(tmp_path):
    (tmp_path / "file").write_text("")
    made = store(tmp_path / "file")
    made.save(NAMES[1], 1)
    assert made.failed > 0 and not made.load(NAMES[1], 1)
    made = store(tmp_path / "kv")
    made.save(NAMES[1], 1)
    file_of(tmp_path / "kv", 1).unlink()  # by another process
    assert not made.load(NAMES[1], 1) and not made.has(NAMES[1]) and made.failed == made.refused == 0


# -- with a model ----------------------------------------------------------------------------------------------------

PROMPT = [5, 9, 2, 7] * 14  # three whole pages of 16, and a half
LIMITS = {"page_size": 16, "max_model_len": 128, "share_prefixes": True, "record": False}


@pytest.fixture(scope="module")
def tiny():
    from hybridattn.models.load import load

    return load("dummy:tiny")


def ask(model, folder, prompt=PROMPT, **options):
    """An answer, and how many tokens of the prompt were found."""
    with LLM(model, kv_store_dir=folder, **{**LIMITS, "gpu_kv_blocks": 12, "cpu_kv_blocks": 12, **options}) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=6))
        return output.token_ids, output.metrics["reused_tokens"], llm.engine.kv.prefixes.store


@pytest.mark.parametrize("policy", ["gpu_only", "sync_offload"])
def test_a_prefix_survives_the_process_and_a_file_that_was_edited_does_not(tiny, tmp_path, policy):
    options = {"policy": policy} | ({"cpu_fraction": 1.0} if policy == "sync_offload" else {})
    first = ask(tiny, tmp_path, **options)
    assert first[1] == 0 and len(list(tmp_path.glob("*/*.kv"))) == 3
    again = ask(tiny, tmp_path, **options)
    assert (again[0], again[1], again[2].loaded) == (first[0], 48, 3)
    files = sorted(tmp_path.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)
    edit(files[1])
    spoiled = ask(tiny, tmp_path, **options)
    assert spoiled[0] == first[0] and spoiled[2].refused == 1 and spoiled[1] in (0, 16, 32)
    assert ask(tiny, tmp_path, **options)[1] == 48  # computed and saved again


def test_a_session_survives_the_process(tiny, tmp_path):
    options = {**LIMITS, "gpu_kv_blocks": 12, "cpu_kv_blocks": 12, "kv_store_dir": tmp_path}
    with LLM(tiny, **options) as llm, llm.session() as chat:
        chat.generate(PROMPT, SamplingParams(max_tokens=20))
        history = list(chat.token_ids)
    with LLM(tiny, **options) as llm, llm.session() as chat:
        turn = chat.generate([*history, 3], SamplingParams(max_tokens=4))
        assert turn.metrics["reused_tokens"] == (len(history) - 1) // 16 * 16
    with LLM(tiny, record=False) as llm:
        assert llm.generate([[*history, 3]], SamplingParams(max_tokens=4))[0].token_ids == turn.token_ids


def test_other_dtypes_other_salts_and_a_full_disk(tiny, tmp_path, monkeypatch):
    ask(tiny, tmp_path)
    assert ask(tiny, tmp_path, kv_dtype="int8")[1] == 0  # another layout
    with LLM(tiny, kv_store_dir=tmp_path, **LIMITS) as llm:
        (salted,) = llm.generate([PROMPT], SamplingParams(cache_salt="mine"))
        assert salted.metrics["reused_tokens"] == 0
    other = [1, 2, 3] * 20

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    answer, _, kept = ask(tiny, tmp_path, other)
    assert kept.failed > 0 and answer == ask(tiny, tmp_path / "not there", other)[0]


def test_what_the_cpu_tier_has_no_room_for_goes_to_files(tiny, tmp_path):
    with LLM(
        tiny, policy="gpu_only", kv_store_dir=tmp_path, **{**LIMITS, "gpu_kv_blocks": 5, "cpu_kv_blocks": 5}
    ) as llm:
        prompts = [[token] * 40 for token in range(1, 6)]
        params = SamplingParams(max_tokens=2)
        first = [llm.generate([p], params)[0].token_ids for p in prompts]
        assert llm.engine.kv.prefixes.store.saved > 0
        back = llm.generate([prompts[0]], params)[0]
        assert back.token_ids == first[0] and back.metrics["reused_tokens"] == 32


def test_a_page_is_read_and_written_once_no_copy_is_on_its_way_to_it(tiny, tmp_path, monkeypatch):
    calls = []
    settle = Submitter.settle
    monkeypatch.setattr(Submitter, "settle", lambda self: calls.append("settled") or settle(self))
    with LLM(tiny, kv_store_dir=tmp_path, **LIMITS) as llm:
        store, page = llm.engine.kv.prefixes.store, bytes(range(1, 17))
        monkeypatch.setattr(llm.stages, "write_page", lambda page, data: calls.append("written"))
        store.save(page, 0)
        assert calls == ["settled"] and store.load(page, 0) and calls == ["settled", "settled", "written"]


def test_pages_on_their_way_down_count_as_free_once_nobody_runs(tiny):
    with LLM(tiny, **{**LIMITS, "gpu_kv_blocks": 12, "cpu_kv_blocks": 12}) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=2))
        assert llm.free_blocks() == {"gpu": 12, "cpu": 12} and not llm.engine.kv.under_way


def test_a_store_without_sharing_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="it needs share_prefixes=True"):
        LLM(tiny, kv_store_dir=tmp_path)
    with pytest.raises(InputError, match="kv_store_bytes must be an integer of at least 1, got -1"):
        LLM(tiny, kv_store_dir=tmp_path, share_prefixes=True, kv_store_bytes=-1)
