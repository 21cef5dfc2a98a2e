"""What the plugin understands of a configuration and of a version; no vLLM is needed here."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from domino_spec.checkpoints.layouts import write_public
from domino_spec.drafter import DominoHeadConfig, MarkovHeadConfig
from domino_spec.drafter.rollout import rollout
from domino_spec.errors import CheckpointError, ConfigError
from domino_spec.plugins.vllm.served import ServedHead
from domino_spec.plugins.vllm.settings import Settings, read_settings, refuse_unserved
from domino_spec.plugins.vllm.versions import problem
from tests.engines.vllm.pairs import HIDDEN, VOCAB, knowing_drafter


def config_of(values: dict) -> SimpleNamespace:
    return SimpleNamespace(to_dict=lambda: values)


def domino_values(**section: object) -> dict:
    drafter = knowing_drafter(shift_label=True, prefix_len=1)
    values = write_public(drafter.config, dtype="float32")
    values["dflash_config"] |= section
    return values


def test_a_domino_drafter_is_known_by_its_projector_whatever_it_is_called():
    expected = knowing_drafter(shift_label=True, prefix_len=1).config
    for names in (["DFlashDraftModel"], ["DominoDraftModel"], ["DFlashDominoDraftModel"]):
        settings = read_settings(config_of(domino_values() | {"architectures": names}))
        assert settings == Settings(head=expected.head, shift_label=True, block_size=8)


def test_a_plain_dflash_drafter_is_left_to_vllm():
    values = domino_values(projector_type=None, shift_label=None)
    assert read_settings(config_of(values)) is None
    values["dflash_config"]["attention_value_scale"] = 2.0  # what only vLLM knows is its business
    assert read_settings(config_of(values)) is None


def test_a_domino_architecture_without_a_head_is_an_error():
    values = domino_values(projector_type=None) | {"architectures": ["DFlashDominoDraftModel"]}
    with pytest.raises(ConfigError, match="DominoDraftModel"):
        read_settings(config_of(values))


def test_a_head_whose_alignment_nobody_states_is_an_error():
    with pytest.raises(ConfigError, match="shift_label"):
        read_settings(config_of(domino_values(shift_label=None)))


def test_a_markov_head_is_read_too():
    values = domino_values()
    section = {"projector_type": "markov", "emb_dim": 8, "shift_label": False, "mask_token_id": 63}
    values |= {"architectures": ["DFlashMarkovDraftModel"], "dflash_config": section}
    settings = read_settings(config_of(values))
    assert settings == Settings(head=MarkovHeadConfig(emb_dim=8), shift_label=False, block_size=8)


@pytest.mark.parametrize(
    "target",
    [{"embedding_multiplier": 12.0}, {"logits_scaling": 8.0}, {"final_logit_softcapping": 30.0}],
)
def test_targets_that_scale_what_the_drafter_borrows_are_refused(target):
    with pytest.raises(ConfigError, match=next(iter(target))):
        refuse_unserved(SimpleNamespace(**target), SimpleNamespace())
    refuse_unserved(SimpleNamespace(logit_scale=1.0, embedding_multiplier=1), SimpleNamespace())


def test_layers_that_are_joined_in_another_order_are_refused():
    for ids, refused in (([4, 1, 6], True), ([1, 4, 6], False)):
        draft = SimpleNamespace(dflash_config={"target_layer_ids": ids})
        with pytest.raises(ConfigError, match=r"\[4, 1, 6\]") if refused else nullcontext():
            refuse_unserved(SimpleNamespace(), draft)


def test_causal_full_layers_are_refused():
    mixed = SimpleNamespace(
        dflash_config={"causal": True}, layer_types=["full_attention", "sliding_attention"]
    )
    with pytest.raises(ConfigError, match="--to vllm"):
        refuse_unserved(SimpleNamespace(), mixed)
    mixed.layer_types = ["sliding_attention"] * 2
    refuse_unserved(SimpleNamespace(), mixed)


@pytest.mark.parametrize(("anchor", "right"), [(False, 7), (True, 8)])
def test_the_number_of_drafts_must_fit_the_block(anchor, right):
    settings = Settings(head=None, shift_label=True, block_size=8)
    assert settings.check_depth(right, anchor_predicts=anchor) is None
    with pytest.raises(ConfigError, match=f"trained with 8. Set it to {right}"):
        settings.check_depth(right + 1, anchor_predicts=anchor)
    assert f"best with {right}" in str(settings.check_depth(right - 1, anchor_predicts=anchor))


@pytest.mark.parametrize("version", ["0.26.0", "0.32.1", "0.29.0rc1", "0.32.0+cpu", "0.0.dev"])
def test_supported_versions(version):
    assert problem(version) is None


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0.0"])
def test_other_versions_are_refused_by_number(version):
    assert f"this is vLLM {version}" in str(problem(version))
    assert "0.26 to 0.32" in str(problem(version))


def served(**changes) -> ServedHead:
    head = DominoHeadConfig(emb_dim=VOCAB, gru_hidden_dim=VOCAB, pure_draft_prefix_len=1)
    shape = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": None, **changes}
    table = torch.eye(VOCAB, HIDDEN)
    return ServedHead(head, embed=lambda t: table[t], base_logits=lambda h: h @ table.T, **shape)


def stored(prefix: str = "") -> dict[str, torch.Tensor]:
    state = knowing_drafter(shift_label=True, prefix_len=1).state_dict()
    return {prefix + n.removeprefix("head."): t for n, t in state.items() if n.startswith("head.")}


@pytest.mark.parametrize("prefix", ["", "logit_head.", "model."])
def test_the_heads_tensors_are_taken_and_the_rest_is_handed_on(prefix):
    module = served()
    rest, names = module.take(
        {**stored(prefix), f"{prefix and 'model.'}fc.weight": torch.ones(1)}.items()
    )
    assert [name for name, _ in rest] == ["fc.weight"]
    assert "embed_proj.2.weight" in names
    for name, parameter in module.head.named_parameters():
        assert torch.equal(parameter, stored()[name])


def test_missing_and_packed_heads_are_errors():
    without = {name: t for name, t in stored().items() if "embed_proj.2" not in name}
    with pytest.raises(CheckpointError, match="embed_proj.2"):
        served().take(without.items())
    with pytest.raises(CheckpointError, match="packed.*--to vllm"):
        served().take({"fc.weight.codes": torch.ones(1)}.items())


def test_the_rollout_is_our_own_and_reduced_drafts_spread_over_the_whole_vocabulary():
    module = served(draft_vocab_size=VOCAB)
    module.take({**stored(), "d2t": torch.zeros(VOCAB, dtype=torch.long)}.items())
    assert module.draft_tokens.tolist() == list(range(VOCAB))  # offsets, not ids
    drafts = rollout(
        module, None, hidden=torch.zeros(2, 3, HIDDEN), anchor_tokens=torch.tensor([1, 5])
    )
    assert drafts.shape == (2, 3)
    with pytest.raises(CheckpointError, match="d2t must say which; found none"):
        served(draft_vocab_size=VOCAB).take(stored().items())
    twice = {**stored(), "d2t": torch.tensor([1, 0, *[0] * (VOCAB - 2)])}
    with pytest.raises(CheckpointError, match="d2t maps 2 draft tokens to target id 1"):
        served(draft_vocab_size=VOCAB).take(twice.items())
    small = served(draft_vocab_size=4)
    small.draft_tokens.copy_(torch.tensor([3, 9, 10, 40]))
    whole = small.spread(torch.arange(4.0).view(1, 4))
    assert whole.shape == (1, VOCAB)
    assert whole[0, 40] == 3
    assert torch.isinf(whole[0, 0])
