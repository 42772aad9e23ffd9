"""Where files are kept, folders in work, and what a kill leaves behind."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_kernels import jit
from hybridattn.core.errors import InputError
from hybridattn.core.folders import cache_dir, folder_in_work, leftovers, publish, remove_leftovers, why_unwritable
from hybridattn.cost.here import default_path

PREFIX = ".making-"


@pytest.fixture
def nobody(monkeypatch):
    """A user without HOME and without an entry in the password file."""

    def absent(*_):
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "HYBRIDATTN_CACHE", "CPU_KERNELS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", absent)


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HYBRIDATTN_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a") and default_path() == Path("/a/this-machine.json")
    monkeypatch.delenv("HYBRIDATTN_CACHE")
    monkeypatch.delenv("CPU_KERNELS_CACHE", raising=False)
    assert cache_dir() == Path("/b/hybridattn") and jit.cache_dir() == Path("/b/cpu_kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_dir() == Path("/c/.cache/hybridattn") and jit.cache_dir() == Path("/c/.cache/cpu_kernels")


def test_a_user_without_a_home_has_none(nobody, monkeypatch):
    assert cache_dir() is None and jit.cache_dir() is None
    assert why_unwritable(
        None
    ) == f"no home folder is known for uid {os.getuid()}: set HYBRIDATTN_CACHE to a folder " + ("that can be written")
    with pytest.raises(InputError, match="no place for the profile of this machine: no home folder is known for uid"):
        default_path()
    monkeypatch.setenv("HYBRIDATTN_CACHE", "~/x")
    with pytest.raises(InputError, match="HYBRIDATTN_CACHE '~/x'"):
        cache_dir()


def test_kernels_compile_without_a_cache(nobody, monkeypatch):
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit, "_told", [])
    ir = "define i32 @three() {\n ret i32 3\n}\n"
    target = jit.Target("x86-64" if os.uname().machine == "x86_64" else "generic")
    told = "compiled again at each start: no home folder is known; set CPU_KERNELS_CACHE to a folder"
    with pytest.warns(jit.CacheWarning, match=told):
        assert not jit.load(ir, ("three",), target).from_cache
    jit._loaded.clear()
    jit.load(ir, ("three",), target)  # and said once: a warning is an error here


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    assert why_unwritable(tmp_path / "not" / "yet") is None
    (tmp_path / "file").write_text("")
    assert why_unwritable(tmp_path / "file" / "below") == f"{tmp_path / 'file'} cannot be written (Not a directory)"
    if Path("/proc/sys").is_dir():
        assert "cannot be written" in (why_unwritable(Path("/proc/sys/x")) or "")


def test_a_folder_in_work_is_published_or_goes(tmp_path):
    with folder_in_work(tmp_path, PREFIX) as work:
        (work / "weights").write_text("1")
        publish(work, tmp_path / "final")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert [p.name for p in (tmp_path / "final").iterdir()] == ["weights"]
    with folder_in_work(tmp_path, PREFIX) as work:
        publish(work, tmp_path / "final")  # somebody else was faster
    assert (tmp_path / "final" / "weights").exists()
    with pytest.raises(OSError, match="disk full"), folder_in_work(tmp_path, PREFIX):
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]


SCRIPT = """
import sys, time
from pathlib import Path
from hybridattn.core.folders import folder_in_work
with folder_in_work(Path(sys.argv[1]), sys.argv[2]) as work:
    print(work, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    argv = [sys.executable, "-c", SCRIPT, str(tmp_path), PREFIX]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        work = Path(process.stdout.readline().strip())
        remove_leftovers(tmp_path, PREFIX)
        assert work.is_dir() and leftovers(tmp_path, PREFIX) == []
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert leftovers(tmp_path, PREFIX) == [work]
    with folder_in_work(tmp_path, PREFIX) as mine:
        assert not work.exists() and mine.is_dir()


def test_a_folder_without_a_lock_is_left_alone_for_an_hour(tmp_path):
    (tmp_path / (PREFIX + "x")).mkdir()
    assert leftovers(tmp_path, PREFIX) == []
    os.utime(tmp_path / (PREFIX + "x"), (1, 1))
    remove_leftovers(tmp_path, PREFIX)
    assert list(tmp_path.iterdir()) == []


def test_half_written_kernels_go(tmp_path, monkeypatch):
    for name, age in (("old.part", 1), ("new.part", None)):
        (tmp_path / name).write_text("")
        if age:
            os.utime(tmp_path / name, (age, age))
    jit._write(tmp_path / "k.o", b"code")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k.o", "new.part"]

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    assert jit._write(tmp_path / "l.o", b"code") == f"{tmp_path} cannot be written (disk full)"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k.o", "new.part"]
