"""docs/training.md knows every setting, its default and every flag it names."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from domino_spec.cli.main import app
from domino_spec.training import TrainConfig
from domino_spec.training.sizes import _DIALS

PAGE = (Path(__file__).parent.parent / "docs" / "training.md").read_text(encoding="utf-8")
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
TABLE = PAGE.split("| setting | default | what |")[1].split("\n\n")[0]
ROWS = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", TABLE, flags=re.MULTILINE))


def test_the_table_holds_exactly_the_settings():
    assert list(ROWS) == list(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_defaults_are_true(name):
    default = FIELDS[name].default
    if default is dataclasses.MISSING:
        assert ROWS[name] == "needed"
    elif default is None:
        assert "`" not in ROWS[name] or name in ("target_layer_ids", "rows", "anchors")
    else:
        stated = yaml.safe_load(ROWS[name].strip("`"))
        assert stated == (list(default) if isinstance(default, tuple) else default)


def test_the_dial_is_true():
    for name, dial in _DIALS.items():
        row = f"| `{name}` | {dial.layers} | {dial.taps} | {dial.rank} | {dial.gru} |"
        assert row in PAGE


def test_every_flag_on_the_page_exists():
    import typer

    known = {"--nproc-per-node"}  # torchrun's
    groups = [typer.main.get_command(app)]
    while groups:
        command = groups.pop()
        groups += getattr(command, "commands", {}).values()
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known
