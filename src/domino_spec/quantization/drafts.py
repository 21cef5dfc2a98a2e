"""What a drafter computes besides its layers, over quantised weights, in a call each."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, byref, c_float, c_size_t, c_void_p

import torch
from torch import Tensor

from domino_spec.quantization.compiled import Kernel, address
from domino_spec.quantization.reference import BLOCK
from domino_spec.quantization.stack import Matrix, matrix_of
from domino_spec.quantization.weight import QuantizedWeight

MATRICES = ("embedding", "lm_head", "input", "carried", "hidden", "prefix", "output")
"""The target's two; a GRU's, of tokens and of its state; the correction's, of the backbone's states
and of the GRU's, and what makes logits of it."""


class _Head(Structure):
    _fields_ = [
        *((name, Matrix) for name in MATRICES),
        *((name, c_void_p) for name in ("bias", "tokens")),
        *((name, c_size_t) for name in ("width", "state", "rank", "uncorrected")),
    ]


class DraftRollout:
    """A Domino head's rollout over all output tokens, as the compiled kernel walks it."""

    def __init__(
        self,
        kernel: Kernel,
        matrices: Mapping[str, QuantizedWeight],
        *,
        bias: Tensor | None,  # [output tokens]
        tokens: Tensor | None,  # [output tokens]: their target ids; None: a column is its id
        uncorrected: int,
    ) -> None:
        """The first `uncorrected` drafts are the base logits' own."""
        self._kernel, self._held = kernel, (dict(matrices), bias, tokens)  # which is pointed into
        self._head = _Head(
            *(matrix_of(matrices[name]) for name in MATRICES),
            bias=address(bias), tokens=address(tokens, torch.int64),
            width=matrices["hidden"].shape[1], state=matrices["carried"].shape[1],
            rank=matrices["output"].shape[1], uncorrected=uncorrected,
        )  # fmt: skip
        self._blocks = matrices["lm_head"].shape[0] * matrices["lm_head"].shape[1] // BLOCK

    def run(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        """Drafts [batch, depth] from states [batch, depth, hidden] and the tokens before them."""
        hidden, anchors = hidden.contiguous(), anchors.contiguous()
        drafts = hidden.new_empty(hidden.shape[:2], dtype=torch.int64)
        self._kernel.draft(byref(self._head), hidden, anchors, drafts, blocks=self._blocks)
        return drafts


class _Context(Structure):
    _fields_ = [
        ("project", Matrix), ("kv", Matrix),
        *((name, c_size_t) for name in ("captured", "width", "layers", "kv_heads", "size")),
        ("norm", c_void_p), ("k_norms", c_void_p), ("eps", c_float),
    ]  # fmt: skip


class DraftContext:
    """Captured hidden states on their way into the keys and values of all of a drafter's layers."""

    def __init__(
        self,
        kernel: Kernel,
        project: QuantizedWeight,  # [hidden, captured]
        kv: QuantizedWeight,  # [layers * 2 * kv heads * head_dim, hidden]
        *,
        norm: Tensor,  # [hidden]
        k_norms: Tensor | None,  # [layers, head_dim]
        eps: float,
        layers: int,
        kv_heads: int,
    ) -> None:
        """`norm` is between the two products."""
        self._kernel, self._held = kernel, (project, kv, norm, k_norms)  # which is pointed into
        self._context = _Context(
            matrix_of(project), matrix_of(kv), captured=project.shape[1], width=kv.shape[1],
            layers=layers, kv_heads=kv_heads, size=kv.shape[0] // (2 * layers * kv_heads),
            norm=address(norm), k_norms=address(k_norms), eps=eps,
        )  # fmt: skip
        self._blocks = sum(each.shape[0] * each.shape[1] // BLOCK for each in (project, kv))

    def store(
        self,
        captured: Tensor,  # [tokens, captured]
        cache: tuple[Tensor, Tensor],  # [layers, slots, kv heads, capacity, head_dim]
        rotary: tuple[Tensor, Tensor],  # [positions, head_dim]
        places: Tensor,  # [tokens, 3]
    ) -> None:
        """Their keys and values are in the cache then, as far as it reaches."""
        self._kernel.store(
            byref(self._context), captured.contiguous(), cache, rotary, places, blocks=self._blocks
        )
