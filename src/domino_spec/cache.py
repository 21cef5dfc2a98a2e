"""Where what can be made again is kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLE = "DOMINO_CACHE"


def cache_folder() -> Path:
    """$DOMINO_CACHE, else the user's own cache folder."""
    if os.environ.get(_VARIABLE):
        return Path(os.environ[_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "domino-spec"
