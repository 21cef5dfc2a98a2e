"""Each way to compose a layer from kernels gives Transformers' states and logits."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.models import load_model
from domino_spec.targets import Target, probe_target
from domino_spec.targets.target import capturing
from tests.support.families import CONFIGS, random_prompts, randomise

LAYERS = 2  # the last ones, which are of both kinds
FAMILIES = ["gemma3_text", "gpt_oss", "phi3"]


def target_of(family: str, device: torch.device, dtype: torch.dtype) -> Target:
    """With heads as wide as kernels want them, and norms that differ."""
    config = CONFIGS[family]()
    config.head_dim, config.num_hidden_layers = 16, LAYERS
    for name in ("layer_types", "no_rope_layers"):
        if hasattr(config, name):
            setattr(config, name, getattr(config, name)[-LAYERS:])
    config.rope_parameters = {
        name: 2 * value if name.endswith("_factor") and isinstance(value, list) else value
        for name, value in config.rope_parameters.items()
    }  # of heads twice as wide
    model = randomise(AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    target = Target(model.to(device, dtype), name=family)
    probe_target(target)
    return target


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        pytest.param("gemma3_text", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.no_grad()
def test_kernels_give_the_states_of_transformers(family, dtype, device):
    """A prompt that is longer than the window, then a block after it."""
    target = target_of(family, device, dtype)
    tokens = torch.tensor(random_prompts([9 + 3]), device=device)
    with capturing(target.capture_points, range(LAYERS)) as outputs:
        expected = target.model(tokens).logits[0]
    model = load_model(target, slots=2, capacity=32)
    slots, found, captured = torch.tensor([1], device=device), [], []
    for start, count in ((0, 9), (9, 3)):
        metadata = AttentionMetadata(slots, torch.full_like(slots, start), count)
        part = tokens[:, start : start + count]
        states, layers = model.forward(part, metadata, range(LAYERS))
        found.append(model.logits(states))
        captured.append(layers)
    states = torch.cat([outputs[layer][0] for layer in range(LAYERS)], dim=1)
    for mine, theirs in ((torch.cat(found), expected), (torch.cat(captured), states)):
        error = (mine.float() - theirs.float()).norm(dim=1) / theirs.float().norm(dim=1)
        assert error.max() < (1e-4 if dtype == torch.float32 else 0.05)
