"""A backend as a child process: planned, shown without its secrets, and run to its end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import IO, Any

from domino_spec.errors import InputError
from domino_spec.serving.backends.args import CONFIG_OPTION, ServeArgs
from domino_spec.serving.backends.backend import Backend, Installed, find_engine
from domino_spec.serving.backends.drafts import ServedDraft, plan_draft

HIDDEN = "***"
_SECRET_OPTION = re.compile(r"--\S*(api[-_]key|hf[-_]token|password)")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BY_SIGNAL = 128


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process: its arguments, and what its environment has besides ours."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options given in a file that only this user can read: lists of processes show argv."""
    prints: tuple[str, ...] = field(default=(), repr=False)
    """Secrets that the engine writes into its own log, where they are to be masked."""

    def shown(self) -> str:
        """As one would type it, with the secrets masked."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        env += [f"{name}={HIDDEN}" for name in self.secret_env]
        told = [] if not self.secret_config else [CONFIG_OPTION, HIDDEN]
        return " ".join([*env, *_masked(self.argv), *told])

    @contextmanager
    def arguments(self) -> Iterator[list[str]]:
        """The arguments as they are run; a private file goes when the process has gone."""
        if not self.secret_config:
            yield list(self.argv)
            return
        with TemporaryDirectory(prefix="domino-serve-") as folder:  # its mode is 0700
            path = Path(folder) / "private.yaml"
            path.touch(mode=0o600)
            path.write_text(json.dumps(dict(self.secret_config)), encoding="utf-8")
            yield [*self.argv, CONFIG_OPTION, str(path)]


def _masked(argv: Iterable[str]) -> Iterator[str]:
    """Quoted for a shell; what follows a secret option, which a user may pass on, is hidden."""
    hiding = False
    for word in argv:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            hiding = _SECRET_OPTION.fullmatch(name) is not None
            yield f"{name}={HIDDEN}" if hiding and equals else shlex.quote(word)
        else:
            yield HIDDEN if hiding else shlex.quote(word)


def plan(
    args: ServeArgs, backend: Backend, *, environment: Mapping[str, str], dry: bool = False
) -> tuple[Launch, ServedDraft | None, list[str]]:
    """What would be run, the drafter's folder that it names, and what to say before.

    `dry` does without the engine and shows its newest command line.
    """
    backend.refuse(args)
    warnings = backend.warnings(args)
    try:
        found = find_engine(backend, args.engine_python)
    except InputError as error:
        if not dry or args.engine_python is not None:
            raise
        found = Installed(
            python="python",
            command=backend.distributions[0],
            distribution=backend.distributions[0],
            version=backend.newest,
            has_plugin=True,
        )
        warnings.append(f"shown as for {backend.title} {found.version}: {error}")
    draft = None
    if args.drafter is not None:
        warnings += backend.check_version(found.version)
        draft = plan_draft(args, backend)
        warnings += draft.warnings
    return backend.command(args, found, draft, environment), draft, warnings


def run(launch: Launch) -> int:
    """Run it to its end and return its exit code, as a shell would.

    The child has a process group of its own: Ctrl-C in a terminal reaches it once, through us.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    with launch.arguments() as arguments:
        before = {number: signal.signal(number, forward) for number in _FORWARDED}
        try:
            try:
                child = subprocess.Popen(
                    arguments,
                    env={**os.environ, **launch.env, **launch.secret_env},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if launch.prints else None,
                    stderr=subprocess.STDOUT if launch.prints else None,
                    process_group=0,
                )
            except OSError as error:
                raise InputError(f"{arguments[0]} cannot be started ({error.strerror}).") from error
            for number in early:
                child.send_signal(number)
            if child.stdout is not None:
                _copy_masked(child.stdout, launch.prints)
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else _BY_SIGNAL - code


def _copy_masked(output: IO[bytes], secrets: Sequence[str]) -> None:
    """Line by line to our own stderr."""
    hidden = [secret.encode() for secret in secrets]
    for line in output:
        for secret in hidden:
            line = line.replace(secret, HIDDEN.encode())
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
