from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from domino_spec.plugins import sglang as plugin
from domino_spec.plugins.sglang.versions import SUPPORTED, is_too_old, problem


@pytest.fixture(autouse=True)
def no_external_models(monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "anything")
    monkeypatch.delenv(plugin.VARIABLE)


def installed(monkeypatch, version):
    monkeypatch.setattr(plugin, "version", lambda _name: version)
    monkeypatch.delitem(sys.modules, "sglang.srt.models.registry", raising=False)


@pytest.mark.parametrize("version", ["0.5.20", "0.5.21.post1", "0.5.23", "0.0.0.dev1", "unknown"])
def test_supported_versions(version, monkeypatch, caplog):
    assert problem(version) is None
    installed(monkeypatch, version)
    plugin.register()
    assert os.environ[plugin.VARIABLE] == plugin.MODELS
    assert not caplog.records


def test_an_old_version_is_told_and_left_alone(monkeypatch, caplog):
    assert is_too_old("0.5.19")
    installed(monkeypatch, "0.5.19")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "this is SGLang 0.5.19" in caplog.text
    assert "expected 0.5.20 or later" in caplog.text
    assert plugin.VARIABLE not in os.environ


def test_a_newer_version_is_told_and_served(monkeypatch, caplog):
    installed(monkeypatch, "0.6.0")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "was tried with 0.5.20 to 0.5.23" in caplog.text
    assert os.environ[plugin.VARIABLE] == plugin.MODELS


def test_another_package_of_models_is_not_displaced(monkeypatch, caplog):
    installed(monkeypatch, "0.5.20")
    monkeypatch.setenv(plugin.VARIABLE, "their.models")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "domino export --to sglang" in caplog.text
    assert os.environ[plugin.VARIABLE] == "their.models"


def test_registering_twice_says_nothing(monkeypatch, caplog):
    installed(monkeypatch, "0.5.20")
    plugin.register()
    plugin.register()
    assert not caplog.records


def test_the_span_is_in_order():
    assert SUPPORTED[0] < SUPPORTED[1]


def test_importing_the_plugin_does_not_import_sglang():
    code = (
        "import sys, domino_spec.plugins.sglang; "
        "sys.exit(bool({'sglang', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
