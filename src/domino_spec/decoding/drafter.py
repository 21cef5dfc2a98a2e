"""The one interface of drafters: update the draft cache, propose. Both loops call it alike."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from domino_spec.checkpoints.provenance import Provenance
from domino_spec.decoding.noise import noised
from domino_spec.decoding.sampling import DraftDistribution, Sampler
from domino_spec.decoding.sequence import Sequence as Decoded
from domino_spec.drafter.masks import Window
from domino_spec.drafter.names import PLAIN
from domino_spec.drafter.tree import MAX_NODES, DraftTree, chain
from domino_spec.errors import InputError

DraftPart = tuple[str, Callable[[], Any], int]
"""A part of drafting, to be timed: its name, how it is run, and the bytes it reads."""


class DraftSampler(Protocol):
    """Chooses drafts as their sequences want them."""

    def choose_drafts(self, logits: Tensor, starts: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The next drafts [batch, n] from logits [batch, n, k].

        `starts` [batch] are the positions of the tokens that the first logits follow. `tokens` [k]
        are the columns' ids, where these are not the whole vocabulary's.
        """

    def tree_scores(
        self, index: int, logits: Tensor, starts: Tensor, tokens: Tensor | None
    ) -> Tensor:
        """What children of a draft tree are ranked by: `drafter.tree.Scores` from `starts` on."""


