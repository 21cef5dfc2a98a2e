"""Where a target is: a wrong place is refused before anything large is imported."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from domino_spec.errors import TargetError

_GGUF_SUFFIX = ".gguf"
_ADAPTER_FILE = "adapter_config.json"
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # some old models have no organisation


def require_target(
    source: str | Path, *, revision: str | None = None, base: str | None = None
) -> None:
    """Refuse what is neither on this disk nor, as far as it can be told here, on the hub."""
    if not str(source).strip():
        raise TargetError("the target's name is empty; give a folder, a GGUF file or a hub id.")
    path = Path(source)
    found = adapter_base(source, base=base)
    if found is not None:
        _require_base(source, found, revision)
        return
    if is_gguf(source):
        _require_gguf(path)
    elif path.is_file():
        raise TargetError(
            f"{source} is a file, but not a GGUF one; give a GGUF file, a folder or a hub id."
        )
    elif not path.exists():
        _require_hub_id(str(source), revision)


def is_gguf(source: str | Path) -> bool:
    """Whether a target is one GGUF file."""
    return Path(source).suffix.lower() == _GGUF_SUFFIX


def adapter_base(source: str | Path, *, base: str | None = None) -> str | None:
    """The model that a PEFT adapter's folder is for: `base`, else as it says; None: no adapter."""
    file = Path(source) / _ADAPTER_FILE
    if not file.is_file():
        if base is not None:
            raise TargetError(
                f"base is {base}, but {source} is no adapter: it has no {_ADAPTER_FILE}. Leave "
                "base (--base) out, or give the adapter's folder."
            )
        return None
    try:
        stated = base or json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TargetError(f"{file} cannot be read: {error!r}. Save the adapter again.") from error
    if not isinstance(stated, str) or not stated:
        raise TargetError(f"{file} names no base model; name it with base (--base).")
    return stated


def not_found(source: str | Path, reason: str) -> TargetError:
    """For a target that the hub did not give either."""
    return TargetError(
        f"no model at {source!s}: it is neither a local folder or GGUF file nor a model that "
        f"the hub or its local cache could give ({reason}). Check the name, or download it first."
    )


def _require_base(adapter: str | Path, base: str, revision: str | None) -> None:
    if importlib.util.find_spec("peft") is None:
        raise TargetError(
            f"{adapter} is an adapter, which needs peft to be merged; pip install "
            "'domino-spec[train]', or give a merged model."
        )
    try:
        if adapter_base(base) is not None:
            raise TargetError(f"{base} is an adapter itself")
        require_target(base, revision=revision)
    except TargetError as error:
        raise TargetError(
            f"the base model of the adapter {adapter} cannot be used: {str(error).rstrip('.')}. "
            "Name it with base (--base), or in the adapter's adapter_config.json."
        ) from error


def _require_gguf(path: Path) -> None:
    if not path.is_file():
        raise TargetError(f"there is no GGUF file at {path}; give the path of an existing one.")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(
            f"reading {path.name} needs {' and '.join(missing)}; pip install 'domino-spec[gguf]'."
        )


def _require_hub_id(name: str, revision: str | None) -> None:
    if name.startswith((".", "/", "~")):
        raise TargetError(f"no model at {name}: there is no such folder or file. Check the path.")
    if not _HUB_ID.fullmatch(name):
        raise not_found(name, "hub ids have the form org/name")
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        return
    if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        raise not_found(name, "HF_HUB_OFFLINE is set and the cache has no config.json of it")
