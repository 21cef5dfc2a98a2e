"""llama.cpp as a method of the head-to-head: the same file, token ids and threads, in turns.

It is another implementation, which the package does not depend on: the Python package
`llama-cpp-python`, or `llama-server`, given by its address or started here for the run. What is
measured is llama.cpp's own time: no HTTP, no tokenizer.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from domino_spec.bench.paths import PeakMemory, Prompt, Timed
from domino_spec.bench.settings import LLAMA_CPP, BenchSettings, digest
from domino_spec.data.server import open_url
from domino_spec.decoding import AcceptanceStats, SamplingParams
from domino_spec.decoding.sequence import LENGTH
from domino_spec.drafter.names import LOOKUP, lookup_depth, prefix_of
from domino_spec.errors import InputError
from domino_spec.evaluation.runs import make_sequence
from domino_spec.targets import default_device
from domino_spec.targets.place import is_gguf

_PACKAGE, _DISTRIBUTION, _SERVER = "llama_cpp", "llama-cpp-python", "llama-server"
_OTHER_PROGRAMS = ("llama-cli", "llama-completion")
_DEVICES = ("cpu", "cuda")
_INSTALL = (
    f"pip install {_DISTRIBUTION} (built from source, which takes minutes), put {_SERVER} of a "
    f"llama.cpp release on PATH, or give a server's address: --against {LLAMA_CPP}=http://HOST:PORT"
)
_SETTINGS_VARIABLE = "LLAMA_ARG_"  # llama.cpp's programs take options from such variables too
_LONGEST_MATCH = 3
_SECONDS_TO_START, _SECONDS_TO_STOP, _SECONDS_TO_ANSWER = 120.0, 10.0, 600.0
_SECONDS_BETWEEN_LOOKS = 0.1
_ALL_LAYERS = 999
_LOG_LINES = 3


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What llama.cpp generated, and how long it took by its own clock."""

    output: Sequence[int]
    prefill: float
    """Seconds to the first token."""
    decoding: float
    """Seconds from the first token to the last."""
    accepted: int = 0
    """Drafts among the tokens, where it drafts."""


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """What every form of llama.cpp opens alike."""

    path: Path
    device: torch.device
    threads: int
    capacity: int
    """Tokens of a prompt and its output together."""


class LlamaCpp(ABC):
    """One form of llama.cpp, found and not yet opened."""

    by: str
    """What is called."""
    version: str

    def __init__(self, name: str, *, lookup: int | None) -> None:
        self.name = name
        self.lookup = lookup
        """Drafts a cycle of its prompt lookup; None where it decodes plainly."""
        self._memory: PeakMemory | None = None

    @abstractmethod
    def opened(self, model: OpenedModel) -> AbstractContextManager[None]:
        """Have the model ready to answer."""

    @abstractmethod
    def answer(self, tokens: Sequence[int], count: int) -> Answer:
        """Continue a prompt greedily by `count` tokens, past any end token, nothing cached."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text that spells out its special tokens."""

    def settings(self, threads: int) -> dict[str, Any]:
        """How it is called, for the record."""
        found: dict[str, Any] = {"by": self.by, "version": self.version, "threads": threads}
        return found if self.lookup is None else {**found, "lookup": self.lookup}

    def recorded(self, threads: int) -> dict[str, Any]:
        """A method of a run as plain values."""
        settings = self.settings(threads)
        return {
            "name": self.name,
            "kind": LLAMA_CPP,
            "fingerprint": digest(settings),
            "settings": settings,
            "nbytes": 0,
        }

    def run(self, prompt: Prompt, params: SamplingParams, count: int) -> Timed:
        """Answer one prompt with as many tokens as plain decoding did."""
        if self._memory is not None:
            self._memory.reset()
        answer = self.answer(prompt.tokens, count)
        if len(answer.output) != count:
            raise InputError(
                f"{self.name} ({self.by}) gave {len(answer.output)} tokens for a prompt of "
                f"{len(prompt.tokens)}; expected {count}, as many as plain decoding gave. Its "
                "context may be too short, or its server may limit answers."
            )
        sequence = make_sequence(prompt.number, prompt.tokens, params, eos=())
        sequence.output = list(answer.output)
        sequence.finish_reason = LENGTH
        cycles = max(count - 1 - answer.accepted, 1)
        sequence.stats = AcceptanceStats(cycles=cycles, committed=count - 1)
        return Timed(
            seconds=answer.prefill + answer.decoding,
            prefill=answer.prefill,
            draft=None,
            verify=None,
            cycles=cycles,
            sequences=(sequence,),
            peak_memory=None if self._memory is None else self._memory.read(),
        )


# The Python package -----------------------------------------------------------------------------


