"""`DominoDraftModel`: another name for SGLang's own draft model."""

from __future__ import annotations

from sglang.srt.models.dflash import DFlashDraftModel


class DominoDraftModel(DFlashDraftModel):  # type: ignore[misc]
    """SGLang's draft model as it is: it holds a Domino head where the config asks for one."""


EntryClass = DominoDraftModel
