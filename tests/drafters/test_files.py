"""Folders of baseline drafters: written, packed, read back, refused by name; opened by path."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_spec.checkpoints import Provenance, load_drafter, save_drafter, save_packed
from domino_spec.drafter import Eagle3, ModuleConfig
from domino_spec.drafters import open_drafter
from domino_spec.errors import CheckpointError, ConfigError, InputError, MismatchError
from tests.support.baselines import eagle3_config, medusa_config, random_baseline
from tests.support.families import (
    drafter_config,
    make_target,
    markov_head,
    plain_greedy,
    random_drafter,
    random_prompts,
)
from tests.support.runs import run

KINDS = ("medusa", "eagle3")


@pytest.mark.parametrize("reduced", [None, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_back_as_the_same_drafter(kind, reduced, tmp_path):
    drafter = random_baseline(kind, draft_vocab_size=reduced)
    if reduced:
        drafter.draft_tokens = torch.arange(5, 45)
    provenance = Provenance(target_id="a/b", training_length=64)
    save_drafter(drafter, tmp_path / "d", provenance=provenance)
    values = json.loads((tmp_path / "d" / "config.json").read_text())
    assert values["drafter"] == kind
    loaded = load_drafter(tmp_path / "d", any_kind=True)
    assert loaded.config == drafter.config
    assert loaded.provenance.target_id == "a/b"
    for (name, one), two in zip(
        drafter.named_parameters(), loaded.drafter.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    if reduced:
        assert torch.equal(loaded.drafter.draft_tokens, drafter.draft_tokens)
    assert not any(buffer.is_meta for buffer in loaded.drafter.buffers())


@pytest.mark.parametrize("bits", [8, 6, 4, {"*mlp*": 4, "*blocks.0.weight": 8}])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_folders_are_small_and_close(kind, bits, tmp_path):
    if isinstance(bits, dict):
        bits = {p: b for p, b in bits.items() if ("mlp" in p) == (kind == "eagle3")}
    drafter = random_baseline(kind)
    save_drafter(drafter, tmp_path / "plain")
    save_packed(drafter, tmp_path / "packed", bits=bits, group_size=16, max_shard_bytes=4000)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    loaded = load_drafter(tmp_path / "packed", dtype=torch.float32, any_kind=True).drafter
    worst = {8: 0.02, 6: 0.06, 4: 0.2}[4 if isinstance(bits, dict) else bits]
    for (name, one), two in zip(drafter.named_parameters(), loaded.parameters(), strict=True):
        assert (one - two).abs().max() <= worst, name
    again = load_drafter(tmp_path / "packed", any_kind=True).drafter
    assert again.dtype == torch.bfloat16
    if not isinstance(bits, dict):
        size = sum(f.stat().st_size for f in (tmp_path / "packed").glob("*.safetensors"))
        assert size < (tmp_path / "plain" / "model.safetensors").stat().st_size / 2


def test_wrong_folders_are_refused_by_name(tmp_path):
    save_drafter(random_baseline("medusa"), tmp_path / "m")
    with pytest.raises(ConfigError, match="kind 'medusa'.*domino bench"):
        load_drafter(tmp_path / "m")
    twice = random_baseline("eagle3", draft_vocab_size=3)
    twice.draft_tokens = torch.tensor([5, 9, 5])
    save_drafter(twice, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="d2t maps 2 draft tokens to target id 5"):
        load_drafter(tmp_path / "twice", any_kind=True)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    lost = tensors.pop("heads.1.blocks.0.bias")
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks.*heads\.1\.blocks\.0\.bias"):
        load_drafter(tmp_path / "m", any_kind=True)
    save_file(
        {**tensors, "heads.1.blocks.0.bias": lost[:-1].clone()},
        tmp_path / "m" / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match="mis-shaped"):
        load_drafter(tmp_path / "m", any_kind=True)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "surprise": 1}))
    with pytest.raises(ConfigError, match="no field 'surprise'"):
        load_drafter(tmp_path / "m", any_kind=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"draft_vocab_size": 97}, "between 1 and 96"),
        ({"drafter": "hydra"}, "kind is 'hydra'"),
    ],
)
def test_configurations_that_make_no_sense(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModuleConfig.from_dict({**medusa_config().to_dict(), **changes})


@pytest.mark.parametrize(
    "changes", [{"tapped_layers": ()}, {"tapped_layers": (1, 6)}, {"num_kv_heads": 3}]
)
def test_eagle_configurations_that_make_no_sense(changes):
    with pytest.raises(ConfigError, match="expected"):
        eagle3_config(**changes)


def test_any_drafter_opens_by_path_or_name(tmp_path):
    target = make_target("llama")
    for kind in KINDS:
        save_drafter(random_baseline(kind), tmp_path / kind)
    save_drafter(random_drafter(), tmp_path / "domino")
    save_drafter(random_drafter(drafter_config(head=markov_head())), tmp_path / "markov")
    save_drafter(random_drafter(drafter_config(head=False)), tmp_path / "dflash")
    prompts = random_prompts((5, 9, 3))
    answers = [plain_greedy(target.model, prompt, 15) for prompt in prompts]
    named = ("domino", "dflash", "markov", *KINDS, "lookup", "lookup:4", "plain")
    depths = {"medusa": 5, "eagle3": 5, "lookup": 10, "lookup:4": 4, "plain": 0}
    for name in named:
        spec = tmp_path / name if (tmp_path / name).exists() else name
        opened = open_drafter(spec, target)
        assert (opened.name, opened.kind) == (name, name.split(":")[0])
        assert opened.depth == depths.get(name, 7)
        assert run(target, opened, prompts, max_new_tokens=15)[0] == answers, name
        described = json.loads(json.dumps(opened.describe()))
        assert (described["parameters"] > 0) == (opened.config is not None)


def test_depths_and_targets_that_do_not_fit(tmp_path):
    target = make_target("llama")
    save_drafter(random_baseline("medusa"), tmp_path / "m")
    save_drafter(random_baseline("eagle3"), tmp_path / "e")
    assert open_drafter(tmp_path / "m", target, depth=2).depth == 2
    assert open_drafter(tmp_path / "e", target, depth=12).depth == 12, "a chain has no end"
    with pytest.raises(InputError, match="depth is 6; this medusa drafter gives 0 to 5"):
        open_drafter(tmp_path / "m", target, depth=6)
    with pytest.raises(InputError, match="no block drafter"):
        open_drafter(tmp_path / "m", target, candidates=4)
    with pytest.raises(InputError, match="no window over its context"):
        open_drafter(tmp_path / "e", target, draft_sinks=4)
    for wrong in ("lookup:", "lookup:0", "lookup:x"):
        with pytest.raises(InputError, match="lookup:DEPTH"):
            open_drafter(wrong, target)
    other = random_baseline("medusa", hidden_size=16)
    save_drafter(other, tmp_path / "o")
    with pytest.raises(MismatchError, match="hidden size 16, expected 32"):
        open_drafter(tmp_path / "o", target)
    deep = replace(eagle3_config(), num_target_layers=9, tapped_layers=(1, 8))
    save_drafter(Eagle3.fresh(deep, seed=0), tmp_path / "deep")
    with pytest.raises(MismatchError, match="target layers 9, expected 3"):
        open_drafter(tmp_path / "deep", target)
