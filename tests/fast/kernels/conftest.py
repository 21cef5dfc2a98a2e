"""Without a GPU, kernels run in Triton's interpreter (tests/conftest.py chooses it)."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton; pip install 'domino-spec[dev]'")

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor, scope) -> None:
    """NumPy 2.4 no longer makes an int of the arrays of one element that the interpreter holds."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take CPU tensors in these tests only."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("DOMINO_KERNELS", "interpret")


@pytest.fixture
def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
