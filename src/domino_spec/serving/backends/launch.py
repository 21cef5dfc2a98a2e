"""A server as a command line: what is run, what it is told in private, how it is shown."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HIDDEN = "***"
CONFIG_OPTION = "--config"
_SECRET_OPTION = re.compile(r"--\S*(api[-_]key|hf[-_]token|password)")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process: its arguments, and what its environment has besides ours."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options told in a file that only we can read: whoever lists processes sees argv."""
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
