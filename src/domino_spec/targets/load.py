"""Loads a target and its tokenizer from a folder, a hub id, a GGUF file or an adapter's folder.

A PEFT adapter is merged into its base model, so that the engine can run it. A GGUF file is
converted to a Transformers folder once, which then lies in the cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from domino_spec import __version__
from domino_spec.cache import cache_folder
from domino_spec.errors import Notice, TargetError
from domino_spec.quantization.compiled import compile_ahead
from domino_spec.quantization.memory import give_back_freed
from domino_spec.settings import Quantize
from domino_spec.targets.gguf_config import complete_config
from domino_spec.targets.gguf_metadata import gguf_metadata, gguf_tensors
from domino_spec.targets.place import adapter_base, is_gguf, not_found, require_target
from domino_spec.targets.probe import probe_target
from domino_spec.targets.quantized import (
    check_blocks_options,
    check_family,
    check_quantize,
    load_blocks,
    quantize_model,
)
from domino_spec.targets.support import IMAGE_FAMILIES, check_config, unwrap_adapters
from domino_spec.targets.target import Target
from domino_spec.targets.weight_only import (
    GPU_FAMILIES,
    Scheme,
    check_fp8,
    load_for_cpu,
    load_quantized,
    read_scheme,
    refuse_unread_scheme,
    round_model,
)

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip

DtypeRule = Callable[[Any, torch.device], torch.dtype]
"""Chooses a type from a model's configuration and the device it goes to."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target with the tokenizer found with it."""

    target: Target
    tokenizer: Any | None
    source: str
    revision: str | None
    load_processor: Callable[[], Any] | None = None
    """Makes the processor of a target that takes images."""

    @classmethod
    def of(cls, model: Any) -> LoadedTarget:
        """A model or target the caller has loaded; its tokenizer is the caller's to give."""
        target = model
        if not isinstance(model, Target):
            target = Target(model)
            probe_target(target)
        return cls(target=target, tokenizer=None, source=target.name, revision=None)


def load_target(
    source: str | Path,
    *,
    revision: str | None = None,
    base: str | None = None,
    dtype: torch.dtype | str | DtypeRule | None = None,
    device: str | torch.device | None = None,
    device_map: Any | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
) -> LoadedTarget:
    """Load, refuse what cannot be a target, and probe what can.

    The type defaults to the checkpoint's own on an accelerator (a GGUF file's, whose weights have
    fewer bits than that, to bfloat16) and to float32 on a CPU, where half precision is slow on
    most machines. Foreign code runs only with `trust_remote_code`.

    `base` is the base model of an adapter whose folder does not say where it is; `revision` is
    then that model's.

    `quantize` keeps matrices in few bits. On a CPU "keep" runs a GGUF file's own blocks, "int8" and
    "int4" round any to such blocks, and everything else of such a target is float32. On CUDA
    "int8", "int4" and "fp8" round the layers' weights, and everything else keeps its type.

    An AWQ, GPTQ or FP8 checkpoint of a family of the engine runs as it is on CUDA, and in GGUF's
    blocks on a CPU; no other package is needed.
    """
    is_adapter = adapter_base(source, base=base) is not None
    origin: dict[str, Any] = {
        "revision": revision, "base": base, "trust_remote_code": trust_remote_code,
        "weights": quantize != "keep",
    }  # fmt: skip
    device = _checked_device(device) if device is not None else default_device()
    check_quantize(
        quantize, source, device=device, dtype=dtype, device_map=device_map,
        attn_implementation=attn_implementation, is_gguf=is_gguf(source), is_adapter=is_adapter,
    )  # fmt: skip
    if quantize is not None and device.type == "cpu":
        compile_ahead()
    config = load_config(source, **origin)
    check_config(config, str(source))
    scheme = None
    if not is_adapter and device_map is None:
        scheme = read_scheme(config, str(source), device)
    rounds_for_gpu = quantize is not None and device.type == "cuda"
    if quantize is not None:
        on_gpu = GPU_FAMILIES if rounds_for_gpu else None
        check_family(config, source, quantize, families=on_gpu)
        check_fp8(quantize, str(source), device)
    if quantize == "keep":
        model = _attempt(source, load_blocks, Path(source), config=config)
    elif scheme is not None:
        model = _load_quantized(
            source, config, scheme, origin, dtype=dtype, device=device,
            attn_implementation=attn_implementation,
        )  # fmt: skip
    else:
        rounded_dtype = "auto" if quantize is not None and not rounds_for_gpu else dtype
        model = _load_model(
            source, config, origin, dtype=rounded_dtype, device=device,
            device_map=device_map, attn_implementation=attn_implementation, stays=rounds_for_gpu,
        )  # fmt: skip
        if is_adapter:
            model = _merged(source, model)
        if quantize is not None:
            name = str(source)
            if rounds_for_gpu:
                model = round_model(model, quantize, name, device)
            else:
                model = quantize_model(model, quantize, name)
    target = Target(model, name=str(source))
    probe_target(target)
    loaded = LoadedTarget(
        target=target,
        tokenizer=load_tokenizer(source, **origin),
        source=str(source),
        revision=resolved_revision(source, revision),
        load_processor=partial(load_processor, source, **origin),
    )
    give_back_freed()  # what putting weights in order and reading a vocabulary left
    return loaded


