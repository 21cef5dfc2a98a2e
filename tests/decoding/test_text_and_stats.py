import pytest

from domino_spec.decoding import AcceptanceStats, RunStats, TextStream


class Bytes:
    """One byte a token, so that characters arrive in pieces."""

    def decode(self, tokens, skip_special_tokens=True):
        return bytes(tokens).decode("utf-8", errors="replace")


def stream(text, stops=(), **options):
    stream = TextStream(Bytes(), stops, **options)
    pieces = [stream.push(token) for token in text.encode()]
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧 family", "a"])
def test_pieces_join_to_the_text_and_never_show_half_a_character(text):
    pieces, _ = stream(text)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_stop_string_and_what_follows_are_not_shown():
    pieces, state = stream("one two END three", ["END"])
    assert "".join(pieces) == "one two "
    assert state.stopped


def test_part_of_a_stop_string_is_held_back_until_it_is_none():
    pieces, state = stream("ENERGY", ["END"])
    assert pieces[:2] == ["", ""]
    assert "".join(pieces) == "ENERGY"
    assert not state.stopped


def test_an_open_stop_string_at_the_end_is_shown():
    assert "".join(stream("the EN", ["END"])[0]) == "the EN"


def test_a_stop_string_may_be_shown():
    pieces, state = stream("one two END three", ["wo END", "END"], include_stop=True)
    assert "".join(pieces) == "one two END"
    assert state.stopped


@pytest.mark.parametrize(
    ("stops", "least", "shown"),
    [
        (["bc"], 2, "a"),  # it ends with the third token
        (["bc"], 3, "abcxaba"),
        (["ab", "abcd"], 3, "abcx"),
        (["bc", "bcxa?"], 3, "abcxaba"),  # held back for the longer one, which it is not
        (["abc"], 9, "abcxababcd"),
        (["abcd"], 9, "abcxab"),
        (["abcd"], 10, "abcxababcd"),
    ],
)
def test_a_stop_string_that_ends_too_early_is_text(stops, least, shown):
    text = "abcxababcd"
    pieces, _ = stream(text, stops, min_tokens=least)
    at_once = TextStream(Bytes(), stops, min_tokens=least)
    # The sequence ends with the stop string: nothing comes after it.
    end = len(shown) + max(map(len, stops)) if len(shown) < len(text) else len(text)
    assert "".join(pieces) == shown
    assert at_once.push(*text[:end].encode()) + at_once.finish() == shown


def test_row_statistics():
    stats = AcceptanceStats()
    stats.record(drafts=3, accepted=2, committed=3)
    stats.record(drafts=3, accepted=0, committed=1)
    stats.record(drafts=1, accepted=1, committed=2)
    assert stats.tokens_per_cycle == 2.0
    assert stats.offered == [3, 2, 2]
    assert stats.accepted == [2, 1, 0]
    assert stats.acceptance_by_position == pytest.approx([2 / 3, 1 / 2, 0.0])
    total = AcceptanceStats()
    total.add(stats)
    total.add(stats)
    assert (total.cycles, total.committed, total.offered) == (6, 12, [6, 4, 4])


def test_a_useless_drafter_is_judged_after_enough_cycles():
    run = RunStats()
    for _ in range(49):
        run.acceptance.record(drafts=7, accepted=0, committed=1)
    assert not run.useless
    run.acceptance.record(drafts=7, accepted=0, committed=1)
    assert run.useless
    for _ in range(50):
        run.acceptance.record(drafts=7, accepted=1, committed=2)
    assert not run.useless


def test_plain_decoding_is_never_called_useless():
    run = RunStats()
    for _ in range(60):
        run.acceptance.record(drafts=0, accepted=0, committed=1)
    assert not run.useless
