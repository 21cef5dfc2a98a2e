import dataclasses

import pytest

from domino_spec.drafter import default_target_layer_ids
from domino_spec.errors import ConfigError
from tests.support.families import drafter_config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 3}, "num_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"layer_types": ("full_attention",)}, "layer_types names 1"),
        ({"layer_types": ("full_attention", "mamba")}, "mamba"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "sliding_window"),
        ({"mask_token_id": 97}, "mask_token_id is 97"),
        ({"draft_vocab_size": 97}, "draft_vocab_size is 97"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (1, 3)}, r"\[3\] outside the target's 3"),
        ({"target_layer_ids": (1, 1)}, "twice"),
        ({"block_size": 1}, "block_size is 1"),
        ({"prefix": 8}, "pure_draft_prefix_len is 8"),
        ({"prefix": -1}, "pure_draft_prefix_len is -1"),
    ],
)
def test_contradictions_name_the_field(changes, words):
    with pytest.raises(ConfigError, match=words):
        drafter_config(**changes)


def test_depths_of_both_alignments():
    shifted, unshifted = drafter_config(shift=True), drafter_config(shift=False)
    assert (shifted.default_depth, shifted.max_depth, shifted.first_slot) == (7, 8, 0)
    assert (unshifted.default_depth, unshifted.max_depth, unshifted.first_slot) == (7, 7, 1)


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        drafter_config().block_size = 4


def test_default_capture_layers_spread_over_the_target():
    assert default_target_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(30, 1) == (15,)
    for layers, count in ((4, 5), (2, 3), (3, 2)):
        with pytest.raises(ConfigError, match="too shallow"):
            default_target_layer_ids(layers, count)
