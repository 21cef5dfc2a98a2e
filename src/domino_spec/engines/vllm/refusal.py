"""What stands for a Domino drafter in a vLLM that the plugin does not know."""

from __future__ import annotations

from typing import Any

import vllm
from torch import nn

from domino_spec.engines.vllm.versions import problem
from domino_spec.errors import CheckpointError


class UnsupportedVersion(nn.Module):
    """Cannot be built: says which versions can serve the drafter."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: ARG002
        raise CheckpointError(problem(vllm.__version__) or "this vLLM is not supported.")

    def forward(self, input_ids: Any, positions: Any) -> Any:
        """Never reached."""
        raise NotImplementedError