def _load_quantized(
    source: str | Path,
    config: Any,
    scheme: Scheme,
    origin: Mapping[str, Any],
    *,
    dtype: torch.dtype | str | DtypeRule | None,
    device: torch.device,
    attn_implementation: str | None,
) -> Any:
    """An AWQ, GPTQ or FP8 checkpoint: on CUDA as it is, on a CPU in blocks."""
    name, origin = str(source), dict(origin)
    place, common = _place(source, **origin)
    if device.type == "cpu":
        compile_ahead()
        told = f"{name} is {scheme.words}, which a CPU runs in blocks,"
        check_blocks_options(told, dtype=dtype, attn_implementation=attn_implementation)
        return _attempt(
            source, load_for_cpu, place, config=config, scheme=scheme, name=name, options=common
        )
    if callable(dtype):
        dtype = dtype(config, device)
    wanted = _resolved_dtype(dtype, source, device)
    if not isinstance(wanted, torch.dtype):  # the checkpoint's own
        stored = getattr(config.get_text_config(), "dtype", None)
        wanted = stored if isinstance(stored, torch.dtype) else torch.bfloat16
    return _attempt(
        source, load_quantized, place, config=config, scheme=scheme, name=name, options=common,
        device=device, dtype=wanted, attn_implementation=attn_implementation,
    )  # fmt: skip


def _load_model(
    source: str | Path,
    config: Any,
    origin: Mapping[str, Any],
    *,
    dtype: torch.dtype | str | DtypeRule | None,
    device: torch.device,
    device_map: Any | None,
    attn_implementation: str | None,
    stays: bool = False,  # on the CPU, to be brought to the device weight by weight
) -> Any:
    """Transformers' model with its weights, each a tensor of its own."""
    if callable(dtype):
        dtype = dtype(config, device)
    options: dict[str, Any] = {
        "dtype": _resolved_dtype(dtype, source, device),
        "device_map": device_map,
        "attn_implementation": attn_implementation,
        "config": config,
        "output_loading_info": True,
    }
    place, common = _place(source, **origin)
    given = {key: value for key, value in options.items() if value is not None}
    try:
        model, loading = _attempt(
            source, _model_class(config).from_pretrained, place, **common, **given
        )
    except TargetError as error:
        if isinstance(error.__cause__, ImportError):
            refuse_unread_scheme(config, str(source), device, why=_first_line(error.__cause__))
        raise
    _require_all_weights(source, loading)
    if not stays and device_map is None and not getattr(model, "hf_device_map", None):
        model = model.to(device)
    return model


def _model_class(config: Any) -> Any:
    """A family of images that is no causal LM by name has its lm_head all the same."""
    with_images = config.model_type in IMAGE_FAMILIES
    if with_images and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _merged(adapter: str | Path, model: Any) -> Any:
    """The base model with a PEFT adapter's changes in its own weights."""
    from peft import PeftModel

    # In place: a second copy of a large model would not fit.
    adapted = _attempt(adapter, partial(PeftModel.from_pretrained, model), str(adapter))
    unwrapped = unwrap_adapters(adapted)  # refuses what cannot be merged
    if getattr(model, "hf_quantizer", None) is not None:
        return unwrapped  # merging would round it to the base model's few bits
    return adapted.merge_and_unload()


