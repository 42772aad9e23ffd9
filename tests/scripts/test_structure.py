"""The script that says what a reader has to carry."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "structure.py"
spec = importlib.util.spec_from_file_location("structure", SCRIPT)
structure = importlib.util.module_from_spec(spec)
spec.loader.exec_module(structure)


def test_rooms_are_low_and_small():
    """Floors: the longest chain of imports inside a room. Eleven of them were once one flat room of 36 files."""
    rooms = {row["room"]: row for row in structure.rooms()}
    for name in ("scheduler", "executor", "engine", "planning", "kv"):
        assert rooms[f"hybridattn.{name}"]["floors"] <= 7, name
    assert "hybridattn.runtime" not in rooms


def test_a_token_goes_through_the_rooms_of_the_way_and_no_others():
    one = structure.token()
    rooms = {str(Path(f).parent) for f in one["files"]}
    assert {"hybridattn/engine", "hybridattn/scheduler", "hybridattn/executor", "hybridattn/models"} <= rooms
    assert not rooms & {"hybridattn/planning", "hybridattn/workload", "hybridattn/analysis", "hybridattn/cli"}
