"""SmolLM2 and its released drafter as folders that vLLM can serve, made once."""

import copy
from pathlib import Path

import pytest
import torch
import transformers

from domino_spec.checkpoints import load_drafter, save_drafter
from domino_spec.demo.models import smollm2
from domino_spec.targets import load_target


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory) -> Path:
    """The model that the package carries as GGUF, as an ordinary folder in float32."""
    folder = tmp_path_factory.mktemp("smollm2")
    loaded = load_target(smollm2(), device="cpu", dtype=torch.float32)
    config = copy.deepcopy(loaded.target.model.config)
    del config.quantization_config
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.target.model.state_dict())
    model.float().save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def released_folder(tmp_path_factory) -> Path:
    """The main released drafter, unpacked."""
    checkpoint = load_drafter("released:smollm2-135m-instruct", dtype=torch.float32)
    return save_drafter(
        checkpoint.drafter,
        tmp_path_factory.mktemp("released"),
        dtype=torch.float32,
        provenance=checkpoint.provenance,
    )
