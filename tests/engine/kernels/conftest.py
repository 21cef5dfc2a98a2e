"""Without a GPU, kernels run in Triton's interpreter (tests/conftest.py chooses it)."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton; pip install 'domino-spec[dev]'")

from domino_spec.engine.kernels import split_attention
from tests.engine.kernels.interpreter import mend

mend()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take CPU tensors in these tests only."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("DOMINO_KERNELS", "interpret")
        monkeypatch.setattr(split_attention, "MAX_SPLITS", 4)  # programs take their time there


@pytest.fixture
def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
