"""Trained drafters: what all kinds share, and the block draft model of backbone and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from domino_spec.drafter.backbone import Backbone, KeyValue, RotaryPositions, initialise_layers
from domino_spec.drafter.config import DrafterConfig, ModuleConfig
from domino_spec.drafter.heads import build_head
from domino_spec.errors import ConfigError


class TargetVocabulary(Protocol):
    """What a drafter borrows from its target: the embedding and the lm_head."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings as the target's first layer sees them, [..., hidden]."""

    def logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits as the target itself would report them, for all or only these tokens."""


class DraftModule(nn.Module, ABC):
    """A trained drafter of any kind. Embedding and lm_head are the target's."""

    config: DrafterConfig | ModuleConfig
    draft_tokens: Tensor | None

    def __init__(self, config: Any, draft_tokens: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        size = config.draft_vocab_size
        if size is not None and draft_tokens is None:
            draft_tokens = torch.arange(size)
        if draft_tokens is not None:
            check_draft_tokens(draft_tokens, size=size, vocab_size=config.vocab_size)
        # Target id of each token of a reduced vocabulary, [draft vocabulary].
        self.register_buffer("draft_tokens", draft_tokens)

    @classmethod
    def fresh(cls, config: Any, *, seed: int, draft_tokens: Tensor | None = None) -> Self:
        """A drafter to train."""
        with torch.random.fork_rng(devices=[]):  # building draws numbers that are not used
            drafter = cls(config, draft_tokens)
        drafter.initialise(torch.Generator().manual_seed(seed))
        return drafter

    @abstractmethod
    def initialise(self, generator: torch.Generator) -> None:
        """Weights to start training from."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states it reads."""
        return self.config.target_layer_ids

    @property
    def reads(self) -> dict[str, str]:
        """Matrices that read the target's own states, and which: captured, embedding, hidden."""
        return {}

    @property
    def output_norm(self) -> Tensor | None:
        """The weight of the norm before the lm_head, where it has one of its own."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' type."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the drafter lives."""
        return next(self.parameters()).device

    def compute_buffers(self, device: torch.device) -> None:
        """Make again what is computed and not stored; most have nothing of the kind."""

    def embed(self, target: TargetVocabulary, tokens: Tensor) -> Tensor:
        """Target embeddings in the drafter's own type and place."""
        return target.embed(tokens).to(self.device, self.dtype)

    def base_logits(self, target: TargetVocabulary, hidden: Tensor) -> Tensor:
        """What hidden states say of the next token, [..., output vocabulary]."""
        return target.logits(hidden, self.draft_tokens).to(self.device)


class DraftModel(DraftModule):
    """Proposes the tokens after an anchor from the target's captured hidden states before it."""

    config: DrafterConfig

    def __init__(self, config: DrafterConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        self.backbone = Backbone(config)
        self.head = (
            build_head(
                config.head,
                hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                output_vocab_size=config.output_vocab_size,
            )
            if config.head
            else None
        )

    @classmethod
    def untrained(cls, config: DrafterConfig, *, seed: int = 0) -> DraftModel:
        """Random weights: exact to decode with, since decoding is lossless, but no faster."""
        drafter = cls(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
        return drafter.eval()

    def initialise(self, generator: torch.Generator) -> None:
        """The head leaves the base logits as they are until it has learnt."""
        initialise_layers(self.backbone, generator, layers=self.config.num_layers)
        if self.head is not None:
            self.head.initialise(generator)

    @property
    def reads(self) -> dict[str, str]:
        found = {"backbone.fc.weight": "captured"}
        if self.head is not None:
            found |= {f"head.{name}": states for name, states in self.head.reads.items()}
        return found

    @property
    def output_norm(self) -> Tensor:
        return self.backbone.norm.weight

    def compute_buffers(self, device: torch.device) -> None:
        """The rotary frequencies, which the meta device left without values."""
        self.backbone.rotary = RotaryPositions(self.config).to(device)

    # Blocks ---------------------------------------------------------------------------------

    def context(self, captured: Tensor, positions: Tensor) -> list[KeyValue]:
        """Context keys and values for hidden states [batch, n, captured layers * hidden]."""
        return self.backbone.context(captured.to(self.device, self.dtype), positions)

    def draft_hidden(
        self,
        target: TargetVocabulary,
        *,
        anchor_tokens: Tensor,  # [batch, anchors]
        anchors: Tensor,  # [batch, anchors]: absolute positions
        context: list[KeyValue],
        context_positions: Tensor,  # [batch, context]
        anchor_documents: Tensor | None = None,
        context_documents: Tensor | None = None,
    ) -> Tensor:
        """Hidden state of each draft, [batch, anchors, max_depth, hidden].

        The one forward of training: many anchors over a whole sequence.
        """
        config = self.config
        batch, count = anchors.shape
        tokens = torch.full(
            (batch, count, config.block_size),
            config.mask_token_id,
            dtype=torch.long,
            device=anchors.device,
        )
        tokens[:, :, 0] = anchor_tokens
        hidden: Tensor = self.backbone(
            self.embed(target, tokens.flatten(1)),
            anchors=anchors,
            context=context,
            context_positions=context_positions,
            anchor_documents=anchor_documents,
            context_documents=context_documents,
        )
        slots = hidden.view(batch, count, config.block_size, -1)
        return slots[:, :, config.first_slot :]

    # Training -------------------------------------------------------------------------------

    def forward(
        self,
        target: TargetVocabulary,
        *,
        captured: Tensor,  # [batch, n, captured layers * hidden]
        tokens: Tensor,  # [batch, n]
        anchors: Tensor,  # [batch, anchors]: indices into the sequence
        positions: Tensor | None = None,  # [batch, n]: restart with each packed document
        documents: Tensor | None = None,  # [batch, n]
    ) -> tuple[Tensor, Tensor]:
        """Base and final logits of every draft of every block, teacher forced.

        Both are [batch, anchors, max_depth, output vocabulary]; draft j of anchor a predicts
        tokens[a + 1 + j]. Without a head the two are the same tensor.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.block_hidden(
            target,
            captured=captured,
            tokens=tokens,
            anchors=anchors,
            positions=positions,
            documents=documents,
        )
        base = self.base_logits(target, hidden)
        if self.head is None:
            return base, base
        states = self.prefix_states(target, tokens, anchors)
        corrected = base + self.head.correction(self.head.project_hidden(hidden), states)
        prefix = self.head.prefix_len
        return base, torch.cat((base[:, :, :prefix], corrected[:, :, prefix:]), dim=2)

    def block_hidden(
        self,
        target: TargetVocabulary,
        *,
        captured: Tensor,
        tokens: Tensor,
        anchors: Tensor,
        positions: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        """Hidden states of each draft of blocks in known sequences, shaped as `draft_hidden`'s.

        Anchors are indices into the sequence; `documents` are given where rows pack several.
        """
        return self.draft_hidden(
            target,
            anchor_tokens=tokens.gather(1, anchors),
            anchors=positions.gather(1, anchors),
            context=self.context(captured, positions),
            context_positions=positions,
            anchor_documents=None if documents is None else documents.gather(1, anchors),
            context_documents=documents,
        )

    def prefix_states(self, target: TargetVocabulary, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Head states over the true prefix of each draft, [batch, anchors, max_depth, state]."""
        assert self.head is not None
        depth = self.config.max_depth
        offsets = torch.arange(depth, device=anchors.device)
        # A block that runs over the end repeats the last token; such drafts have no label.
        index = (anchors.unsqueeze(-1) + offsets).clamp(max=tokens.shape[1] - 1)
        batch, count, _ = index.shape
        prefix = tokens.gather(1, index.flatten(1)).view(batch * count, depth)
        states = self.head.states(prefix, partial(self.embed, target))
        return states.view(batch, count, depth, -1)


def drafter_like(drafter: DraftModule, weights: Mapping[str, Tensor]) -> DraftModule:
    """A drafter on the CPU of the same kind and shape, with these weights."""
    tokens = None if drafter.draft_tokens is None else drafter.draft_tokens.cpu()
    made = type(drafter)(drafter.config, tokens)
    own = dict(made.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
    return made.eval()


def check_draft_tokens(tokens: Tensor, *, size: int | None, vocab_size: int) -> None:
    """Refuse a map of a reduced vocabulary that is not one target id for each of its tokens."""
    if size is None or tokens.shape != (size,):
        raise ConfigError(
            f"draft_tokens has shape {tuple(tokens.shape)}; expected ({size},), "
            "one target id for each token of the reduced vocabulary."
        )
    if tokens.is_meta:
        return
    seen: set[int] = set()
    for index, token in enumerate(tokens.tolist()):
        if not 0 <= token < vocab_size or token in seen:
            what = "a second time" if token in seen else "outside the vocabulary"
            raise ConfigError(
                f"draft_tokens[{index}] is target id {token}, {what}; expected different ids from "
                f"0 to {vocab_size - 1}. Give each draft token a target id of its own."
            )
        seen.add(token)
