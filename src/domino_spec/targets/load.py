"""Loads a target and its tokenizer from a folder, a hub id or a GGUF file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from domino_spec.errors import TargetError
from domino_spec.targets.probe import probe_target
from domino_spec.targets.support import check_config
from domino_spec.targets.target import Target


@dataclass(frozen=True)
class LoadedTarget:
    """A target with the tokenizer found beside it."""

    target: Target
    tokenizer: Any | None
    source: str
    revision: str | None


def load_target(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    device_map: Any | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedTarget:
    """Load, refuse what cannot be a target, and probe what can.

    The type defaults to the checkpoint's own on an accelerator and to float32 on a CPU, where
    half precision is slow on most machines. Foreign code runs only with `trust_remote_code`.
    """
    place, files = _place(source)
    device = torch.device(device) if device is not None else default_device()
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code, **files}
    common = {key: value for key, value in common.items() if value is not None}
    config = _attempt(source, AutoConfig.from_pretrained, place, **common)
    check_config(config, str(source))
    options: dict[str, Any] = {
        "dtype": dtype or ("auto" if device.type != "cpu" else torch.float32)
    }
    if device_map is not None:
        options["device_map"] = device_map
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    model = _attempt(source, AutoModelForCausalLM.from_pretrained, place, **common, **options)
    if device_map is None and not getattr(model, "hf_device_map", None):
        model = model.to(device)
    target = Target(model, name=str(source))
    probe_target(target)
    return LoadedTarget(
        target=target,
        tokenizer=load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code),
        source=str(source),
        revision=_resolved_revision(str(source), revision),
    )


def load_tokenizer(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any | None:
    """The tokenizer beside a model; None where there is none."""
    place, files = _place(source)
    options: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        **files,
    }
    options = {key: value for key, value in options.items() if value is not None}
    try:
        return AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        # Transformers fails in many ways on a folder without tokenizer files.
        return None


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def _resolved_revision(source: str, revision: str | None) -> str | None:
    """The commit a hub id was loaded from; for anything local, what the caller said."""
    if Path(source).exists():
        return revision
    found = try_to_load_from_cache(source, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else revision


def _place(source: str | Path) -> tuple[str, dict[str, Any]]:
    """Split a GGUF file into folder and file name; leave anything else as it is."""
    path = Path(source)
    if path.suffix.lower() != ".gguf":
        return str(source), {}
    if not path.is_file():
        raise TargetError(f"there is no GGUF file at {source}; give the path of an existing one.")
    if importlib.util.find_spec("gguf") is None:
        raise TargetError(
            f"reading {path.name} needs the gguf package; pip install 'domino-spec[gguf]'."
        )
    return str(path.parent), {"gguf_file": path.name}


def _attempt(source: str | Path, load: Any, place: str, **options: Any) -> Any:
    try:
        return load(place, **options)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise TargetError(_why(source, error)) from error


def _why(source: str | Path, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "trust_remote_code" in str(error):
        return (
            f"{source} brings its own modelling code, which is not run unless asked for; read it, "
            "then pass trust_remote_code=True (--trust-remote-code)."
        )
    if isinstance(error, OSError) and not Path(source).exists():
        return (
            f"no model at {source!s}: it is neither a local folder or GGUF file nor a model that "
            f"the hub or its local cache could give ({first}). Check the name, or download it "
            "first."
        )
    return f"{source} could not be loaded as a causal language model: {first}"