class Drafter(ABC):
    """Proposes tokens for sequences in slots. Decoding is exact whatever it proposes.

    A drafter is made once and bound to a model for each loop that runs it: the reference loop
    binds it to a `Target`, whose own embedding and lm_head it then calls, the engine to its
    inference model. A bound drafter keeps its state in slots, as the model does.
    """

    kind: str
    name: str
    model: nn.Module | None = None
    """Its trained weights, where it has any."""
    config: Any = None
    """Their configuration."""
    candidates: int | None = None
    """Base candidates that a head chooses among; None means all tokens."""
    window: Window | None = None
    """The context that it reads; None means all."""
    capture_layers: Sequence[int] = ()
    """Target layers whose hidden states it reads; the target's number of layers stands for what
    its lm_head reads."""
    default_depth: int
    """Drafts in a cycle unless another number is asked for."""
    max_depth: int | None = None
    """Drafts it can give in a cycle; None where there is no end."""
    lookahead: int = 0
    """Positions from the anchor on that drafting writes to, besides those of its drafts."""
    depth: int
    """Drafts in a cycle."""
    reads_next: bool = False
    """Whether what it keeps of a token is made from the one after it too."""
    can_branch: bool = False
    """Whether it can draft trees."""
    has_logits: bool = False
    """Whether samplers see the logits of its drafts."""
    nodes: int = 0
    """Drafts of a cycle's tree, which is up to `depth` deep; 0 drafts a chain."""
    provenance: Provenance
    caches: Sequence[Any] = ()
    """What it keeps in slots once it is bound: `SlotCache`s and `SlotStates`."""
    device: torch.device
    """Where the model is that it is bound to."""

    def __init__(self, *, name: str | None = None, provenance: Provenance | None = None) -> None:
        self.name = name or self.kind
        self.provenance = provenance or Provenance()
        self.depth = self.default_depth

    @property
    def drafts(self) -> bool:
        """Whether there is anything to verify: not in plain decoding."""
        return self.kind != PLAIN

    @property
    def parameters(self) -> int:
        """How many numbers it has learnt."""
        return 0 if self.model is None else sum(p.numel() for p in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """What these take."""
        return 0 if self.model is None else sum(p.nbytes for p in self.model.parameters())

    def with_depth(self, depth: int | None) -> Self:
        """The same with so many drafts in a cycle; None leaves the default."""
        other = copy.copy(self)
        other.depth = check_depth(depth, self.default_depth, self.max_depth, what=self.described)
        return other

    def with_tree(self, nodes: int | None) -> Self:
        """The same with trees of so many drafts; None or 0 leaves chains."""
        other = copy.copy(self)
        other.nodes = check_tree(nodes, can_branch=self.can_branch, what=self.described)
        return other

    @property
    def described(self) -> str:
        """What it is, for messages."""
        return f"this {self.kind} drafter" if self.config is None else self.config.described

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "name": self.name,
            "kind": self.kind,
            "depth": self.depth,
            "tree": self.nodes,
            "parameters": self.parameters,
            "config": None if self.config is None else self.config.to_dict(),
        }

    @property
    def cost_key(self) -> list[Any]:
        """Whatever changes what its drafts cost, as plain values."""
        return [None if self.config is None else self.config.to_dict(), self.candidates]

    @property
    def token_width(self) -> int:
        """Numbers of the model's type that it keeps for each token of a sequence."""
        return 0 if self.config is None else int(self.config.token_width)

    def unsupported_reason(self, device: torch.device) -> str | None:  # noqa: ARG002
        """What keeps it off an engine on this device, in words; None if nothing does."""
        return None

    # Bound to a model -----------------------------------------------------------------------

    def bind(self, model: Any, *, pack: bool = False) -> Self:
        """The same drafter over a `Target` or an inference model, with slots of its own.

        `pack` keeps a copy of the weights in the order in which a CPU multiplies fastest.
        """
        bound = copy.copy(self)
        bound.device = model.device
        bound._bind(model, pack=pack)
        return bound

    @abstractmethod
    def _bind(self, model: Any, *, pack: bool) -> None:
        """Take over the weights, in the model's place and type, and make empty caches."""

    def resize(self, *, slots: int, capacity: int, pages: Any = None) -> None:
        """Empty slots, as many and as long as these; the old ones' memory is given back first.

        `pages` say where a slot's tokens lie, if they are not one stretch.
        """
        for cache in self.caches:
            cache.resize(slots=slots, capacity=capacity, pages=pages)

    def free(self) -> None:
        """No slots at all: their memory is given back."""
        for cache in self.caches:
            cache.free()

    def copy_prefix(self, source: int, goal: int, count: int) -> None:
        """The first tokens of one slot into another."""
        for cache in self.caches:
            cache.copy(source, goal, count)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(cache.nbytes for cache in self.caches)

    @abstractmethod
    def update_cache(
        self,
        captured: Tensor,  # [batch * count, capture layers * hidden]
        tokens: Tensor,  # [batch, count]
        *,
        slots: Tensor,  # [batch]
        starts: Tensor,  # [batch]
    ) -> None:
        """Take in what the target read from each start on, and its captured hidden states.

        Of a verified block all go in; what was not accepted is written over by the next one. A slot
        may come several times, for tokens that follow each other.
        """

    def update_tree(
        self, captured: Tensor, tree: DraftTree, *, slots: Tensor, starts: Tensor
    ) -> None:
        """The same for a verified tree, whose nodes' places are not their positions."""
        self.update_cache(captured, tree.tokens, slots=slots, starts=starts)

    @abstractmethod
    def propose(
        self,
        anchors: Tensor,  # [batch]
        *,
        slots: Tensor,  # [batch]
        starts: Tensor,  # [batch]: the anchors' positions
        depth: int,
        sampler: DraftSampler,
    ) -> Tensor:
        """Drafts [batch, depth] after each anchor; in the reference loop perhaps fewer columns."""

    def propose_tree(
        self,
        anchors: Tensor,  # [batch]
        *,
        slots: Tensor,  # [batch]
        starts: Tensor,  # [batch]
        depth: int,
        nodes: int,
        sampler: DraftSampler,
    ) -> DraftTree:
        """Trees of so many drafts after each anchor, up to `depth` deep.

        A chain is the tree of a drafter that cannot branch.
        """
        depth = min(nodes, depth)
        drafts = self.propose(anchors, slots=slots, starts=starts, depth=depth, sampler=sampler)
        return chain(torch.cat((anchors.unsqueeze(1), drafts), dim=1))

    def tree_nodes(self, nodes: int, depth: int) -> int:
        """Drafts that such a tree has: fewer than asked for where there are not as many paths."""
        return min(nodes, depth)

    # Measured -------------------------------------------------------------------------------

    def parts(
        self,
        anchors: Tensor,
        *,
        slots: Tensor,
        starts: Tensor,
        depth: int,
        sampler: DraftSampler,
        cached: int,  # noqa: ARG002
        nodes: int = 0,  # noqa: ARG002
    ) -> list[DraftPart]:
        """Drafting in parts that can be timed alone, over `cached` tokens of all slots together.

        With `nodes` those of drafting a tree, if it `can_branch`.
        """

        def draft() -> Tensor:
            return self.propose(anchors, slots=slots, starts=starts, depth=depth, sampler=sampler)

        return [("draft", draft, 0)]

    def cycle_bytes(self, cached: int) -> int:  # noqa: ARG002
        """Bytes of weights and cache that a cycle's drafts read; 0 where they are not counted."""
        return 0

    @property
    def update_bytes(self) -> int:
        """Bytes of weights that updating the cache reads; 0 where they are not counted."""
        return 0


