from __future__ import annotations

import argparse

from hybridattn.cli import calibrate


def test_the_subcommand_is_there_with_its_defaults():
    parser = argparse.ArgumentParser()
    calibrate.add_parser(parser.add_subparsers())
    given = parser.parse_args(["calibrate", "--check"])
    assert given.check and given.command is calibrate.run
    assert given.profile is None  # where it lies is asked when it is needed: a user may have no home
