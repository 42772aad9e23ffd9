"""Streaming text and stop strings."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.models.stream import TextStream

SPECIAL = "<|im_end|>"


class Spelled:
    """A vocabulary made of given pieces; ids count from 0, and ``calls`` counts look-ups."""

    strips_first_space = False

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = pieces
        self.calls = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.calls += 1
        piece = self.pieces[token_id]
        return piece if isinstance(piece, bytes) else piece.encode()

    def is_special(self, token_id: int) -> bool:
        return self.pieces[token_id] == SPECIAL

    def spelling(self, token_id: int) -> str:
        piece = self.pieces[token_id]
        assert isinstance(piece, str)
        return piece


def run(pieces: list[str | bytes], stop: tuple[str, ...] = (), skip: bool = True) -> tuple[list[str], TextStream]:
    stream = TextStream(Spelled(*pieces), stop, skip)
    return [stream.push(i) for i in range(len(pieces))] + [stream.finish()], stream


def test_T01_a_three_byte_character_comes_once_with_its_last_byte():
    assert run(["x", b"\xe4", b"\xb8", b"\xad", "y"])[0] == ["x", "", "", "中", "y", ""]


def test_T01_time_is_linear_in_the_tokens():
    """Every token is looked up once and nothing of the text so far is kept."""
    pieces = Spelled(b"\xe4", b"\xb8", b"\xad")
    stream = TextStream(pieces, stop=("never",))
    parts = []
    for _ in range(10_000):
        parts += [stream.push(i) for i in range(3)]
        assert len(stream._held) <= 1
    assert "".join(parts) + stream.finish() == "中" * 10_000
    assert pieces.calls == 30_000


def test_a_character_cut_by_the_end_becomes_a_replacement():
    assert run(["x", b"\xe4", b"\xb8"])[0] == ["x", "", "", "\ufffd"]
    assert run([b"\xe4", "y"])[0] == ["", "\ufffdy", ""]


def test_a_possible_stop_string_is_held_back_and_comes_out_if_it_was_none():
    out, stream = run(["a", "b", "c", "ab", "x"], stop=("abd",))
    assert out == ["", "", "abc", "", "abx", ""]
    assert not stream.stopped
    assert run(["x", "ab"], stop=("abd",))[0] == ["x", "", "ab"]


def test_a_stop_string_over_several_tokens_and_inside_one():
    out, stream = run(["say", " EN", "D of", " it"], stop=("END",))
    assert out == ["say", " ", "", "", ""]
    assert stream.stop_string == "END"
    assert run(["say END of it"], stop=("END",))[0] == ["say ", ""]


def test_the_first_complete_stop_string_wins_and_the_longer_of_two_that_end_together():
    assert run(["xabcd"], stop=("bcd", "ab"))[1].stop_string == "ab"
    out, stream = run(["xabc"], stop=("bc", "abc"))
    assert (out[0], stream.stop_string) == ("x", "abc")


def test_T07_a_stop_string_that_is_one_control_token():
    for skip in (True, False):
        out, stream = run(["Hi", SPECIAL, "more"], stop=(SPECIAL,), skip=skip)
        assert out == ["Hi", "", "", ""]
        assert stream.stop_string == SPECIAL


def test_T07_a_stop_string_typed_out_and_one_that_spans_a_control_token():
    assert run(["Hi<|im_", "end|>more"], stop=(SPECIAL,))[0] == ["Hi", "", ""]
    out, stream = run(["Hi.", SPECIAL, "\nuser"], stop=(f".{SPECIAL}\n",))
    assert (out, stream.stopped) == (["Hi", "", "", ""], True)


def test_T07_control_tokens_are_left_out_or_shown_without_stop_strings():
    assert "".join(run(["Hi", SPECIAL, "more"])[0]) == "Himore"
    assert "".join(run(["Hi", SPECIAL, "more"], skip=False)[0]) == f"Hi{SPECIAL}more"
    assert "".join(run(["Hi", SPECIAL, "more"], stop=("<|im_x",))[0]) == "Himore"


def test_a_left_out_control_token_inside_a_character_does_not_break_it():
    assert "".join(run([b"\xe4\xb8", SPECIAL, b"\xad"])[0]) == "中"


def test_a_replacement_at_the_end_can_complete_a_stop_string():
    out, stream = run(["a", b"\xe4"], stop=("a\ufffd",))
    assert (out, stream.stopped) == (["", "", ""], True)


def test_nothing_comes_after_the_end():
    stream = TextStream(Spelled("a", "b"), stop=("zz",))
    assert (stream.push(0), stream.finish(), stream.push(1), stream.finish()) == ("a", "", "", "")


@given(
    text=st.text(alphabet="abé", max_size=25),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 50), max_size=12),
)
@settings(deadline=None, max_examples=300)
def test_the_cut_into_tokens_does_not_matter(text, stops, cuts):
    data = text.encode()
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    pieces: list[str | bytes] = [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    stop = max((s for s in stops if text[: ends[0]].endswith(s)), key=len) if ends else None
    out, stream = run(pieces, tuple(stops))
    assert "".join(out) == (text[: ends[0] - len(stop)] if stop else text)
    assert stream.stop_string == stop
