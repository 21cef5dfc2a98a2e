"""Where kernels find a sequence's tokens: pages of the caches, by a table of each row's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from domino_spec.engine.kernels.runtime import triton_available


def paging(pages: Tensor, states: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for: tokens a page, 0 where each row has a single one.

    `pages` [rows, pages a row] are places in `states` [pages, kv heads, tokens a page, head_dim].
    """
    return {"PAGE": states.shape[-2] if pages.shape[1] > 1 else 0}


if triton_available():
    import triton
    import triton.language as tl

    @triton.jit
    def page_of(
        pages,  # of one row
        place,  # of a token in its sequence, or several
        inside,
        PAGE: tl.constexpr,
    ):
        """(which page holds a token, and where in it); outside the first page."""
        index = place * 0
        if PAGE > 0:
            index = place // PAGE
        return tl.load(pages + index, mask=inside, other=0).to(tl.int64), place - index * PAGE
