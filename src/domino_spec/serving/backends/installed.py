"""Where an engine is installed, which version it is, and whether our plugin is installed with it.

Engines pin their own packages, so they often live in an environment of their own. Nothing of them
is imported here: that environment's Python is asked what is installed in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from domino_spec.errors import InputError

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
class Engine:
    """What is looked for."""

    title: str
    command: str
    """The script that its package installs."""
    distributions: tuple[str, ...]
    """Names under which it is published, the usual one first."""
    plugins: str
    """The entry points by which it finds ours."""
    install: str
    """What to type for it."""
    problem: Callable[[str], str | None]
    """What is wrong with a version for our drafters."""
    is_refused: Callable[[str], bool]
    """Whether that is the end of it, and not a warning."""


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


def find_engine(engine: Engine, python: str | None) -> Installed:
    """The engine next to `python`, or else next to ours, or else on the PATH."""
    interpreter, command = _place(engine, python)
    named, plugins = _ask(engine, interpreter)
    if named is None:
        raise InputError(f"{interpreter} has no {engine.title}; {_how_to_install(engine)}")
    distribution, version = named
    return Installed(
        python=interpreter,
        command=command,
        distribution=distribution,
        version=version,
        has_plugin=_PLUGIN in plugins,
    )


def check_version(engine: Engine, found: Installed) -> list[str]:
    """Refuse versions that cannot serve our drafters; warn of those that were never tried."""
    wrong = engine.problem(found.version)
    if wrong is None:
        return []
    if engine.is_refused(found.version):
        raise InputError(wrong)
    return [wrong]


def _place(engine: Engine, python: str | None) -> tuple[str, str]:
    if python is not None:
        named = shutil.which(str(Path(python).expanduser()))
        if named is None:
            raise InputError(
                f"--engine-python is {python!r}, which cannot be run; expected the Python next to "
                f"which {engine.title} is installed, such as ENVIRONMENT/bin/python."
            )
        return named, str(Path(named).with_name(engine.command))
    ours = str(Path(sys.executable).parent)
    path = os.pathsep.join([ours, os.environ.get("PATH", os.defpath)])
    script = shutil.which(engine.command, path=path)
    if script is None:
        raise InputError(f"there is no {engine.title} here; {_how_to_install(engine)}")
    return _python_of(Path(script)), script


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


def _ask(engine: Engine, python: str) -> tuple[list[str] | None, list[str]]:
    command = [python, "-c", _ASK, engine.plugins, *engine.distributions]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        return told["found"], told["plugins"]
    except (OSError, subprocess.CalledProcessError, ValueError, KeyError) as error:
        said = getattr(error, "stderr", None) or type(error).__name__
        raise InputError(
            f"{python} could not be asked for {engine.title} ({said.strip().splitlines()[-1]}); "
            "expected a working Python."
        ) from error


def _how_to_install(engine: Engine) -> str:
    return (
        f"install it with `{engine.install}`, best in an environment of its own, since it pins "
        "its own packages, and name that with --engine-python ENVIRONMENT/bin/python. Or serve "
        "with --backend native, which needs neither."
    )