class PlainDecoding(Drafter):
    """No drafts: every cycle is a step of plain decoding."""

    kind = PLAIN
    default_depth = 0
    max_depth = 0

    def _bind(self, model: Any, *, pack: bool) -> None:
        """Nothing."""

    def update_cache(
        self, captured: Tensor, tokens: Tensor, *, slots: Tensor, starts: Tensor
    ) -> None:
        """Nothing."""

    def propose(
        self,
        anchors: Tensor,
        *,
        slots: Tensor,  # noqa: ARG002
        starts: Tensor,  # noqa: ARG002
        depth: int,  # noqa: ARG002
        sampler: DraftSampler,  # noqa: ARG002
    ) -> Tensor:
        """No columns."""
        return anchors.new_empty(len(anchors), 0)


class SequenceSampler:
    """Chooses drafts as the reference loop's sequences want: greedily or drawn.

    Keeps the distributions that drawn drafts came from, where the accept rule asks for them.
    """

    def __init__(self, sequences: Sequence[Decoded]) -> None:
        self.sequences = sequences
        self.distributions: list[list[DraftDistribution] | None] = [
            [] if _sampler(sequence).draws_drafts else None for sequence in sequences
        ]
        self._chosen = 0

    @property
    def can_branch(self) -> bool:
        """Whether all accept drafts by comparing them, so that these may be trees."""
        return all(kept is None for kept in self.distributions)

    def choose_drafts(
        self,
        logits: Tensor,
        starts: Tensor,  # noqa: ARG002
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Drafts are chosen in order, whatever the number of columns in a call."""
        ids = None if tokens is None else tokens.expand(len(logits), -1)
        columns = torch.stack(
            [self.column(self._chosen, logits[:, i], ids) for i in range(logits.shape[1])], dim=1
        )
        return columns if tokens is None else tokens[columns]

    def column(self, index: int, logits: Tensor, tokens: Tensor | None) -> Tensor:
        """Columns [batch] of draft `index`'s logits [batch, k], whose target ids are `tokens`."""
        self._chosen = index + 1
        for place, (sequence, kept) in enumerate(
            zip(self.sequences, self.distributions, strict=True)
        ):
            if kept is not None:
                own = None if tokens is None else tokens.expand(len(logits), -1)[place]
                kept.append(_sampler(sequence).distribution(logits[place], own))
        return self._noised(index, logits, tokens).argmax(dim=-1)

    def tree_scores(
        self,
        index: int,
        logits: Tensor,
        starts: Tensor,  # noqa: ARG002
        tokens: Tensor | None,
    ) -> Tensor:
        """The noise is the token's own, whatever the path to it."""
        noise = self._noised(index, torch.zeros_like(logits[:, 0]), tokens)
        heat = [_sampler(s).draft_noise(s.anchor_position)[0] or 1.0 for s in self.sequences]
        return logits.float() / logits.new_tensor(heat).view(-1, 1, 1) + noise.unsqueeze(1)

    def _noised(self, index: int, logits: Tensor, tokens: Tensor | None) -> Tensor:
        """What draft `index` is the argmax of, [batch, k]."""
        samplers = [_sampler(sequence) for sequence in self.sequences]
        if not any(sampler.samples for sampler in samplers):
            return logits
        starts = [sequence.anchor_position for sequence in self.sequences]
        heat, seeds = zip(*map(Sampler.draft_noise, samplers, starts), strict=True)
        ids = torch.arange(logits.shape[1]).unsqueeze(0) if tokens is None else tokens
        return noised(
            logits,
            ids.to(logits.device),
            temperature=torch.tensor(heat, device=logits.device),
            seeds=torch.tensor(seeds, device=logits.device),
            positions=torch.tensor(starts, device=logits.device) + index + 1,
        )


def _sampler(sequence: Decoded) -> Sampler:
    assert sequence.sampler is not None
    return sequence.sampler


def check_depth(depth: int | None, default: int, most: int | None, *, what: str) -> int:
    """How many drafts in a cycle: what was asked for, or the default."""
    if depth is None:
        return default
    if depth < 0 or (most is not None and depth > most):
        end = "or more" if most is None else f"to {most}"
        raise InputError(f"depth is {depth}; {what} gives 0 {end} drafts in a cycle.")
    return depth


def check_tree(nodes: int | None, *, can_branch: bool, what: str) -> int:
    """How many drafts a tree has: what was asked for, or 0 for chains."""
    if nodes is not None and not 0 <= nodes <= MAX_NODES:
        raise InputError(f"tree is {nodes}; expected 1 to {MAX_NODES} drafts, or 0 for chains.")
    if nodes and not can_branch:
        raise InputError(
            f"a tree of {nodes} drafts is asked for; {what} drafts chains. Leave the tree out, or "
            "use a Domino, DFlash or Markov drafter."
        )
    return nodes or 0
