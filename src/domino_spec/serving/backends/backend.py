"""An engine in another process: what it takes of our command line, and where it is installed.

Engines pin their own packages, so they often live in an environment of their own. Nothing of them
is imported here: that environment's Python is asked what is installed in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from domino_spec.errors import InputError
from domino_spec.serving.backends.args import (
    CONFIG_OPTION,
    GGUF_SUFFIX,
    ServeArgs,
    refuse_fields,
)

if TYPE_CHECKING:
    from domino_spec.serving.backends.drafts import ServedDraft
    from domino_spec.serving.backends.launch import Launch

_PLUGIN = "domino"
_ASK = """\
import importlib.metadata as metadata, json, sys
found = None
for name in sys.argv[2:]:
    try:
        found = [name, metadata.version(name)]
        break
    except metadata.PackageNotFoundError:
        pass
plugins = [entry.name for entry in metadata.entry_points(group=sys.argv[1])]
print(json.dumps({"found": found, "plugins": plugins}))
"""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An engine that was found."""

    python: str
    command: str
    distribution: str
    version: str
    has_plugin: bool

    @property
    def on_cpu(self) -> bool:
        """Whether this build runs on a CPU."""
        return self.distribution.endswith("-cpu") or "+cpu" in self.version

    def at_least(self, *number: int) -> bool:
        """Whether the version is this one or later; one without numbers is."""
        parts = [part for part in self.version.split(".")[: len(number)] if part.isdecimal()]
        return len(parts) < len(number) or tuple(map(int, parts)) >= number


class Backend(ABC):
    """Another engine: every field of `ServeArgs` is translated by it, or refused by name."""

    name: ClassVar[str]
    title: ClassVar[str]
    distributions: tuple[str, ...]
    """Names under which it is published; the first is also its script's."""
    plugins: ClassVar[str]
    """The entry points by which it finds ours."""
    install: ClassVar[str]
    """What to type for it."""
    newest: ClassVar[str]
    """Whose command line is shown where none is installed."""
    form: ClassVar[str]
    """Of drafters, as `domino export --to` calls it."""
    draft_dtype: ClassVar[str | None] = None
    """None keeps the stored type."""
    architectures: ClassVar[tuple[str, ...]]
    """Names under which it serves a drafter's folder that says everything else right."""
    plugin_reads: ClassVar[bool]
    """Whether our plugin reads drafters, which serves more than the form can express."""
    lacking: ClassVar[Mapping[str, str]]
    """Fields that it has no word for, and what to do instead."""
    keys_in_config: ClassVar[int]
    """The number of keys from which on they are given in a file of options."""

    @abstractmethod
    def check_version(self, version: str) -> list[str]:
        """Refuse a version that cannot serve our drafters; warn of one that was never tried."""

    @abstractmethod
    def command(
        self,
        args: ServeArgs,
        found: Installed,
        draft: ServedDraft | None,
        environment: Mapping[str, str],
    ) -> Launch:
        """The command line, and what goes by the environment or a private file."""

    @abstractmethod
    def warnings(self, args: ServeArgs) -> list[str]:
        """What to know about its safety."""

    def refuse(self, args: ServeArgs) -> None:
        """What it has no word for."""
        shared = {
            "device_map": f"{self.title} spreads a model with --tensor-parallel",
            "attn_implementation": f"pass {self.title}'s own after --, such as -- "
            "--attention-backend NAME",
            "quantize": "it is for our own engine; give a quantised checkpoint",
            "pack": "it is for our own engine on a CPU; drop it",
            "max_prompt_tokens": "--context bounds prompt and answer together",
            "max_body_bytes": "let a proxy before it bound the body",
            "max_image_bytes": "let a proxy before it bound the body",
            "max_image_pixels": "let a proxy before it bound the body",
            "strict": f"{self.title} ignores unknown fields; drop it",
            "tool_call_parser": f"pass {self.title}'s own after --, such as -- --tool-call-parser "
            "NAME",
            "reasoning_parser": f"pass {self.title}'s own after --, such as -- --reasoning-parser "
            "NAME",
        }
        if args.page:
            shared["page"] = "the chat page is the native server's"
        refuse_fields(args, self.name, {**shared, **self.lacking})
        if args.dtype == "fastest":
            raise InputError(
                f"--backend {self.name} has no --dtype fastest, which measures our own engine; "
                "name a type."
            )
        if args.target.endswith(GGUF_SUFFIX):
            raise InputError(
                f"{args.target} is a GGUF file; {self.title} is given a folder or a hub id here. "
                "Serve it with --backend native."
            )
        if args.port == 0:
            raise InputError(
                f"port is 0, and {self.title} does not say which port it took; name one."
            )
        if len(args.api_keys) >= self.keys_in_config and CONFIG_OPTION in args.extra_args:
            raise InputError(
                f"{CONFIG_OPTION} was passed on, but {self.title} reads one such file and is given "
                "the API key in another; set api-key in yours, and none here."
            )