class LlamaPackage(LlamaCpp):
    """`llama-cpp-python`, in this process."""

    by = _DISTRIBUTION

    def __init__(self, name: str, *, lookup: int | None, device: torch.device) -> None:
        super().__init__(name, lookup=lookup)
        self._module = importlib.import_module(_PACKAGE)
        self.version = f"{self._module.__version__}{_instructions(self._module)}"
        self._offloads = bool(self._module.llama_supports_gpu_offload())
        if device.type != "cpu" and not self._offloads:
            raise InputError(
                f"{_DISTRIBUTION} {self.version} was built for CPUs alone and the target's device "
                f"is {device}; expected both on one device. Build it with "
                "CMAKE_ARGS=-DGGML_CUDA=on, or add --device cpu."
            )
        self._llama: Any = None
        self._drafts: _CountedDrafts | None = None

    @contextmanager
    def opened(self, model: OpenedModel) -> Iterator[None]:
        """A context of its own over the mapped file."""
        on_gpu = model.device.type != "cpu"
        # llama.cpp's programs take flash attention where they can, the package only when told.
        options: dict[str, Any] = {
            "n_gpu_layers": -1 if on_gpu else 0, "offload_kqv": on_gpu, "flash_attn": True,
        }  # fmt: skip
        if self._offloads and not on_gpu:
            options["op_offload"] = False
        if self.lookup is not None:
            speculative = importlib.import_module(f"{_PACKAGE}.llama_speculative")
            drafts = speculative.LlamaPromptLookupDecoding(
                max_ngram_size=_LONGEST_MATCH, num_pred_tokens=self.lookup
            )
            options["draft_model"] = self._drafts = _CountedDrafts(drafts)
        try:
            self._llama = self._module.Llama(
                model_path=str(model.path),
                n_ctx=model.capacity + (self.lookup or 0),
                n_threads=model.threads,
                n_threads_batch=model.threads,
                verbose=False,
                **options,
            )
        except (ValueError, RuntimeError, AssertionError) as error:
            raise InputError(
                f"{_DISTRIBUTION} {self.version} could not open {model.path.name}: {error}. "
                "Install a version that knows this model."
            ) from error
        self._memory = None if on_gpu else PeakMemory(model.device)
        try:
            yield
        finally:
            with suppress(AttributeError):  # older versions free with the object
                self._llama.close()
            self._llama = None

    def answer(self, tokens: Sequence[int], count: int) -> Answer:
        """Timed here: from the call to the first token, and on to the last."""
        self._llama.reset()  # else it would find the prompt in its cache
        if self._drafts is not None:
            self._drafts.calls = 0
        output: list[int] = []
        start = time.perf_counter()
        first = start
        generated = self._llama.generate(list(tokens), temp=0.0, repeat_penalty=1.0, reset=False)
        for token in generated:
            if not output:
                first = time.perf_counter()
            output.append(int(token))
            if len(output) == count:
                break
        end = time.perf_counter()
        generated.close()
        cycles = count - 1 if self._drafts is None else self._drafts.calls
        return Answer(
            output=output, prefill=first - start, decoding=end - first, accepted=count - 1 - cycles
        )

    def tokenize(self, text: str) -> list[int]:
        """By the tokenizer in the file."""
        found = self._llama.tokenize(text.encode(), add_bos=False, special=True)
        return [int(token) for token in found]


class _CountedDrafts:
    """A draft model that is asked once a cycle."""

    def __init__(self, drafts: Any) -> None:
        self._drafts = drafts
        self.calls = 0

    def __call__(self, input_ids: Any, /, **options: Any) -> Any:
        self.calls += 1
        return self._drafts(input_ids, **options)


# The server -------------------------------------------------------------------------------------


