"""The most memory that was in use while something ran."""

from __future__ import annotations

from pathlib import Path

import torch

from domino_spec.engine.sizes import graph_bytes

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """On a GPU what torch allocated there and graphs keep, on Linux the process' resident memory.

    Everything loaded counts, other methods' weights too: it is what the run took, here and now.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            return  # the peak is then that of the whole process so far

    def read(self) -> int | None:
        """Bytes since the last reset; None where nobody knows."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) + graph_bytes(self._device)
        try:
            lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return None
        found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(found[0]) * 1024 if found else None
