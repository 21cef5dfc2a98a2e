from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import huggingface_hub.constants
import pytest

from domino_spec.checkpoints import describe, load_drafter
from domino_spec.errors import CheckpointError, ConfigError

from .helpers import Raw, assert_same_drafter, tiny_drafter, write_index

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache and no network."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def put_in_cache(raw: Raw, cache: Path, *, branch: str = "main") -> None:
    """As the hub's client lays it out: blobs, and snapshots made of links to them."""
    repository = cache / "models--org--drafter"
    blobs = raw.write(repository / "blobs")
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    (repository / "refs").mkdir()
    (repository / "refs" / branch).write_text(COMMIT)


def test_a_folder_a_path_and_a_single_file(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write(tmp_path / "drafter")
    for source in (str(folder), folder, folder / "model.safetensors"):
        assert_same_drafter(load_drafter(source).drafter, tiny_drafter())


def test_a_single_file_of_another_name(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write(tmp_path / "drafter", file="domino.safetensors")
    assert_same_drafter(load_drafter(folder).drafter, tiny_drafter())


def test_two_files_of_other_names_are_ambiguous(domino: Raw, tmp_path: Path) -> None:
    domino.write(tmp_path / "drafter", file="a.safetensors")
    folder = domino.write(tmp_path / "drafter", file="b.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors without model"):
        describe(folder)
    describe(folder / "b.safetensors")


def test_shards(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write_shards(tmp_path / "drafter", *domino.halves())
    assert_same_drafter(load_drafter(folder).drafter, tiny_drafter())


def test_a_hub_id_from_the_cache(domino: Raw, hub_cache: Path) -> None:
    put_in_cache(domino, hub_cache)
    checkpoint = load_drafter("org/drafter")
    assert checkpoint.source == "org/drafter"
    assert checkpoint.revision == COMMIT
    assert_same_drafter(checkpoint.drafter, tiny_drafter())
    assert describe("org/drafter", revision=COMMIT).revision == COMMIT


def test_a_hub_revision(domino: Raw, hub_cache: Path) -> None:
    put_in_cache(domino, hub_cache, branch="v2")
    assert describe("org/drafter", revision="v2").revision == COMMIT
    with pytest.raises(CheckpointError, match="revision 'v3'"):
        describe("org/drafter", revision="v3")


def test_an_unknown_hub_id_says_both_places_in_one_line(hub_cache: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        describe("org/nothing")
    message = str(caught.value)
    assert "org/nothing is no file or folder here" in message
    assert "the hub gave no org/nothing" in message
    assert "local copy" in message
    assert "\n" not in message


@pytest.mark.parametrize("source", ["./nowhere", "/no/such/folder", "nowhere", Path("org/drafter")])
def test_a_missing_path(source: str | Path, hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match="no file or folder here, and not a hub id"):
        describe(source)


def test_a_local_folder_has_no_revisions(domino: Raw, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision='main'"):
        describe(domino.write(tmp_path / "drafter"), revision="main")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_refused_by_name_and_never_opened(
    name: str, domino: Raw, tmp_path: Path
) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (Path.touch, (tmp_path / "sprung",))

    folder = domino.write(tmp_path / "drafter")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap()))
    for source in (folder, folder / name):
        with pytest.raises(CheckpointError, match=rf"{name}: .*never unpickled.*Convert"):
            load_drafter(source)
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_next_to_safetensors_is_left_alone(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write(tmp_path / "drafter")
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    load_drafter(folder)


def test_auto_map_is_never_executed(domino: Raw, tmp_path: Path) -> None:
    domino.config["auto_map"] = {
        "AutoConfig": "modeling.Config",
        "AutoModel": "modeling.DFlashDraftModel",
    }
    folder = domino.write(tmp_path / "drafter")
    trap = f"from pathlib import Path\nPath({str(tmp_path / 'sprung')!r}).touch()\n"
    (folder / "modeling.py").write_text(trap)
    load_drafter(folder)
    describe(folder)
    assert not (tmp_path / "sprung").exists()
    exec(trap)
    assert (tmp_path / "sprung").exists()


def test_a_missing_config(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write(tmp_path / "drafter")
    (folder / "config.json").unlink()
    for source in (folder, folder / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            describe(source)


def test_missing_weights(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write(tmp_path / "drafter")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors; found config\.json"):
        describe(folder)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "drafter.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"drafter\.gguf is not a \.safetensors file"):
        describe(tmp_path / "drafter.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"\xff\xfe", "not valid JSON"), (b"[]", "holds list")],
)
def test_a_broken_config(content: bytes, message: str, domino: Raw, tmp_path: Path) -> None:
    folder = domino.write(tmp_path / "drafter")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        describe(folder)


@pytest.mark.parametrize("keep", [0, 6, 200, -1])
def test_damaged_weights(keep: int, domino: Raw, tmp_path: Path) -> None:
    folder = domino.write(tmp_path / "drafter")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors"):
        describe(folder)


def test_a_missing_shard(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write_shards(tmp_path / "drafter", *domino.halves())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json names model-00002-of-00002\.saf"):
        describe(folder)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/model.safetensors", "sub/model.safetensors", "..", 3]
)
def test_an_index_that_points_outside_the_folder(
    name: str | int, domino: Raw, tmp_path: Path
) -> None:
    domino.write(tmp_path)
    folder = domino.write_shards(tmp_path / "drafter", *domino.halves())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    write_index(folder, {**index["weight_map"], "fc.weight": name})
    with pytest.raises(CheckpointError, match=r"tensor 'fc\.weight' in .*outside the checkpoint"):
        describe(folder)


def test_an_index_that_points_to_a_pickle(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write_shards(tmp_path / "drafter", *domino.halves())
    (folder / "model.bin").write_bytes(b"")
    write_index(folder, {"fc.weight": "model.bin"})
    with pytest.raises(CheckpointError, match=r"'fc\.weight' in 'model\.bin'; expected a \.safe"):
        describe(folder)


def test_an_index_without_a_map(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write_shards(tmp_path / "drafter", *domino.halves())
    write_index(folder, {})
    with pytest.raises(CheckpointError, match="no weight_map"):
        describe(folder)


def test_an_index_that_contradicts_its_files(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write_shards(tmp_path / "drafter", *domino.halves())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    write_index(folder, {**index["weight_map"], "fc.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"places tensor 'fc\.weight' in model-00002"):
        describe(folder)


def test_whole_and_sharded_weights_side_by_side(domino: Raw, tmp_path: Path) -> None:
    domino.write(tmp_path / "drafter")
    folder = domino.write_shards(tmp_path / "drafter", *domino.halves())
    with pytest.raises(CheckpointError, match=r"both model\.safetensors and model\.safetensors\."):
        describe(folder)


def test_the_same_tensor_in_two_shards(domino: Raw, tmp_path: Path) -> None:
    first, second = domino.halves()
    second["fc.weight"] = first["fc.weight"].clone()
    folder = domino.write_shards(tmp_path / "drafter", first, second)
    with pytest.raises(
        CheckpointError, match=r"tensor 'fc\.weight' is in .*00001.* and in .*00002"
    ):
        describe(folder)