def load_config(
    source: str | Path,
    *,
    revision: str | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> Any:
    """A model's configuration, without its weights.

    Of a GGUF file all is converted on this occasion, unless its `weights` are not going to be.
    """
    place, common = _place(source, revision, trust_remote_code, base, weights)
    if "gguf_file" in common:
        return _read_gguf_config(Path(place) / common["gguf_file"])
    return _attempt(source, AutoConfig.from_pretrained, place, **common)


def _read_gguf_config(path: Path) -> Any:
    stored = gguf_tensors(path)  # which names what Transformers' reader would fail at
    config = _attempt(path, AutoConfig.from_pretrained, str(path.parent), gguf_file=path.name)
    complete_config(config, path, *stored)
    check_config(config, str(path))
    return config


def load_tokenizer(
    source: str | Path,
    *,
    revision: str | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> Any | None:
    """The tokenizer of a model's folder; None where there is none. An adapter's own comes first."""
    place, common = _place(source, revision, trust_remote_code, base, weights)
    if adapter_base(source, base=base) is not None:
        own = _read_tokenizer(source, str(source), {"trust_remote_code": trust_remote_code})
        if own is not None:
            return own
    return _read_tokenizer(source, place, common)


def load_processor(
    source: str | Path,
    *,
    revision: str | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> Any:
    """Transformers' processor of a vision-language model's folder, for chats with images."""
    place, common = _place(source, revision, trust_remote_code, base, weights)
    try:
        return AutoProcessor.from_pretrained(place, **common)
    except ImportError as error:
        raise TargetError(
            f"the processor of {source} needs a package that is missing: {_first_line(error)} "
            "domino-spec[vision] has what Transformers' processors need."
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TargetError(
            f"the processor of {source} cannot be loaded, so that images cannot be read: "
            f"{_first_line(error)}"
        ) from error


def _read_tokenizer(source: str | Path, place: str, common: Mapping[str, Any]) -> Any | None:
    present = [name for name in _TOKENIZER_FILES if (Path(place) / name).is_file()]
    if Path(place).is_dir() and not present and "gguf_file" not in common:
        return None  # for some models Transformers would make up an empty tokenizer
    try:
        if "gguf_file" in common:
            return _read_gguf_tokenizer(place, common)
        return AutoTokenizer.from_pretrained(place, **common)
    except ImportError as error:
        raise TargetError(
            f"the tokenizer of {source} needs a package that is missing: {_first_line(error)}"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # Transformers fails in many ways where there are no tokenizer files.
        if present:
            raise TargetError(
                f"the tokenizer of {source} ({', '.join(present)}) could not be read: "
                f"{_first_line(error)}"
            ) from error
        return None


def _read_gguf_tokenizer(place: str, common: Mapping[str, Any]) -> Any:
    """With a BOS before every prompt if the file says so, which Transformers does not read."""
    adds_bos = gguf_metadata(Path(place) / common["gguf_file"]).get("tokenizer.ggml.add_bos_token")
    options = {} if adds_bos is None else {"add_bos_token": bool(adds_bos)}
    tokenizer = AutoTokenizer.from_pretrained(place, **common, **options)
    template, bos = tokenizer.chat_template, tokenizer.bos_token
    # Chats are encoded without the tokenizer's own BOS, as most templates write it themselves.
    lacks_bos = isinstance(template, str) and "bos_token" not in template
    if adds_bos and bos and lacks_bos and bos not in template:
        tokenizer.chat_template = "{{ bos_token }}" + template
    return tokenizer


def resolved_revision(source: str | Path, revision: str | None) -> str | None:
    """The commit a hub id was loaded from; for anything local, what the caller said."""
    if Path(source).exists():
        return revision
    found = try_to_load_from_cache(str(source), "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else revision


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise TargetError(
            f"device is {device!r}; expected cpu, cuda, cuda:1, mps and the like."
        ) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise TargetError(f"device is {device!r} but torch finds no CUDA GPU here; use cpu.")
    return found


def _resolved_dtype(
    dtype: torch.dtype | str | None, source: str | Path, device: torch.device
) -> torch.dtype | str:
    if dtype is None:
        dtype = "auto" if device.type != "cpu" else torch.float32
    if dtype == "auto":  # conversions are kept in float32, which is no type that the file asks for
        return torch.bfloat16 if is_gguf(source) else "auto"
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise TargetError(
            f"dtype is {dtype!r}; expected auto, float32, bfloat16, float16 or a torch dtype."
        )
    return found


def _place(
    source: str | Path,
    revision: str | None,
    trust_remote_code: bool,
    base: str | None = None,
    weights: bool = True,
) -> tuple[str, dict[str, Any]]:
    """What Transformers' loaders take: a folder or id, and options; an adapter's is its base's."""
    require_target(source, revision=revision, base=base)
    source = adapter_base(source, base=base) or source
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        options["revision"] = revision
    if not is_gguf(source):
        return str(source), options
    path = Path(source)
    if weights:
        folder = converted(path, partial(_convert_gguf, path))
    else:
        folder = converted(path, partial(_convert_metadata, path), weights=False)
    if folder is not None:
        return str(folder), options
    return str(path.parent), {**options, "gguf_file": path.name}


_converting = threading.Lock()


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Transformers reads the file for the config, the weights and the tokenizer, seconds each, and
    makes the table of tensor names anew for every module."""
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc] # it has no types
        """Reads a plain array: each look at a memory map makes another, which takes far longer."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    with _converting:
        kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
        gguf.GGUFReader = cache(Reader)
        gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
        try:
            yield
        finally:
            for name, make in kept.items():
                setattr(gguf, name, make)


@_gguf_read_once()
def _convert_gguf(path: Path, folder: Path) -> None:
    """Write a GGUF file as a folder of float32 weights, as Transformers unpacks them.

    Any other type is rounded from float32 there too, so that one folder serves them all.
    """
    place, options = str(path.parent), {"gguf_file": path.name}
    config = _read_gguf_config(path)
    # Without it a machine with GGUF kernels would keep the weights packed.
    unpacking = getattr(transformers, "GgufConfig", None)
    if unpacking is not None:
        options["quantization_config"] = unpacking(dequantize=True)
    model, loading = _attempt(
        path,
        AutoModelForCausalLM.from_pretrained,
        place,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        **options,
    )
    _require_all_weights(path, loading)
    model.hf_quantizer = None  # the weights are plain now, but it would not let them be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    _save_tokenizer(path, folder)
    del model
    give_back_freed()


@_gguf_read_once()
def _convert_metadata(path: Path, folder: Path) -> None:
    """Write a GGUF file's configuration and tokenizer alone."""
    _read_gguf_config(path).save_pretrained(folder)
    _save_tokenizer(path, folder)


def _save_tokenizer(path: Path, folder: Path) -> None:
    tokenizer = _read_tokenizer(path, str(path.parent), {"gguf_file": path.name})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _require_all_weights(source: str | Path, loading: Mapping[str, Any]) -> None:
    """Transformers fills weights it does not find with random ones and goes on."""
    absent = sorted(loading.get("missing_keys") or ())
    wrong = sorted(str(entry) for entry in loading.get("mismatched_keys") or ())
    if absent or wrong:
        named = ", ".join((absent + wrong)[:5])
        raise TargetError(
            f"{source} lacks {len(absent)} weights of its model and has {len(wrong)} of another "
            f"shape ({named}{', ...' if len(absent) + len(wrong) > 5 else ''}); expected all of "
            "them. Download it again or check its config.json."
        )


def _attempt(source: str | Path, load: Any, place: str | Path, **options: Any) -> Any:
    try:
        return load(place, **options)
    except (torch.OutOfMemoryError, TargetError):
        raise
    except (OSError, ValueError, ImportError, LookupError, AttributeError, RuntimeError) as error:
        raise _why(source, error) from error


def _why(source: str | Path, error: Exception) -> TargetError:
    first = _first_line(error)
    if "trust_remote_code" in str(error):
        return TargetError(
            f"{source} brings its own modelling code, which is not run unless asked for; read it, "
            "then pass trust_remote_code=True (--trust-remote-code)."
        )
    if isinstance(error, OSError) and not Path(source).exists():
        return not_found(source, first)
    return TargetError(f"{source} could not be loaded as a causal language model: {first}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# GGUF conversions, kept ------------------------------------------------------------------

_CONVERTER = 3  # raised when the same file is converted to something else
_MANIFEST = "conversion.json"
_SAMPLE = 1 << 20
_ABANDONED_AFTER = 24 * 3600.0
_not_kept: set[Path] = set()


class ConversionNotice(Notice):
    """A GGUF file is converted, or its conversion cannot be kept."""


def converted(path: Path, convert: Callable[[Path], None], *, weights: bool = True) -> Path | None:
    """The folder that `convert` made of a GGUF file, now or at an earlier start.

    None where the cache cannot be written. Several processes may convert at once: each writes a
    folder of its own, and the first to finish gives the entry its name. Without `weights` that is
    the configuration and the tokenizer alone, of which a whole conversion has both.
    """
    entry = _entry(path)
    if _is_whole(entry):
        return entry
    if not weights:
        entry = _entry(path, weights=False)
        if _is_whole(entry):
            return entry
    if entry in _not_kept:
        return None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    except OSError as error:
        _tell_not_kept(path, entry, error)
        return None
    if weights:
        _tell(f"converting {path.name} for Transformers: done once, then kept in {entry.parent}.")
    try:
        convert(staging)
        digests = {file.name: _digest(file) for file in staging.iterdir()}
        (staging / _MANIFEST).write_text(json.dumps(digests), encoding="utf-8")
        _give_name(staging, entry)
    except (OSError, SafetensorError) as error:
        _tell_not_kept(path, entry, error)
        return None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _remove_outdated(entry)
    return entry


def _entry(path: Path, *, weights: bool = True) -> Path:
    """Named after the file, its path, its contents and what converts it."""
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    contents = hashlib.sha256(f"{path.stat().st_mtime_ns} {_digest(path)}".encode()).hexdigest()
    converter = f"{version('transformers')} {__version__} {_CONVERTER}"
    converter += "" if weights else " metadata"
    by = hashlib.sha256(converter.encode()).hexdigest()[:8]
    return cache_folder() / "gguf" / f"{path.stem}-{place}-{contents[:16]}-{by}"


def _digest(path: Path) -> str:
    """Of a file's size, its head and its tail: whole files would take as long as loading them."""
    size = path.stat().st_size
    seen = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        seen.update(file.read(_SAMPLE))
        file.seek(max(0, size - _SAMPLE))
        seen.update(file.read(_SAMPLE))
    return seen.hexdigest()


def _is_whole(entry: Path) -> bool:
    """Whether every file is as it was written; entries appear whole, but disks get cleaned up."""
    try:
        digests = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return all(_digest(entry / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _give_name(staging: Path, entry: Path) -> None:
    """Rename, unless another process was first; a damaged entry makes way."""
    if _is_whole(entry):
        return
    if entry.exists():
        damaged = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        entry.rename(damaged / entry.name)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        staging.rename(entry)
    except OSError:
        if not _is_whole(entry):
            raise


def _remove_outdated(entry: Path) -> None:
    """Conversions of what the file held before, and what killed processes left."""
    file, contents, _ = entry.name.rsplit("-", 2)
    for other in entry.parent.iterdir():
        outdated = other.name.startswith(f"{file}-") and f"-{contents}-" not in other.name
        if other.name.startswith(f".{file}-"):
            outdated = _age(other) > _ABANDONED_AFTER
        if outdated:
            shutil.rmtree(other, ignore_errors=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _tell_not_kept(path: Path, entry: Path, error: Exception) -> None:
    _not_kept.add(entry)
    reason = getattr(error, "strerror", None) or str(error)
    _tell(
        f"the conversion of {path.name} cannot be kept in {entry.parent} ({reason}), so every "
        "start repeats it; make room there, or set DOMINO_CACHE to another folder."
    )


def _tell(message: str) -> None:
    warnings.warn(message, ConversionNotice, stacklevel=2)
