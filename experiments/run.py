"""The one app: ``python -m experiments.run +experiment=NAME [key=value ...]``, an ordinary Hydra app.

    @hydra.main        composes, and in MULTIRUN mode hands the sweep to ``hydra/sweeper`` and ``hydra/launcher``
    callbacks.Results  names the result folder, gathers rows into figures and findings, ends with the exit code
    app                one point (or an experiment that is no sweep): a row in the folder

Exit codes: 0 all points ran, 1 some failed, 2 what was asked for is not possible, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, from any folder, as Hydra's tab completion does
    sys.path[0] = str(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

from hybridattn.core.extras import why_missing  # noqa: E402

try:
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
except ModuleNotFoundError as absent:
    if why_missing(absent) is None:
        raise
    print(f"experiments.run: {why_missing(absent)}", file=sys.stderr)
    sys.exit(2)

from experiments import point  # noqa: E402
from experiments.also import closing  # noqa: E402
from experiments.ended import INTERRUPTED, Ended, say  # noqa: E402
from experiments.schema import register  # noqa: E402
from experiments.wording import check_words, composition_error, respelt  # noqa: E402
from hybridattn.core.errors import HybridAttnError, InputError  # noqa: E402
from hybridattn.core.interrupts import interrupts_noted  # noqa: E402
from hybridattn.core.terminal import warnings_as_sentences  # noqa: E402

register()


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="config")
def app(config: DictConfig) -> float | None:
    """One job of Hydra."""
    return point.run_job(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is asked for, then the experiments that it names under ``also``. The worst exit code counts."""
    with interrupts_noted:
        ended = [one(list(sys.argv[1:] if argv is None else argv))]
        for words in ended[0].then:
            if ended[-1].code == INTERRUPTED:
                break
            say()
            ended.append(one(words))
    folders = [e.folder for e in ended if e.folder is not None]
    if len(folders) > 1:
        say("", *closing(folders))
    return max(e.code for e in ended)


def one(words: list[str]) -> Ended:
    """One call of the app as Hydra runs it; its errors as exit codes."""
    try:
        check_words(words)
        words = [respelt(word) for word in words]
        with command_line(words), warnings_as_sentences("experiments.run"):
            app()
    except Ended as ended:
        return ended
    except SystemExit as left:  # --help and its like, or a command line that Hydra's parser refuses
        return Ended(left.code if isinstance(left.code, int) else int(left.code is not None))
    except KeyboardInterrupt:
        return _refused("interrupted", INTERRUPTED)
    except InputError as error:
        return _refused(str(error), 2)
    except HybridAttnError as error:
        return _refused(str(error), 1)
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, HydraException):  # a missing config is both
            return _refused(f"reading or writing failed: {error}", 1)
        return _refused(why_missing(error) or composition_error(words, error), 2)
    return Ended(0)


@contextmanager
def command_line(words: list[str]) -> Iterator[None]:
    """``words`` as what stands on the command line; Hydra then raises its errors instead of printing them."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [argv[0], *words], "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _refused(sentence: str, code: int) -> Ended:
    if interrupts_noted:  # whatever a library made of it
        sentence, code = "interrupted", INTERRUPTED
    print(f"experiments.run: {sentence}", file=sys.stderr)
    return Ended(code)


if __name__ == "__main__":
    sys.exit(main())
