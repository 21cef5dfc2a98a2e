from __future__ import annotations

import io

from rich.console import Console

from domino_spec.api import StreamedToken
from domino_spec.cli.command import Voice
from domino_spec.cli.render import TokenWriter, bar_line, shortened, statistics_lines, write_plain
from domino_spec.decoding import AcceptanceStats, RunStats


def written(**console_options) -> str:
    console = Console(file=io.StringIO(), width=10, **console_options)
    writer = TokenWriter(console)
    pieces = [("own\t", False), (" drafted words [b] ", True), ("", True), ("end  ", False)]
    for text, accepted in pieces:
        writer.write(StreamedToken(1, text, accepted, 1, None, RunStats()))
    assert writer.tokens == 4
    writer.end()
    return console.file.getvalue()


def test_accepted_drafts_and_the_targets_own_tokens_differ_in_colour(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = written(force_terminal=True, color_system="standard")
    assert "\x1b[35mown\t\x1b[0m" in shown
    assert "\x1b[32m drafted words [b] \x1b[0m" in shown


def test_there_is_no_colour_without_a_terminal_or_with_no_color(monkeypatch):
    plain = "own\t drafted words [b] end  \n"  # neither wrapped, expanded nor trimmed
    assert written() == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(force_terminal=True, color_system="standard") == plain


def test_a_terminal_does_not_obey_the_model():
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    write_plain(console, "a\x1b[2Jb\x07\tc\n")
    assert console.file.getvalue() == "a\ufffd[2Jb\ufffd\tc\n"


def test_statistics_are_a_few_lines():
    counts = AcceptanceStats()
    counts.record(drafts=4, accepted=4, committed=5)
    counts.record(drafts=4, accepted=1, committed=2)
    stats = RunStats(counts, 0.5, 0.25, 1.0, 0.25)
    assert statistics_lines(stats, 8) == [
        "8 tokens in 2.00 s (4.0 tok/s) · acceptance length 3.50 over 2 cycles",
        "accepted by position |█▅▅▅| 100% 50% 50% 50%",
        "time prefill 0.50 s · draft 0.25 s · verify 1.00 s · other 0.25 s",
    ]
    assert len(statistics_lines(RunStats(), 0)) == 2
    stats.acceptance.record(drafts=4, accepted=4, committed=5, ranks=[0, 1, 0, 0])
    assert statistics_lines(stats, 8)[2] == "accepted drafts by rank among their siblings 89% 11%"


def test_bars_and_short_texts():
    assert bar_line([0.0, 0.01, 0.5, 1.0]) == " ▁▅█"
    assert shortened("a\nb  c", 10) == "a b c"
    assert shortened("abcdef", 4) == "abc…"


def test_warnings_are_said_once_and_wait_for_a_stream_to_end(capsys):
    voice = Voice()
    with voice.holding_warnings():
        voice.warn("first\nline")
        voice.warn("first line")
        voice.warn("only 1.00 tokens after 50")
        voice.warn("only 1.01 tokens after 80")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "warning: first line\nwarning: only 1.00 tokens after 50\n"
    assert voice.warnings == ["first line", "only 1.00 tokens after 50"]
