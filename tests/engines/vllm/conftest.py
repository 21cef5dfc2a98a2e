"""SmolLM2 and its released drafter as folders that vLLM can serve, made once."""

from pathlib import Path

import pytest
import torch
from benchmarks.engine_folders import write_draft, write_target

from domino_spec.demo import smollm2


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory) -> Path:
    """The model that the package carries as GGUF, as an ordinary folder in float32."""
    return write_target(smollm2(), tmp_path_factory.mktemp("smollm2"), dtype=torch.float32)


@pytest.fixture(scope="session")
def released_folder(tmp_path_factory) -> Path:
    """The main released drafter, unpacked."""
    folder = tmp_path_factory.mktemp("released")
    name = "released:smollm2-135m-instruct"
    return write_draft(name, folder, method="dflash", dtype=torch.float32)
