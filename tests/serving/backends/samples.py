"""A value other than the default for every field of a request, and engines that were found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from domino_spec.serving.backends.backend import Installed
from domino_spec.serving.backends.drafts import ServedDraft
from tests.cli import tiny

KEYS = ("sesame-open-1",)
SAMPLES: dict[str, Any] = {
    "target": "org/another",
    "revision": "v2",
    "dtype": "bfloat16",
    "device": "cuda:1",
    "device_map": "auto",
    "attn_implementation": "sdpa",
    "quantize": "int8",
    "trust_remote_code": True,
    "draft": "org/drafter",
    "draft_revision": "v3",
    "shift_label": True,
    "depth": 3,
    "candidates": 4,
    "draft_window": 512,
    "draft_sinks": 16,
    "tree": 7,
    "remeasure": True,
    "speculate": False,
    "thinking": False,
    "pack": False,
    "host": "0.0.0.0",
    "port": 9000,
    "model_name": "mine",
    "api_keys": KEYS,
    "allowed_origins": ("https://chat.example",),
    "strict": True,
    "page": True,
    "slots": 8,
    "context": 2048,
    "max_prompt_tokens": 100,
    "max_new_tokens": 200,
    "max_choices": 3,
    "max_queue": 12,
    "max_body_bytes": 5000,
    "max_image_bytes": 4000,
    "max_image_pixels": 300,
    "drain_seconds": 4.5,
    "tool_call_parser": "hermes",
    "reasoning_parser": "think",
    "tensor_parallel": 2,
    "memory_share": 0.5,
    "engine_python": "/somewhere/python",
    "extra_args": ("--seed", "7"),
}
"""A new field without a line here fails every test that goes through them."""

DRAFT = ServedDraft(folder=Path("/drafts/one"), config=tiny.drafter_config(), is_own=True)


def vllm(version: str = "0.32.0", **changes: Any) -> Installed:
    return Installed(
        **{
            "python": "/env/python",
            "command": "/env/vllm",
            "distribution": "vllm",
            "version": version,
            "has_plugin": True,
            **changes,
        }
    )


def sglang(version: str = "0.5.20", **changes: Any) -> Installed:
    return vllm(version, distribution="sglang", command="/env/sglang", has_plugin=False, **changes)
