"""How tokens and statistics look."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from domino_spec.api import StreamedToken
    from domino_spec.decoding import RunStats

ACCEPTED = Style(color="green")
OWN = Style(color="magenta")
LEGEND = "accepted drafts in green, the target's own tokens in magenta"
STYLES = {
    **dict.fromkeys(("ok", "lossless", "yes"), "green"),
    **dict.fromkeys(("warning", "unclear"), "yellow"),
    **dict.fromkeys(("problem", "mismatch", "bug", "no"), "red"),
    **dict.fromkeys(("unknown", "tie"), "dim"),
}
"""How a verdict looks in every command."""
_BARS = "▁▂▃▄▅▆▇█"
# A model may write escape sequences; a terminal must not obey them.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\ufffd")


class TokenWriter:
    """Writes a stream of tokens, coloured by who proposed them where colour is possible."""

    def __init__(self, console: Console, *, coloured: bool = True) -> None:
        self._console = console
        self._styles = (OWN, ACCEPTED) if coloured else (None, None)
        self._pieces: list[str] = []
        self.tokens = 0

    @property
    def text(self) -> str:
        """Everything written so far."""
        return "".join(self._pieces)

    def write(self, token: StreamedToken) -> None:
        """Show the text that a token completes."""
        self.tokens += 1
        if not token.text:
            return
        self._pieces.append(token.text)
        write_plain(self._console, token.text, self._styles[token.accepted])

    def end(self) -> None:
        """Finish the line."""
        if not self.text.endswith("\n"):
            self._console.print()


def write_plain(console: Console, text: str, style: Style | None = None) -> None:
    """Write a model's text as it is, at once; control characters do not reach a terminal."""
    if console.is_terminal:
        text = text.translate(_CONTROLS)
    # Segments, because Rich's Text would expand tabs and drop spaces at line ends.
    console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)
    console.file.flush()


def speed_line(stats: RunStats, tokens: int) -> str:
    """Tokens, acceptance length and speed."""
    rate = tokens / stats.seconds if stats.seconds else 0.0
    return (
        f"{tokens} tokens in {stats.seconds:.2f} s ({rate:.1f} tok/s) · "
        f"acceptance length {stats.tokens_per_cycle:.2f} over {stats.acceptance.cycles} cycles"
    )


def statistics_lines(stats: RunStats, tokens: int) -> list[str]:
    """What a run did, in two to four short lines."""
    lines = [speed_line(stats, tokens)]
    shares = stats.acceptance.acceptance_by_position
    if shares:
        percents = " ".join(f"{share:.0%}" for share in shares)
        lines.append(f"accepted by position |{bar_line(shares)}| {percents}")
    ranks = stats.acceptance.ranks
    if len(ranks) > 1:  # there were trees
        percents = " ".join(f"{count / sum(ranks):.0%}" for count in ranks)
        lines.append(f"accepted drafts by rank among their siblings {percents}")
    times = " · ".join(f"{name} {spent:.2f} s" for name, spent in stats.stages.items())
    lines.append(f"time {times}" + (" on the engine" if stats.engine == "fast" else ""))
    return lines


def bar_line(shares: Sequence[float]) -> str:
    """One bar a share between 0 and 1; a space for none at all."""
    top = len(_BARS) - 1
    return "".join(" " if s <= 0 else _BARS[min(int(s * len(_BARS)), top)] for s in shares)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    words: Collection[str] = (),
    title: str | None = None,
) -> Table:
    """Columns of words fold at the left, the others stand at the right; verdicts are coloured."""
    made = Table(title=title, title_justify="left", box=None)
    for head in heads:
        made.add_column(head, justify="left" if head in words else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(shown, row), style="dim" if "plain" in row else None)
    return made


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """A name and a value a line."""
    made = Table(title=title, title_justify="left", box=None, show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in facts.items():
        made.add_row(name, shown("unknown" if value is None else value))
    return made


def shown(value: Any) -> Text:
    """A value in a table: hashes are cut, figures rounded, verdicts coloured."""
    text = f"{value:.3g}" if isinstance(value, float) else "–" if value is None else str(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return Text(text[:12] if is_hash else text, style=STYLES.get(text, ""))


def shortened(text: str, width: int) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