class LlamaServer(LlamaCpp):
    """`llama-server` at an address, with the threads that it was started with."""

    by = f"{_SERVER} at an address"

    def __init__(self, name: str, address: str, *, target: str) -> None:
        super().__init__(name, lookup=None)
        self._address = address.rstrip("/").removesuffix("/v1")
        properties = self._ask("/props")
        self.version = str(properties.get("build_info", "unknown"))
        serves = str(properties.get("model_path", ""))
        if Path(serves).name != Path(target).name:
            raise InputError(
                f"{self._address} serves {Path(serves).name or 'an unnamed model'}; expected "
                f"{Path(target).name}, the target's file. Start {_SERVER} with --model {target}."
            )
        settings = properties.get("default_generation_settings", {})
        self._context = settings.get("n_ctx")

    def settings(self, threads: int) -> dict[str, Any]:
        """Its threads are its own: it does not tell them."""
        return {**super().settings(threads), "threads": "its own"}

    @contextmanager
    def opened(self, model: OpenedModel) -> Iterator[None]:
        """It runs already; its context must hold the longest prompt with its answer."""
        needed = model.capacity
        if self._context is not None and self._context < needed:
            raise InputError(
                f"{self._address} has a context of {self._context} tokens; expected {needed} or "
                f"more for the longest prompt and its answer. Start it with --ctx-size {needed}, "
                "or ask for fewer with --max-new-tokens."
            )
        yield

    def answer(self, tokens: Sequence[int], count: int) -> Answer:
        """By the server's own clock."""
        reply = self._ask("/completion", {
            "prompt": list(tokens), "n_predict": count, "temperature": 0.0, "top_k": 1,
            "samplers": ["top_k"], "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True, "stream": False,
        })  # fmt: skip
        try:
            times = reply["timings"]
            output = [int(token) for token in reply["tokens"]]
            read = int(times["prompt_n"])
            prefill, decoding = float(times["prompt_ms"]), float(times["predicted_ms"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self._address}/completion answered with {json.dumps(reply)[:120]}; expected "
                f"tokens and timings of {_SERVER}. Take a version from 2025 or later."
            ) from error
        if read != len(tokens):
            raise InputError(
                f"{self._address} read {read} tokens of a prompt of {len(tokens)}; expected all of "
                "them, and no others, each time. Its prompt cache must be off for requests with "
                "cache_prompt false."
            )
        return Answer(
            output=output,
            prefill=prefill / 1e3,
            decoding=decoding / 1e3,
            accepted=int(times.get("draft_n_accepted", 0)),
        )

    def tokenize(self, text: str) -> list[int]:
        """By the tokenizer in the file."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return [int(token) for token in self._ask("/tokenize", body)["tokens"]]

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, data=data, headers=headers)
        try:
            with open_url(request, timeout=_SECONDS_TO_ANSWER) as response:
                reply = json.loads(response.read())
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", errors="replace")[:200]
            raise InputError(
                f"{self._address}{path} answered {error.code} {said}; expected {_SERVER} of "
                "llama.cpp. Check the address."
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise InputError(
                f"no {_SERVER} answers at {self._address}{path} ({reason}); start one: {_SERVER} "
                "--model TARGET.gguf --threads N --port PORT, or leave the address out."
            ) from error
        if not isinstance(reply, dict):
            raise InputError(
                f"{self._address}{path} answered with {type(reply).__name__}; expected an object. "
                f"Is it {_SERVER}?"
            )
        return reply


class StartedServer(LlamaServer):
    """`llama-server` on a free port of this machine, from the first prompt to the last."""

    by = _SERVER

    def __init__(
        self, name: str, program: str, *, lookup: int | None, device: torch.device
    ) -> None:
        LlamaCpp.__init__(self, name, lookup=lookup)
        self._program = program
        self.version = _version(program)
        if device.type != "cpu" and not _has_devices(program):
            raise InputError(
                f"{program} finds no GPU (--list-devices) and the target's device is {device}; "
                "expected both on one device. Install a llama.cpp for this GPU, or add "
                "--device cpu."
            )

    def settings(self, threads: int) -> dict[str, Any]:
        """As many threads as told."""
        return LlamaCpp.settings(self, threads)

    @contextmanager
    def opened(self, model: OpenedModel) -> Iterator[None]:
        """Started now, stopped at the end of the run, however that comes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        command = [
            self._program, "--model", str(model.path), "--host", "127.0.0.1", "--port", str(port),
            "--ctx-size", str(model.capacity + (self.lookup or 0)), "--parallel", "1",
            "--threads", str(model.threads), "--threads-batch", str(model.threads),
        ]  # fmt: skip
        on_cpu = model.device.type == "cpu"
        command += ["--device", "none"] if on_cpu else ["--gpu-layers", str(_ALL_LAYERS)]
        if self.lookup is not None:
            command += [
                "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(_LONGEST_MATCH),
                "--spec-ngram-simple-size-m", str(self.lookup),
            ]  # fmt: skip
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS_VARIABLE)}
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=kept)
            try:
                self._wait(process, log)
                self._memory = PeakMemory(model.device, process=process.pid) if on_cpu else None
                yield
            finally:
                process.terminate()
                try:
                    process.wait(_SECONDS_TO_STOP)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _wait(self, process: subprocess.Popen[bytes], log: Any) -> None:
        """Until the model is loaded."""
        last = time.monotonic() + _SECONDS_TO_START
        while process.poll() is None and time.monotonic() < last:
            with suppress(InputError):
                self._ask("/health")
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        ended = "did not answer in time" if process.poll() is None else "ended"
        log.seek(0)
        lines = log.read().decode("utf-8", errors="replace").strip().splitlines()
        raise InputError(
            f"{self._program} {ended} before it could answer: "
            f"{' / '.join(lines[-_LOG_LINES:]) or 'it said nothing'}. Expected a llama.cpp that "
            f"knows this model and these options; take a newer one."
        )


