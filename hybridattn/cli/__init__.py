"""The command line: ``hybridattn generate | doctor | plan | calibrate``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from hybridattn.cli import calibrate, doctor, generate, plan
from hybridattn.core.errors import HybridAttnError, InputError
from hybridattn.core.extras import why_missing
from hybridattn.core.terminal import escape_unprintable, warnings_as_sentences


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it worked, 2 for input that cannot be used, 1 when something failed, 130 on Ctrl-C."""
    try:
        escape_unprintable()
        args = _parser().parse_args(argv)
        with warnings_as_sentences("hybridattn"):
            return args.command(args)
    except InputError as error:
        print(f"hybridattn: {error}", file=sys.stderr)
        return 2
    except HybridAttnError as error:
        print(f"hybridattn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return 1
    except ModuleNotFoundError as error:
        if why_missing(error) is None:
            raise
        print(f"hybridattn: {why_missing(error)}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, most likely: what was written before stays
        print(f"hybridattn: reading or writing failed: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridattn", description="Parallel CPU-GPU attention in LLM decode.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, doctor, plan, calibrate):
        command.add_parser(commands)
    return parser
