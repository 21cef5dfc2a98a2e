"""Defaults from the target's shape, a reduced vocabulary."""

import numpy as np
import pytest

from domino_spec.drafter import DominoHeadConfig, MarkovHeadConfig
from domino_spec.errors import ConfigError
from domino_spec.training import TrainConfig
from domino_spec.training.start import (
    choose_draft_tokens,
    derive,
    drafter_config,
)
from tests.support.families import CONTEXT, HIDDEN, LAYERS, VOCAB, make_target
from tests.training.helpers import bigram_config, deep_target


def derived(target=None, *, alone=True, on_cpu=False, **values):
    config = TrainConfig.from_dict({"target": "t", "data": ["d"], "out": "o", **values})
    return derive(config, target or make_target("llama"), alone=alone, on_cpu=on_cpu)


def test_a_cpu_takes_smaller_steps_of_a_smaller_drafter(deep):
    config = derived(deep, on_cpu=True)
    assert (config.size, config.layers, config.rank) == ("small", 2, 64)
    assert config.batch_size * config.length == 1024
    assert config.chunk_bytes == 2**28
    asked = derived(deep, on_cpu=True, size="base", length=2048, batch_size=8, chunk_bytes=2**30)
    assert (asked.layers, asked.length, asked.batch_size) == (5, 2048, 8)
    assert asked.chunk_bytes == 2**30


@pytest.fixture(scope="module")
def deep():
    return deep_target()


@pytest.mark.parametrize(
    ("size", "layers", "captured", "rank", "gru"),
    [("small", 2, 3, 64, 256), ("base", 5, 5, 256, 1024), ("large", 8, 7, 512, 2048)],
)
def test_the_dial_and_the_targets_shape(deep, size, layers, captured, rank, gru):
    config = derived(deep, size=size)
    assert (config.layers, config.captured_layers, config.rank, config.gru_hidden_dim) == (
        layers, captured, rank, gru,
    )  # fmt: skip
    assert len(config.target_layer_ids) == captured
    assert (config.heads, config.kv_heads, config.head_dim) == (32, 8, 128)
    assert config.intermediate_size == 9728
    assert (config.length, config.batch_size, config.anchors) == (1024, 16, 128)
    assert (config.optimizer, config.learning_rate) == ("muon", 3e-3)
    sharded = derived(deep, size=size, alone=False)
    assert sharded.optimizer == "adamw", "Muon needs whole matrices"
    assert sharded.learning_rate == pytest.approx(1e-3 * (576 / 2560) ** 0.5)
    assert config.prefix_len == 1


def test_base_on_a_deep_target_is_the_published_shape(deep):
    config = derived(deep)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    shape = drafter_config(config, deep, mask_token_id=49)
    assert shape.num_target_layers == 36
    assert shape.block_size == 16
    assert shape.shift_label
    assert shape.rope_parameters["rope_theta"] == 1e6
    assert shape.max_position_embeddings == 40960
    assert shape.head == DominoHeadConfig(gru_hidden_dim=1024, emb_dim=256, pure_draft_prefix_len=1)


def test_a_small_target_gets_a_small_drafter():
    config = derived(size="large")
    assert config.layers == LAYERS, "not deeper than its target"
    assert config.captured_layers == len(set(config.target_layer_ids)) <= LAYERS
    assert config.rank == HIDDEN
    assert config.gru_hidden_dim == 2 * HIDDEN
    assert config.length == CONTEXT
    assert derived(optimizer="adamw").learning_rate == 1e-3


def test_shallow_targets_get_fewer_captured_layers_unless_asked_for_more():
    shallow = deep_target(layers=4, hidden=64)
    config = derived(shallow, size="large")
    assert 1 <= config.captured_layers < 7
    assert all(0 <= layer < 4 for layer in config.target_layer_ids)
    with pytest.raises(ConfigError, match="7"):
        derived(shallow, captured_layers=7)


def test_everything_can_be_set_by_hand():
    values = {
        "layers": 3, "intermediate_size": 48, "heads": 2, "kv_heads": 1, "head_dim": 4,
        "target_layer_ids": (0, 2), "length": 64, "batch_size": 3,
        "anchors": 5, "learning_rate": 0.1,
        "rank": 7, "gru_hidden_dim": 9, "prefix_len": 0,
    }  # fmt: skip
    config = derived(**values)
    assert {name: getattr(config, name) for name in values} == values
    assert derive(config, make_target("llama")) == config, "deriving twice changes nothing"
    shape = drafter_config(config, make_target("llama"), mask_token_id=96)
    assert (shape.num_layers, shape.num_heads, shape.head_dim) == (3, 2, 4)
    assert shape.head.pure_draft_prefix_len == 0


def test_variants():
    target = make_target("llama")
    plain = derived(variant="dflash")
    assert (plain.rank, plain.gru_hidden_dim, plain.prefix_len) == (None, None, None)
    assert drafter_config(plain, target, mask_token_id=96).head is None
    markov = derived(variant="markov", rank=5)
    head = drafter_config(markov, target, mask_token_id=96).head
    assert head == MarkovHeadConfig(emb_dim=5, pure_draft_prefix_len=0)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "granite", "gpt_oss"])
def test_families_that_say_things_differently(family):
    target = make_target(family)
    shape = drafter_config(derived(target, size="small"), target, mask_token_id=96)
    assert shape.hidden_size == HIDDEN
    assert shape.vocab_size == VOCAB
    assert shape.num_heads % shape.num_kv_heads == 0


def test_a_mask_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="mask_token_id"):
        drafter_config(derived(), make_target("llama"), mask_token_id=VOCAB)


# A reduced vocabulary.


def test_the_tokens_used_most_in_the_targets_order():
    counts = np.array([5, 0, 9, 9, 1, 5, 0])
    assert choose_draft_tokens(counts, 1).tolist() == [2]
    assert choose_draft_tokens(counts, 3).tolist() == [0, 2, 3]
    assert choose_draft_tokens(counts, 4).tolist() == [0, 2, 3, 5]
    assert choose_draft_tokens(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_reduced_vocabulary_is_smaller():
    with pytest.raises(ConfigError, match="draft_vocab is 7"):
        choose_draft_tokens(np.zeros(7, dtype=np.int64), 7)


def test_rows_longer_than_the_targets_context_are_refused(tmp_path):
    target = make_target("llama")
    limit = target.context_length
    with pytest.raises(ConfigError, match=f"length is {limit + 1}, the target's context {limit}"):
        derive(bigram_config(tmp_path, length=limit + 1), target)