def options(values: Mapping[str, object]) -> list[str]:
    """Words of a command line: None is left out, True is a flag, objects are JSON."""
    words = []
    for name, value in values.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def template_options(args: ServeArgs) -> dict[str, bool] | None:
    """Variables of the chat template, as both engines take them."""
    return None if args.thinking is None else {"enable_thinking": args.thinking}


def gpu_index(args: ServeArgs) -> int | None:
    """The N of cuda:N; None where no one GPU was named."""
    kind, _, index = (args.device or "cuda").partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise InputError(f"device is {args.device!r}; expected cuda or cuda:0, for example.")
    if index and (args.tensor_parallel or 1) > 1:
        raise InputError(
            f"--device {args.device} is one GPU, --tensor-parallel {args.tensor_parallel} wants "
            "more; choose them with CUDA_VISIBLE_DEVICES and drop --device."
        )
    return int(index) if index else None


def find_engine(backend: Backend, python: str | None) -> Installed:
    """The engine next to `python`, or else next to ours, or else on the PATH."""
    how = (
        f"install it with `{backend.install}`, best in an environment of its own, since it pins "
        "its own packages, and name that with --engine-python ENVIRONMENT/bin/python. Or serve "
        "with --backend native, which needs neither."
    )
    if python is not None:
        interpreter = shutil.which(str(Path(python).expanduser()))
        if interpreter is None:
            raise InputError(
                f"--engine-python is {python!r}, which cannot be run; expected the Python next to "
                f"which {backend.title} is installed, such as ENVIRONMENT/bin/python."
            )
        script = str(Path(interpreter).with_name(backend.distributions[0]))
    else:
        ours = str(Path(sys.executable).parent)
        path = os.pathsep.join([ours, os.environ.get("PATH", os.defpath)])
        found = shutil.which(backend.distributions[0], path=path)
        if found is None:
            raise InputError(f"there is no {backend.title} here; {how}")
        interpreter, script = _python_of(Path(found)), found
    command = [interpreter, "-c", _ASK, backend.plugins, *backend.distributions]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        named, plugins = told["found"], told["plugins"]
    except (OSError, subprocess.CalledProcessError, ValueError, KeyError) as error:
        said = getattr(error, "stderr", None) or type(error).__name__
        raise InputError(
            f"{interpreter} could not be asked for {backend.title} "
            f"({said.strip().splitlines()[-1]}); expected a working Python."
        ) from error
    if named is None:
        raise InputError(f"{interpreter} has no {backend.title}; {how}")
    return Installed(
        python=interpreter,
        command=script,
        distribution=named[0],
        version=named[1],
        has_plugin=_PLUGIN in plugins,
    )


def _python_of(script: Path) -> str:
    """The Python of a script that an installer wrote: next to it, or named in its first line."""
    script = script.resolve()
    for name in ("python", "python3"):
        near = script.with_name(name)
        if near.exists():
            return str(near)
    with script.open("rb") as file:
        first = file.readline().decode(errors="replace").strip()
    named = first.removeprefix("#!").split()
    if not first.startswith("#!") or not named:
        raise InputError(
            f"{script} does not tell its Python; name it with --engine-python "
            "ENVIRONMENT/bin/python."
        )
    return named[-1] if Path(named[0]).name == "env" else named[0]
