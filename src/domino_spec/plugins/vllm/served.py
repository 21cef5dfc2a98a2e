"""A head inside vLLM: its module, its weights, and logits in either vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from domino_spec.checkpoints.packing import CODES
from domino_spec.checkpoints.read import draft_tokens
from domino_spec.checkpoints.tensors import OFFSETS, head_kind, public_names
from domino_spec.drafter import HeadConfig
from domino_spec.drafter.heads import Head, build_head
from domino_spec.drafter.model import TargetVocabulary
from domino_spec.errors import CheckpointError

Weights = Iterable[tuple[str, Tensor]]
Embed = Callable[[Tensor], Tensor]
BaseLogits = Callable[[Tensor], Tensor]


class ServedHead(nn.Module):
    """What `drafter.rollout` needs of a drafter whose backbone vLLM runs.

    The head is replicated on every tensor-parallel rank: it runs N times a step, and cutting it
    would cost a gather each time. Embeddings and base logits come from vLLM, gathered.
    """

    draft_tokens: Tensor | None

    def __init__(
        self,
        config: HeadConfig | None,
        *,
        hidden_size: int,
        vocab_size: int,
        draft_vocab_size: int | None,
        embed: Embed,
        base_logits: BaseLogits,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.head: Head | None = None
        if config is not None:
            self.head = build_head(
                config,
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                output_vocab_size=draft_vocab_size or vocab_size,
            ).requires_grad_(False)
        tokens = None if draft_vocab_size is None else torch.arange(draft_vocab_size)
        self.register_buffer("draft_tokens", tokens)
        self._embed = embed
        self._base_logits = base_logits

    def embed(self, _target: TargetVocabulary, tokens: Tensor) -> Tensor:
        """The target's embeddings."""
        return self._embed(tokens)

    def base_logits(self, _target: TargetVocabulary, hidden: Tensor) -> Tensor:
        """The backbone's own guess over the tokens that can be drafted."""
        flat = self._base_logits(hidden.reshape(-1, hidden.shape[-1]))
        return flat.view(*hidden.shape[:-1], -1)

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: what cannot be drafted is impossible."""
        if self.draft_tokens is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        whole[..., self.draft_tokens] = logits
        return whole

    def take(self, weights: Weights) -> tuple[list[tuple[str, Tensor]], set[str]]:
        """Load the head's tensors; the rest, by public names, and the names of all that came."""
        stored = dict(weights)
        packed = [name for name in stored if name.endswith(CODES)]
        if packed:
            raise CheckpointError(
                f"the drafter is packed ({packed[0]}); vLLM needs plain weights: write them with "
                "`domino export SOURCE OUT --to vllm`."
            )
        names = public_names(stored)
        own = {names[n]: stored[n] for n in stored if head_kind(names[n]) is not None}
        self._load(own)
        self._map({names[n]: stored[n] for n in stored}.get(OFFSETS))
        rest = [(names[n], stored[n]) for n in stored if names[n] not in own]
        return rest, set(names.values())

    def _map(self, offsets: Tensor | None) -> None:
        """Which of the target's tokens can be drafted."""
        if self.draft_tokens is None:
            return
        if offsets is None or len(offsets) != len(self.draft_tokens):
            found = "none" if offsets is None else f"{len(offsets)} entries"
            raise CheckpointError(
                f"the drafter proposes {len(self.draft_tokens)} of the target's {self.vocab_size} "
                f"tokens, so its {OFFSETS} must say which; found {found}. Is it another target's?"
            )
        size = len(self.draft_tokens)
        tokens = draft_tokens(offsets, vocab_size=self.vocab_size, draft_vocab_size=size)
        assert tokens is not None
        self.draft_tokens.copy_(tokens)

    def _load(self, tensors: dict[str, Tensor]) -> None:
        wanted = {} if self.head is None else dict(self.head.named_parameters())
        missing, unknown = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted)
        if missing or unknown:
            raise CheckpointError(
                f"the head lacks {missing or 'nothing'} and brings {unknown or 'nothing'} that it "
                "has no place for; is projector_type in config.json right?"
            )
        for name, parameter in wanted.items():
            if tensors[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(tensors[name].shape)}, config.json says "
                    f"{tuple(parameter.shape)}."
                )
            parameter.data.copy_(tensors[name])