def _instructions(package: Any) -> str:
    """What it was built to use, without which its speed says little: " with AVX2, FMA"."""
    said = package.llama_print_system_info().decode(errors="replace")
    found = re.findall(r"(\w+) = 1\b", said)
    return f" with {', '.join(found)}" if found else ""


def _version(program: str) -> str:
    """As the program says: the number and the commit of its build."""
    lines = _said(program, "--version").splitlines()
    found = [line for line in lines if line.startswith("version:")]
    return found[0].removeprefix("version:").strip() if found else "unknown"


def _has_devices(program: str) -> bool:
    """Whether it lists a device, such as CUDA0: NVIDIA H200, under its heading."""
    lines = _said(program, "--list-devices").splitlines()
    return any(line.startswith(" ") and ":" in line for line in lines)


def _said(program: str, option: str) -> str:
    try:
        done = subprocess.run(
            [program, option], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(
            f"{program} {option} cannot be run: {error}; expected llama.cpp's {_SERVER}."
        ) from error
    return done.stdout + done.stderr


# Finding it -------------------------------------------------------------------------------------


def find_against(settings: BenchSettings, load: Mapping[str, Any]) -> list[LlamaCpp]:
    """What `--against` names, found before the target is loaded; refuse what cannot be compared."""
    if not settings.against:
        return []
    device_map = load.get("device_map")
    device = torch.device(load.get("device") or default_device())
    if not is_gguf(settings.target):
        raise InputError(
            f"against is {settings.against[0]} and the target is {settings.target}; expected a "
            "GGUF file, which both can run. Give TARGET.gguf, or leave --against out."
        )
    if any(settings.temperature) or any(size > 1 for size in settings.batch_size):
        raise InputError(
            f"against is {settings.against[0]}, which is compared greedily and one prompt at a "
            "time; expected temperature 0 and batch size 1 alone."
        )
    if device.type not in _DEVICES or device_map is not None:
        where = f"on {device}" if device_map is None else f"spread by the device map {device_map}"
        raise InputError(
            f"against is {settings.against[0]} and the target is {where}; expected one CPU or "
            "CUDA device. Give --device cpu or cuda without a device map."
        )
    found = [_find(source, settings.target, device) for source in settings.against]
    names = [each.name for each in found]
    for each, source in zip(found, settings.against, strict=True):
        if names.count(each.name) > 1:
            each.name = source
    twice = sorted({each.name for each in found if [o.name for o in found].count(each.name) > 1})
    if twice:
        raise InputError(f"--against {twice[0]} is given twice; give it once.")
    return found


def _find(source: str, target: str, device: torch.device) -> LlamaCpp:
    name, _, place = source.partition("=")
    base, plus, drafts = name.partition("+")
    if base != LLAMA_CPP or (plus and prefix_of(drafts) != LOOKUP):
        raise InputError(
            f"against is {source!r}; expected {LLAMA_CPP} or {LLAMA_CPP}+lookup[:DEPTH], and after "
            f"it, if need be, where: {LLAMA_CPP}=http://HOST:PORT, {LLAMA_CPP}={_DISTRIBUTION} or "
            f"{LLAMA_CPP}=PATH/TO/{_SERVER}."
        )
    lookup = lookup_depth(drafts) if plus else None
    if place.startswith(("http://", "https://")):
        if lookup is not None:
            raise InputError(
                f"against is {source}; expected {LLAMA_CPP}={place}: how a running server drafts "
                "was set when it was started, and its drafts are counted."
            )
        return LlamaServer(name, place, target=target)
    missing = []
    if place in ("", _PACKAGE, _DISTRIBUTION):
        try:
            return LlamaPackage(name, lookup=lookup, device=device)
        except ModuleNotFoundError as error:
            if error.name != _PACKAGE:
                raise _broken(error) from error
            missing.append(f"the Python package {_PACKAGE} ({_DISTRIBUTION})")
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            raise _broken(error) from error
    if place not in (_PACKAGE, _DISTRIBUTION):
        program = shutil.which(place or _SERVER)
        if program is not None:
            return StartedServer(name, program, lookup=lookup, device=device)
        missing.append(f"the program {place}" if place else f"{_SERVER} on PATH")
    others = [other for other in _OTHER_PROGRAMS if shutil.which(other)] if not place else []
    alone = (
        f" ({others[0]} is on PATH, but only {_SERVER} takes token ids and tells times)"
        if others
        else ""
    )
    raise InputError(
        f"against is {source}, but there is no llama.cpp here; looked for "
        f"{' and '.join(missing)}{alone}. {_INSTALL}."
    )


def _broken(error: Exception) -> InputError:
    return InputError(
        f"{_DISTRIBUTION} is installed but cannot be imported ({error}); expected one that works. "
        f"Install it again, or name another: --against {LLAMA_CPP}={_SERVER}."
    )
