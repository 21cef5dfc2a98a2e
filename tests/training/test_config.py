"""Settings: unknown names, wrong types, contradictions, YAML, docs/training.md."""

import re
from pathlib import Path

import pytest
import typer

import domino_spec
from domino_spec.cli.main import app
from domino_spec.errors import ConfigError, TrainingError
from domino_spec.training import TrainConfig
from domino_spec.training.config import (
    parse_assignments,
    read_settings,
    save_config,
    settings_table,
)
from domino_spec.training.start import _DIALS
from domino_spec.training.state import check_same_run

RELEASED = Path(domino_spec.__file__).parent / "released"
PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")

NEEDED = {"target": "t", "data": ["d.jsonl"], "out": "o"}


def built(**values):
    return TrainConfig.from_dict({**NEEDED, **values})


def test_unknown_settings_are_rejected_by_name():
    with pytest.raises(
        ConfigError, match="laerning_rate; did you mean learning_rate.*setting wings; docs"
    ):
        built(laerning_rate=1e-3, wings=2)


@pytest.mark.parametrize("name", ["target", "data", "out"])
def test_what_is_missing_is_named(name):
    with pytest.raises(ConfigError, match=f"needs {name}"):
        TrainConfig.from_dict({k: v for k, v in NEEDED.items() if k != name})
    with pytest.raises(ConfigError, match=name):
        built(**{name: None})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("learning_rate", "1e-3", 1e-3),  # YAML reads it as text
        ("learning_rate", 1, 1.0),
        ("epochs", 3, 3.0),
        ("steps", "1e3", 1000),
        ("steps", 200.0, 200),
        ("steps", "12", 12),
        ("shift_label", False, False),
        ("betas", [0.8, "0.9"], (0.8, 0.9)),
        ("target_layer_ids", [1, 3], (1, 3)),
        ("data", "one.jsonl", ("one.jsonl",)),
        ("data", ["a", "b"], ("a", "b")),
        ("rank", None, None),
    ],
)
def test_what_is_meant_is_taken(name, value, wanted):
    found = getattr(built(**{name: value}), name)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 1.5),
        ("steps", True),
        ("steps", "many"),
        ("steps", float("inf")),
        ("steps", [1]),
        ("learning_rate", "fast"),
        ("learning_rate", True),
        ("learning_rate", "nan"),
        ("gamma", None),
        ("seed", None),
        ("shift_label", 1),
        ("shift_label", "yes"),
        ("out", 5),
        ("data", [1, 2]),
        ("data", {"a": 1}),
        ("data", []),
        ("out", ""),
        ("target_layer_ids", "19"),  # text, not the layers 1 and 9
        ("target_layer_ids", [1.5]),
        ("target_layer_ids", 5),
        ("betas", [0.9]),
        ("betas", [0.9, 1.0]),
        ("size", "huge"),
        ("variant", "eagle"),
        ("labels", "smooth"),
        ("optimizer", "sgd"),
        ("dtype", "float16"),
        ("compile", "yes"),
        ("steps", 0),
        ("batch_size", -1),
        ("gamma", 0.0),
        ("keep", 0),
        ("learning_rate", 0),
        ("accumulate", 0),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        built(**{name: value})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 10, "epochs": 1}, "steps and epochs"),
        ({"variant": "dflash", "rank": 8}, "dflash drafters have no rank"),
        ({"labels": "hard", "sharpness": 2.0}, "sharpness is 2, but hard labels"),
        ({"variant": "medusa", "rank": 4}, "medusa drafters have no rank"),
        ({"variant": "medusa", "captured_layers": 3}, "no captured_layers"),
        ({"variant": "eagle3", "layers": 2}, "no layers"),
        ({"variant": "eagle3", "mask_token_id": 3}, "no mask_token_id"),
        ({"variant": "domino", "draft_steps": 3}, "domino drafters have no draft_steps"),
    ],
)
def test_contradictions_are_errors(values, words):
    with pytest.raises(ConfigError, match=words):
        built(**values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "steps": 10, "learning_rate": 3e-5, "betas": [0.8, 0.99], "target_layer_ids": [1, 2],
            "variant": "markov", "base_weight": 0.0, "device": "cpu", "data": ["a", "ü.jsonl"],
        },
    ],
)  # fmt: skip
def test_settings_survive_a_file(tmp_path, values):
    config = built(**values)
    save_config(config, tmp_path / "config.yaml")
    read = read_settings(tmp_path / "config.yaml")
    assert TrainConfig.from_dict(read) == config
    assert set(read) == set(TrainConfig.model_fields), "every setting"


