"""docs/architecture.md is true: rooms import downwards only."""

import ast
import re
from pathlib import Path

import pytest

import domino_spec

ROOT = Path(domino_spec.__file__).parent
PAGE = ROOT.parent.parent / "docs" / "architecture.md"


def rooms_on_the_page() -> dict[str, str]:
    """Each room's column of imports, in the order of the page."""
    table = PAGE.read_text(encoding="utf-8").split("## Rooms")[1].split("## One forward")[0]
    return dict(re.findall(r"^\| `(\w+)/?` \|.*\| ([^|]+) \|$", table, flags=re.MULTILINE))


COLUMN = rooms_on_the_page()
ROOMS = list(COLUMN)


def allowed_by_the_page(room: str) -> set[str]:
    above = set(ROOMS[: ROOMS.index(room)])
    words, _, left_out = COLUMN[room].partition(" but ")
    if words == "all above":
        named = above - set(left_out.split(", "))
        return {*named, room} - ({"plugins"} - {room})  # never imported by the rest
    named = set() if words == "–" else set(words.split(", "))
    assert named <= above, f"{room}: {named - above} is no room above it"
    return {*named, room}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("domino_spec.")}
    return found


def test_every_room_is_on_the_page():
    actual = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" and not p.stem.startswith("__")}
    actual |= {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
    assert actual == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_are_those_on_the_page(room):
    allowed = allowed_by_the_page(room)
    for path in ROOT.rglob("*.py"):
        if room_of(path) == room:
            wrong = imported_rooms(path) - allowed
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_the_core_does_not_need_the_command_lines_packages():
    """A machine without typer and rich can still import and decode."""
    for path in ROOT.rglob("*.py"):
        if room_of(path) == "cli":
            continue
        text = path.read_text(encoding="utf-8")
        assert "import typer" not in text, path
        assert "from rich" not in text, path
