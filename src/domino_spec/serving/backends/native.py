"""Our own server: what it lacks, and what it needs to be installed."""

from __future__ import annotations

import importlib.util

from domino_spec.errors import InputError
from domino_spec.serving.backends.request import ServeRequest, refuse_fields

NAME = "native"
_PACKAGES = ("fastapi", "prometheus_client", "pydantic", "uvicorn")
_LACKING = {
    "tensor_parallel": "it runs on one device; use --backend vllm or sglang, or spread the target "
    "with --device-map",
    "memory_share": "it takes what --slots and --context need; set these",
    "engine_python": "it runs in this Python; drop it",
    "passed_on": "it has no other command line; see domino serve --help for its options",
}


def refuse(request: ServeRequest) -> None:
    """What our own server has not."""
    refuse_fields(request, NAME, _LACKING)


def require_packages() -> None:
    """Say what to install before a large target is loaded."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"the server needs {', '.join(missing)}, which is not installed; run pip install "
            "'domino-spec[serve]'."
        )