@pytest.mark.parametrize(
    ("text", "words"),
    [("- 1\n- 2\n", "list.*settings by name"), ("a: [1", "not YAML"), ("", "NoneType")],
)
def test_files_that_hold_no_settings(tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_settings(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(tmp_path / "none.yaml")


def test_assignments_are_read_as_yaml_reads_them():
    found = parse_assignments(
        ["steps=5", "learning_rate=1e-3", "shift_label=false", "data=[a, b]", "init=", "out=a=b"]
    )
    assert found == {
        "steps": 5, "learning_rate": "1e-3", "shift_label": False, "data": ["a", "b"],
        "init": None, "out": "a=b",
    }  # fmt: skip
    config = TrainConfig.from_dict({**NEEDED, **found})
    assert config.learning_rate == 1e-3
    assert not config.shift_label


@pytest.mark.parametrize(
    ("old", "ratio"),
    [
        ({"curriculum": True}, 1.0),
        ({"curriculum": True, "curriculum_ratio": 0.5}, 0.5),
        ({"curriculum": False, "curriculum_ratio": 0.5}, 0.0),
    ],
)
def test_a_curriculum_of_older_runs_means_what_it_meant(old, ratio):
    config = TrainConfig.from_dict({**NEEDED, **old})
    assert (config.curriculum_ratio, config.base_weight) == (ratio, 0.0)


@pytest.mark.parametrize(("text", "words"), [("steps", "name=value"), ("data=[a", "data=\\[a")])
def test_assignments_that_are_none(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_assignments([text])


@pytest.mark.parametrize(
    ("name", "value"),
    [("tv_weight", 5), ("save_every", -1), ("warmup_ratio", 3), ("diverge_factor", 0.5),
     ("weight_decay", -1), ("tv_start", 2)],
)  # fmt: skip
def test_values_that_would_ruin_a_run_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; it should be .* default"):
        built(**{name: value})


def test_errors_name_settings_as_they_were_given():
    given_as = {"steps": "--steps", "gama": "gama in run.yaml", "epochs": "--set epochs"}
    wrong = {**NEEDED, "steps": 0, "gama": 3}
    with pytest.raises(ConfigError) as found:
        TrainConfig.from_dict(wrong, given_as=given_as)
    assert str(found.value) == (
        "--steps is 0; it should be greater than or equal to 1. Leave it out for the default "
        "(3 epochs). there is no setting gama in run.yaml; did you mean gamma?"
    )
    with pytest.raises(ConfigError, match="--steps and --set epochs contradict each other"):
        TrainConfig.from_dict({**NEEDED, "steps": 1, "epochs": 1}, given_as=given_as)


def test_older_names_are_read():
    config = built(rows=3, taps=2)
    assert (config.batch_size, config.captured_layers) == (3, 2)


OLDER = Path(__file__).with_name("older_run.yaml")


@pytest.mark.parametrize("path", [OLDER, *sorted(RELEASED.rglob("config.yaml"))], ids=str)
def test_settings_of_older_runs_are_read(path):
    saved = read_settings(path)
    config = TrainConfig.from_dict(saved)
    assert config.batch_size == saved.get("rows", saved.get("batch_size"))
    ran = {
        "loss_vocab": saved.get("loss_vocab") or 0,  # unset was: all tokens
        "sliding_window": saved.get("sliding_window", 0),
        "concatenate": saved.get("concatenate", 0.0),
        "drafter": {},
    }
    check_same_run({**saved, "drafter": {}}, {**config.to_dict(), **ran})
    for name, value in (("loss_vocab", 8191), ("sliding_window", 77), ("concatenate", 0.75)):
        with pytest.raises(TrainingError, match=f"{name} was {ran[name]} and is {value}"):
            check_same_run({**saved, "drafter": {}}, {**config.to_dict(), **ran, name: value})


def test_the_page_holds_the_table_and_the_dial():
    assert settings_table() in PAGE, f"put this into docs/training.md:\n{settings_table()}"
    for name, dial in _DIALS.items():
        line = f"| `{name}` | {dial.layers} | {dial.captured_layers} | {dial.rank} | {dial.gru} |"
        assert line in PAGE


def test_every_flag_on_the_page_exists():
    known = {"--nproc-per-node"}  # torchrun's
    groups = [typer.main.get_command(app)]
    while groups:
        command = groups.pop()
        groups += getattr(command, "commands", {}).values()
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known
