"""Each family's inference model decodes as Transformers and the reference loop do."""

from functools import cache

import pytest
import torch
import transformers as tf

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.engine import Engine
from domino_spec.engine.models import families, load_model
from domino_spec.errors import TargetError
from domino_spec.targets import Target, probe_target
from tests.engine.runs import make_engine, own, run_engine, run_reference
from tests.support.families import (
    CONFIGS,
    make_model,
    make_target,
    plain_greedy,
    random_drafter,
    random_prompts,
    randomise,
    slow_decay,
)

FAMILIES = [
    "gemma3_text", "gpt_oss", "granite", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2",
    "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3",
]  # fmt: skip
MADE_OF_OTHERS = "qwen3_5_moe_text"  # Qwen3.5's projections, Qwen3-Next's experts
NEW = 12
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "accept": "coupled"}


@cache
def target_of(family: str) -> Target:
    """Norms and biases are drawn too, so that one left out would show."""
    model = make_model(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
                if name.endswith("bias"):
                    parameter.sub_(1.0)
    target = Target(slow_decay(model), name=family)
    probe_target(target)
    return target


def test_every_file_is_tested():
    assert families() == FAMILIES


@pytest.mark.usefixtures("packing_small_weights")
@pytest.mark.parametrize(
    ("family", "batch"),
    [
        ("llama", 1),
        *((each, 3) for each in FAMILIES if each != MADE_OF_OTHERS),
        pytest.param(MADE_OF_OTHERS, 3, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_transformers_and_drafts_the_reference_loops(family, batch):
    target, drafter = target_of(family), random_drafter()
    prompts = random_prompts([9, 1, 14])[:batch]
    expected, counts, blocks = run_reference(target, drafter, prompts, max_new_tokens=NEW)
    engine = make_engine(target, drafter)
    found, own_counts, own_blocks = run_engine(engine, prompts, max_new_tokens=NEW)
    assert found == expected == [plain_greedy(target.model, p, NEW) for p in prompts]
    assert (own_counts.committed, own_counts.cycles) == (counts.committed, counts.cycles)
    # The reference loop drafts less at a sequence's end.
    assert all(any(b[: len(e)] == e for b in own_blocks) for e in blocks)
    expected, _, _ = run_reference(target, drafter, prompts, max_new_tokens=NEW, **SAMPLED)
    assert run_engine(engine, prompts, max_new_tokens=NEW, **SAMPLED)[0] == expected
    assert expected != found


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "mistral", "olmo2", "phi3", "gpt_oss"])
@torch.no_grad()
def test_a_tree_of_tokens_gives_what_each_branch_gives_alone(family):
    """Positions and a mask: two branches after a prompt in one forward."""
    model = load_model(own(target_of(family)), slots=2, capacity=32)
    prompts = torch.tensor(random_prompts([9, 9]))
    slots, starts = torch.tensor([1, 0]), torch.tensor([9, 9])
    model.forward(prompts, AttentionMetadata(slots, torch.zeros_like(starts), 9))
    nodes = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]])
    branches = [[0, 1, 3], [0, 2, 4]]  # of nodes
    mask = torch.eye(5, dtype=torch.bool)
    for branch in branches:
        for depth, node in enumerate(branch):
            mask[node, branch[:depth]] = True
    positions = starts.unsqueeze(1) + torch.tensor([0, 1, 1, 2, 2])
    bits = (mask.long() << torch.arange(5)).sum(dim=-1).expand(2, -1)
    metadata = AttentionMetadata(slots, starts, 5, positions=positions, ancestors=bits)
    found = model.logits(model.forward(nodes, metadata)[0]).view(2, 5, -1)
    for branch in branches:
        states, _ = model.forward(nodes[:, branch], AttentionMetadata(slots, starts, 3))
        expected = model.logits(states).view(2, 3, -1)
        torch.testing.assert_close(found[:, branch], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_keeps_working_and_layers_are_not_held_twice(family):
    target = own(target_of(family))
    ids = torch.tensor([[5, 9, 11, 4]])
    with torch.no_grad():
        before = target.model(ids).logits
        engine = Engine(target, None, capacity=32, pack=False)
        assert torch.equal(target.model(ids).logits, before)
    held = {tensor.untyped_storage().data_ptr() for tensor in target.model.parameters()}
    for weights in engine.target.layers:
        for tensor in vars(weights).values():
            small = tensor is None or tensor.dim() == 1
            assert small or tensor.untyped_storage().data_ptr() in held


@pytest.mark.parametrize(("family", "reason"), [
    ("gemma2", f"it is a Gemma2ForCausalLM; the engine runs {', '.join(FAMILIES)}"),
    ("gpt2", "it is a GPT2LMHeadModel"),
])  # fmt: skip
def test_other_families_are_refused_with_a_reason(family, reason):
    with pytest.raises(TargetError, match=reason):
        Engine(own(make_target(family)), None)


def test_a_subclass_with_a_forward_of_its_own_is_refused():
    class Steered(tf.LlamaForCausalLM):
        pass

    model = Steered(CONFIGS["llama"]()).eval()
    with pytest.raises(TargetError, match="it is a Steered; the engine runs"):
        Engine(Target(model), None)


def test_a_gemma_that_reads_images_too_decodes_text():
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = CONFIGS["gemma3_text"]().to_dict()
    config = tf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90
    )
    config.tie_word_embeddings = False
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
    assert isinstance(model, tf.Gemma3ForConditionalGeneration)
    prompt = random_prompts([9])
    found, _, _ = run_engine(make_engine(Target(model)), prompt, max_new_tokens=NEW)
    assert found == [plain_greedy(model, prompt[0], NEW)]


def replace_experts(model):
    """As loading quantised ones does."""

    class Mxfp4GptOssExperts(torch.nn.Module):
        pass

    model.model.layers[0].mlp.experts = Mxfp4GptOssExperts()


@pytest.mark.parametrize(("family", "change", "reason"), [
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "it scales its embeddings or logits"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "it caps its attention scores"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "its tokens see those after them"),
    ("gemma3_text", {"hidden_activation": "relu"}, "its activation is relu, not silu or gelu"),
    ("gpt_oss", replace_experts, "its experts have a Mxfp4GptOssExperts .quantised"),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic"}}, "positions .dynamic. change"),
])  # fmt: skip
def test_what_a_family_cannot_do_is_refused_by_name(family, change, reason):
    target = own(target_of(family))
    if callable(change):
        change(target.model)
    else:
        for name, value in change.items():
            setattr(target.config, name, value)
        target.logit_softcap = getattr(target.config, "final_logit_softcapping", None)
    with pytest.raises(TargetError, match=reason):
        Engine(target, None)


def biased(**changes):
    """A Llama with biases, each of them large enough to count."""
    config = CONFIGS["llama"]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.5)
    return Target(model)


@pytest.mark.usefixtures("packing_small_weights")
def test_biases_of_attention_count_and_those_of_an_mlp_are_refused():
    with pytest.raises(TargetError, match="its MLP has biases"):
        Engine(biased(mlp_bias=True), None)
    target, prompt = biased(attention_bias=True), random_prompts([7])
    assert target.layers[0].self_attn.o_proj.bias is not None
    engine = make_engine(target, random_drafter())
    found, _, _ = run_engine(engine, prompt, max_new_tokens=NEW)
    assert found == [plain_greedy(target.model, prompt[0], NEW)]
