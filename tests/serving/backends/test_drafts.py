"""A drafter is served from where it lies if the engine reads it, else from the cache."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from domino_spec.checkpoints import export_drafter, load_drafter, save_drafter, save_packed
from domino_spec.drafter import DraftModel
from domino_spec.errors import ConfigError, ExportError, MismatchError
from domino_spec.serving.backends import ServeArgs
from domino_spec.serving.backends.drafts import plan_draft, write_draft
from domino_spec.serving.backends.sglang import BACKEND as sglang
from domino_spec.serving.backends.vllm import BACKEND as vllm
from tests.cli import tiny
from tests.support.families import randomise

NEEDS = {"vllm": vllm, "sglang": sglang}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "served"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny.save_target(tmp_path_factory.mktemp("target"), tokenizer=tiny.make_tokenizer()))


def drafter(**changes):
    built = DraftModel.untrained(replace(tiny.drafter_config(), **changes))
    return randomise(built, 0.3)


@pytest.fixture
def trained(tmp_path):
    return save_drafter(drafter(), tmp_path / "run" / "drafter")


@pytest.fixture
def packed(tmp_path):
    return save_packed(drafter(), tmp_path / "packed", bits=8)


def served(target, source, engine, **more):
    request = ServeArgs(target=target, draft=str(source), **more)
    planned = plan_draft(request, NEEDS[engine])
    if not planned.is_there:
        write_draft(request, NEEDS[engine], planned)
    return planned


def test_vllm_serves_a_trained_folder_as_it_is(target, trained, monkeypatch, cache):
    monkeypatch.chdir(trained.parent)
    planned = served(target, "drafter", "vllm")
    assert planned.is_own
    assert planned.folder == trained
    assert not cache.exists()


@pytest.mark.parametrize(("engine", "form"), [("vllm", "vllm"), ("sglang", "sglang")])
def test_an_export_is_served_as_it_is(target, tmp_path, engine, form):
    folder = export_drafter(drafter(), tmp_path / "out", to=form, dtype=torch.bfloat16)
    assert served(target, folder, engine).folder == folder


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_packed_drafter_is_exported_once(target, packed, engine, cache):
    first = served(target, packed, engine)
    assert not first.is_own
    assert first.folder.parent == cache
    assert first.folder.name.startswith(f"packed-{engine}-")
    found, expected = load_drafter(first.folder), load_drafter(packed)
    assert found.layout == "public"
    assert found.config == expected.config == first.config
    for name, tensor in expected.drafter.state_dict().items():
        assert torch.equal(found.drafter.state_dict()[name], tensor)
    written = (first.folder / "model.safetensors").stat().st_mtime_ns
    again = served(target, packed, engine)
    assert again == first
    assert (again.folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in cache.iterdir()] == [first.folder.name]  # no leftovers


def test_another_drafter_of_the_same_name_gets_another_folder(target, packed, tmp_path):
    first = served(target, packed, "vllm")
    shutil.rmtree(packed)
    other = drafter()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    save_packed(other, packed, bits=8)
    second = served(target, packed, "vllm")
    assert second.folder != first.folder
    assert first.is_there


def test_an_interrupted_export_is_no_folder(target, packed, monkeypatch, cache):
    request = ServeArgs(target=target, draft=str(packed))
    planned = plan_draft(request, vllm)

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("domino_spec.checkpoints.write.write_json", fail)
    with pytest.raises(KeyboardInterrupt):
        write_draft(request, vllm, planned)
    assert not planned.is_there
    assert list(cache.iterdir()) == []


def test_sglang_gets_its_own_name_and_type(target, trained):
    planned = served(target, trained, "sglang")
    assert not planned.is_own  # it is float32
    config = json.loads((planned.folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    tensors = load_file(planned.folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_an_alignment_that_only_the_command_line_states_is_written_down(target, trained):
    path = trained / "config.json"
    config = json.loads(path.read_text())
    del config["dflash_config"]["shift_label"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="--shift-label"):
        served(target, trained, "vllm")
    planned = served(target, trained, "vllm", shift_label=True)
    assert not planned.is_own
    written = json.loads((planned.folder / "config.json").read_text())
    assert written["dflash_config"]["shift_label"] is True
    other = served(target, trained, "vllm", shift_label=False)
    assert other.folder != planned.folder


def test_a_single_file_among_others_is_exported(target, trained):
    shutil.copy(trained / "model.safetensors", trained / "older.safetensors")
    assert not served(target, trained / "model.safetensors", "vllm").is_own


def test_a_reduced_vocabulary_brings_the_targets_rows(target, tmp_path):
    small = drafter(draft_vocab_size=5)
    small.draft_tokens = torch.tensor([7, 3, 250, 40, 299])
    folder = save_drafter(small, tmp_path / "small")
    planned = served(target, folder, "vllm")
    assert not planned.is_own
    rows = load_file(planned.folder / "model.safetensors")["lm_head.weight"]
    assert rows.shape == (5, tiny.HIDDEN)
    assert served(target, planned.folder, "vllm").is_own
    with pytest.raises(ExportError, match="whole vocabulary only"):
        served(target, folder, "sglang")


def test_what_sglang_would_serve_wrongly_is_refused_even_in_its_own_layout(target, tmp_path):
    head = replace(tiny.drafter_config().head, pure_draft_prefix_len=0)
    folder = save_drafter(drafter(head=head), tmp_path / "prefix", dtype=torch.bfloat16)
    with pytest.raises(ExportError, match="pure_draft_prefix_len is 0"):
        served(target, folder, "sglang")


def test_another_targets_drafter_is_refused_before_anything_starts(target, tmp_path):
    folder = tiny.save_draft(tmp_path / "wide", hidden=64)
    with pytest.raises(MismatchError, match="hidden size 64, expected 32"):
        served(target, folder, "vllm")
