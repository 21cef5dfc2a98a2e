"""What cannot be a target is refused by name at load time."""

import pytest
import torch
import transformers as tf
from torch import nn

from domino_spec.errors import TargetError
from domino_spec.targets import Target, load_target, probe_target
from domino_spec.targets.support import check_config
from tests.support.drafters import Good
from tests.support.families import (
    CONFIGS,
    make_model,
    make_target,
    plain_greedy,
    random_prompts,
    randomise,
)
from tests.support.runs import run

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4}
HYBRID = {**SMALL, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tf.T5Config(vocab_size=97), "encoder-decoder"),
        (tf.Lfm2Config(**HYBRID, layer_types=["conv", "full_attention"] * 2), "of type conv"),
        (tf.Llama4TextConfig(**HYBRID, head_dim=8, num_local_experts=2), "chunked_attention"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_cannot_be_rolled_back(config, words, tmp_path):
    config.save_pretrained(tmp_path)
    # Refused by configuration alone: there are no weights to load.
    with pytest.raises(TargetError, match=words):
        load_target(tmp_path)


def test_recurrent_models_are_refused_by_their_class():
    config = tf.RecurrentGemmaConfig(
        **SMALL, num_attention_heads=4, lru_width=32, intermediate_size=64
    )
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(TargetError, match="RecurrentGemmaForCausalLM.*running state"):
        Target(model)


@pytest.mark.parametrize(
    "config",
    [
        tf.MambaConfig(**SMALL),
        tf.JambaConfig(
            **HYBRID, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8,
            use_mamba_kernels=False,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_state_space_layers_that_begin_every_block_anew_are_found_by_the_probe(config):
    """Transformers' own forward takes their state up for single tokens alone."""
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
    with pytest.raises(TargetError, match="does not use the cache"):
        probe_target(Target(model))


def test_linear_attention_of_another_form_is_refused():
    config = tf.MiniMaxConfig(
        **HYBRID, head_dim=8, num_local_experts=2, block_size=8,
        layer_types=["linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    with pytest.raises(TargetError, match="layer 0.*linear attention.*`cache_params`"):
        Target(tf.AutoModelForCausalLM.from_config(config))


def test_headless_models_are_refused():
    model = tf.AutoModel.from_config(CONFIGS["llama"]())
    with pytest.raises(TargetError, match="no language-model head"):
        Target(model)


def test_things_that_are_no_transformers_model():
    with pytest.raises(TargetError, match="found Linear"):
        Target(nn.Linear(2, 2))


class Forgetful(tf.LlamaForCausalLM):
    """Shifts its logits, further with each call."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.calls = getattr(self, "calls", 0) + 1
        output.logits = output.logits.roll(self.calls, dims=-1)
        return output


class Bent(tf.LlamaForCausalLM):
    """Bends its logits in a way the drafter could not follow."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits**3
        return output


def test_bent_logits_are_found_by_the_probe():
    for kind in (Forgetful, Bent):
        torch.manual_seed(0)
        with pytest.raises(TargetError, match="neither a scale nor a soft-cap"):
            probe_target(Target(kind(CONFIGS["llama"]())))


class Needy(tf.LlamaForCausalLM):
    """Wants more than tokens."""

    def forward(self, *args, **kwargs):
        raise ValueError("pixel_values are required")


def test_a_model_that_wants_more_than_tokens_is_a_refusal():
    with pytest.raises(TargetError, match="Needy.*pixel_values are required"):
        probe_target(Target(Needy(CONFIGS["llama"]())))


class Recurrent(tf.LlamaForCausalLM):
    """Carries a sum of all tokens from forward to forward, which no cut of the cache takes back."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        embedded = self.get_input_embeddings()(input_ids)
        running = getattr(past_key_values, "running", 0) + embedded.cumsum(1)
        past_key_values.running = running[:, -1:]
        return super().forward(
            inputs_embeds=embedded + 0.5 * running, past_key_values=past_key_values, **kwargs
        )


def test_state_outside_the_cache_is_found_by_rolling_back():
    model = randomise(Recurrent(CONFIGS["llama"]()).float().eval(), 0.25)
    with pytest.raises(TargetError, match="Recurrent.*gives other logits after a roll-back"):
        probe_target(Target(model))


def test_alibi_models_decode_one_row_but_refuse_batches():
    model = tf.BloomForCausalLM(tf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=4, n_head=4))
    target = Target(model.float().eval(), name="bloom")
    probe_target(target)
    target.new_cache(1)
    with pytest.raises(TargetError, match="one sequence at a time"):
        target.new_cache(2)


def test_a_model_without_a_cache_is_a_refusal():
    config = tf.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=64)
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
    with pytest.raises(TargetError, match="does not use the cache"):
        probe_target(Target(model))


def test_windows_a_model_counts_by_itself_refuse_batches():
    """Longer than any probe, so only the configuration can tell."""
    config = tf.GPTNeoConfig(
        vocab_size=97, hidden_size=32, num_layers=4, num_heads=4, max_position_embeddings=512,
        attention_types=[[["global", "local"], 2]], window_size=256,
    )  # fmt: skip
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
    target = Target(model, name="neo")
    probe_target(target)
    with pytest.raises(TargetError, match="window_size=256.*one sequence at a time"):
        target.new_cache(2)
    (prompt,) = random_prompts((280,))
    answer = plain_greedy(model, prompt, 20)
    assert run(target, Good([answer], depth=7, vocab=97), [prompt], max_new_tokens=20)[0] == [
        answer
    ]


def test_foreign_attention_refuses_ragged_batches_by_name():
    target = Target(make_model("llama"))
    target.model.config._attn_implementation = "flash_attention_2"
    cache = target.new_cache(2)
    cache.lengths = [3, 1]
    with pytest.raises(TargetError, match="flash_attention_2"):
        target.forward(torch.ones(2, 2, dtype=torch.long), cache)


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {"input_activations": {"dynamic": True, "strategy": "tensor"}}
                },
            },
            "whole forward",
        ),
        (
            {"quant_method": "torchao", "quant_type": "Float8Dynamic(granularity=PerTensor())"},
            "whole",
        ),
        ({"quant_method": "somebody-new"}, "'somebody-new'.*Known to work.*awq"),
    ],
)
def test_quantisations_refused_by_name(quantisation, words):
    config = CONFIGS["llama"]()
    config.quantization_config = quantisation
    with pytest.raises(TargetError, match=words):
        check_config(config, "quantised")


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "fp8"},
        {"quant_method": "awq"},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"input_activations": None}}},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        tf.BitsAndBytesConfig(load_in_4bit=True),
    ],
    ids=str,
)
def test_quantisations_taken(quantisation):
    config = CONFIGS["llama"]()
    config.quantization_config = quantisation
    check_config(config, "quantised")


def test_remote_code_is_never_run_unasked(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "config.json").write_text(
        '{"model_type": "strange", "auto_map": {"AutoConfig": "strange.Config", '
        '"AutoModelForCausalLM": "strange.Model"}}'
    )
    (tmp_path / "strange.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    with pytest.raises(TargetError, match="trust_remote_code"):
        load_target(tmp_path)
    assert not marker.exists()


def test_known_families_pass_the_probe():
    for family in CONFIGS:
        target = make_target(family)
        assert target.batch_refusal is None, family
