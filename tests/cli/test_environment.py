"""The command line where things are missing: a home folder, packages, cpus, a terminal that prints everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_cuda import FakeCuda

from cpu_kernels import topology
from hybridattn import doctor
from hybridattn import problems as problems_module
from hybridattn.core.terminal import escape_unprintable, is_unicode
from hybridattn.problems import problems

KERNELS = "CPU kernels are compiled again at each start"  # a warning beside which the commands go on
NOBODY = """
import os, pwd, sys
for name in ("HOME", "XDG_CACHE_HOME", "HYBRIDATTN_CACHE", "CPU_KERNELS_CACHE"):
    os.environ.pop(name, None)
def absent(*_):
    raise KeyError("uid not found")
pwd.getpwuid = absent
for package in sys.argv[1].split():
    sys.modules[package] = None
from hybridattn.cli import main
sys.exit(main(sys.argv[2:]))
"""


def run(*argv: str, code: str = NOBODY, absent: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", f"default:{KERNELS}", "-c", code, absent, *argv],
        env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["plan"], 0, ""),
        (["--help"], 0, ""),
        (["calibrate"], 2, "there is no place for the profile of this machine: no home folder is known for uid"),
        (["generate", "x", "--model", "none"], 2, "model 'none' is unknown"),
        (
            ["generate", "x", "--policy", "auto", "--model", "dummy:tiny"],
            2,
            "no home folder is known for uid|no tokenizer",
        ),
    ],
    ids=str,
)
def test_commands_work_for_a_user_without_a_home(argv, code, message):
    done = run(*argv)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if message:
        assert any(part in done.stderr for part in message.split("|"))


def test_doctor_names_what_a_user_without_a_home_loses():
    found = json.loads(run("doctor", "--json").stdout)["problems"]
    assert any(s.startswith("models are converted again at each start: no home folder is known") for s in found)
    assert any(s.startswith("CPU kernels are compiled again at each start: no home folder is known") for s in found)


def test_doctor_runs_without_the_extra_and_names_it():
    done = run("doctor", "--json", absent="torch psutil transformers")
    found = json.loads(done.stdout)
    expected = (
        "torch, transformers, psutil are not installed, so no text can be generated: pip install 'hybridattn[main]'"
    )
    assert done.returncode == 0 and expected in found["problems"]
    assert found["devices"]["host"] == found["devices"]["cuda"] == "no: torch is not installed"


def test_a_torch_that_cannot_be_loaded_is_named(tmp_path):
    """Installed, and one of its libraries is missing or found no room."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: failed to map segment', name='torch._C')")
    path = os.pathsep.join((str(tmp_path), *sys.path))
    done = run("doctor", "--json", PYTHONPATH=path)
    found = json.loads(done.stdout)
    assert found["devices"]["host"] == "no: torch cannot be loaded: libtorch_cpu.so: failed to map segment"
    assert any(s.startswith("torch cannot be loaded: libtorch_cpu.so") for s in found["problems"])
    done = run("generate", "x", PYTHONPATH=path)
    assert done.returncode == 2 and done.stderr == (
        "hybridattn: torch is installed and cannot be loaded: libtorch_cpu.so: failed to map segment\n"
    )


def test_arguments_that_the_locale_cannot_read_are_utf_8():
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "import sys; from hybridattn.core.terminal import as_text; sys.exit(as_text(sys.argv[2]) != chr(0x4e2d))"
    assert run("\u4e2d", code=code, **environment).returncode == 0


@pytest.mark.parametrize(("name", "value"), [("OMP_PROC_BIND", "true"), ("GOMP_CPU_AFFINITY", "0")])
def test_doctor_names_a_mask_that_loading_torch_narrows(name, value, monkeypatch):
    """Whether it is narrowed depends on torch's OpenMP runtime; that the variable is set is named either way."""
    for binding in problems_module.BINDING:
        monkeypatch.delenv(binding, raising=False)
    done = run("doctor", **{name: value})
    (sentence,) = [line for line in done.stdout.splitlines() if f"{name}={value}" in line]
    assert f"run `env -u {name} ...`" in sentence


def machine(quota=None, cpus=(0, 1, 2, 3)):
    return topology.Topology("x", cpus, quota, cpus, len(cpus), ((0, cpus),), "never")


