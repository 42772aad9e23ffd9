"""The command line: ``hybridattn generate | doctor | plan | calibrate``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from hybridattn.cli import calibrate, doctor, generate, plan
from hybridattn.core.errors import HybridAttnError, InputError
from hybridattn.core.extras import why_missing
from hybridattn.core.interrupts import interrupts_noted
from hybridattn.core.terminal import escape_unprintable, warnings_as_sentences


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it worked, 2 for input that cannot be used, 1 when something failed, 130 on Ctrl-C."""
    with interrupts_noted:
        try:
            escape_unprintable()
            args = _parser().parse_args(argv)
            with warnings_as_sentences("hybridattn"):
                return args.command(args)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except BrokenPipeError:  # the reader of our output went away
            sys.stderr.close()
            return 1
        except Exception as error:
            return 128 + signal.SIGINT if interrupts_noted else _said(error)


def _said(error: Exception) -> int:
    """One sentence and the exit code; raises what is nobody's fault but ours."""
    sentence, code = str(error), 2 if isinstance(error, InputError) else 1
    if isinstance(error, ImportError):
        sentence, code = why_missing(error) or "", 2
    elif isinstance(error, OSError):  # a full disk, most likely: what was written before stays
        sentence = f"reading or writing failed: {error}"
    elif not isinstance(error, HybridAttnError):
        sentence = ""
    if not sentence:
        raise error
    print(f"hybridattn: {sentence}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridattn", description="Parallel CPU-GPU attention in LLM decode.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, doctor, plan, calibrate):
        command.add_parser(commands)
    return parser