def test_a_narrowed_mask_a_quota_and_a_single_cpu_are_told(monkeypatch):
    for name in problems_module.BINDING:
        monkeypatch.delenv(name, raising=False)
    assert problems(machine(), (0, 1), (0, 1)) == problems(machine(), (), ())
    told = "\n".join(problems(machine(quota=1), (0, 1), (1,)))
    assert "loading torch keeps this process to cpu 1 of 0,1 once torch is loaded" in told
    assert "a cgroup quota gives the time of 1 of the 4 allowed cpus" in told
    assert "one cpu can be used, so that the lanes share it and nothing overlaps" in told
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert "OMP_PROC_BIND=close keeps this process to cpu 0 of 0,1" in problems(machine(), (0, 1), (0,))[0]


def test_refused_pinning_and_an_unwritable_cache_are_told(monkeypatch, tmp_path):
    def deny(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", deny)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDATTN_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("CPU_KERNELS_CACHE", str(tmp_path / "file"))
    told = problems(machine(), (), ())
    assert any(s.startswith("threads cannot be pinned to cpus (Operation not permitted)") for s in told)
    assert sum(f"{tmp_path / 'file'} cannot be written (Not a directory): set " in s for s in told) == 2


PRINT = """
import sys
from hybridattn.core.terminal import escape_unprintable
escape_unprintable()
print("d\\u00e9j\\u00e0 \\u4e2d \\U0001f642 \\udc80")
print("\\u4e2d", file=sys.stderr)
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "ascii:strict"])
def test_nothing_ends_in_an_encoding_error(encoding):
    done = run(code=PRINT, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr


ASCII = """
import json, sys
import hybridattn
from types import SimpleNamespace as S
text = "d\\u00e9j\\u00e0 \\u4e2d"
class Spoken:
    policy, device = S(name="p", steps_by_layout={}), S(name="d")
    def __init__(self, **options): pass
    def __enter__(self): return self
    def __exit__(self, *rest): pass
    def generate(self, prompts, params, progress):
        return [S(text=text, token_ids=(1,), finish_reason="length", tier="gpu", metrics={}, error=None)]
    def stream(self, prompts, params):
        return [S(index=0, text=text, finish_reason="length", error=None)]
hybridattn.LLM = Spoken
from hybridattn.cli import main
sys.exit(main(["generate", "x", *sys.argv[2:]]))
"""


def test_generate_on_an_ascii_terminal():
    done = run(code=ASCII, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "d\\xe9j\\xe0 \\u4e2d\n"), done.stderr
    done = run("--json", code=ASCII, PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout)["text"] == "d\u00e9j\u00e0 \u4e2d"
    done = run("--json", code=ASCII, PYTHONIOENCODING="utf-8")
    assert "\u4e2d" in done.stdout


def test_what_stdout_is_asked(capsys):
    escape_unprintable()
    assert is_unicode(sys.stdout) and is_unicode(None)


def test_options_that_cannot_act_are_said(capsys):
    from hybridattn import cli

    assert cli.main(["plan", "--check", "--gpu", "t4"]) == 2
    assert "--check prints one fixed setting and takes no --gpu" in capsys.readouterr().err


def test_a_warning_is_one_sentence():
    argv = ["generate", "x", "--model", "none", "--seed", "3", "--top-p", "0.5"]
    code = NOBODY.replace("import os, pwd", "import warnings; warnings.simplefilter('default'); import os, pwd")
    assert run(*argv, code=code).stderr.splitlines()[:2] == [
        "hybridattn: --seed has no effect at --temperature 0, the default",
        "hybridattn: top_p 0.5 has no effect at temperature 0, which takes the likeliest token",
    ]


def test_a_card_without_what_triton_builds_with_is_a_problem(monkeypatch, tmp_path):
    here = topology.read()
    monkeypatch.setattr(problems_module, "why_no_cuda", lambda: None)  # a machine with a card
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    found = [p for p in problems(here, (), ()) if "Triton" in p]
    assert len(found) == 1 and f"the C compiler {tmp_path / 'cc'} is not installed" in found[0]
    monkeypatch.setenv("CC", "sh")  # anything that is there
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    found = [p for p in problems(here, (), ()) if "Triton" in p]
    assert len(found) == 1 and f"{tmp_path / 'Python.h'} is missing" in found[0]
    (tmp_path / "Python.h").write_text("")
    assert not [p for p in problems(here, (), ()) if "Triton" in p]


def test_the_doctor_says_who_hands_attention_over_on_a_card(monkeypatch):
    monkeypatch.setattr(doctor, "why_no_cuda", lambda: None)
    for options, words in (({"words": True}, "by bell"), ({}, r"by stream (this fake has no words)")):
        monkeypatch.setattr("hybridattn.devices.cuda.TorchCuda", lambda options=options: FakeCuda(**options))
        assert doctor._cuda() == f"yes: Fake GPU, CPU attention handed over {words}"
