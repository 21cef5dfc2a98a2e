"""The one typed description of a drafter: backbone shape, head, alignment."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from domino_spec.drafter.fields import known_fields, require_positive
from domino_spec.errors import ConfigError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ABC):
    """What every head has: a low-rank correction of the logits, perhaps not for all drafts."""

    kind: ClassVar[str]
    emb_dim: int
    """The rank of the correction."""
    pure_draft_prefix_len: int = 0
    """How many leading drafts use the base logits alone."""

    def __post_init__(self) -> None:
        require_positive(self, "emb_dim")
        prefix = self.pure_draft_prefix_len
        if not isinstance(prefix, int) or isinstance(prefix, bool) or prefix < 0:
            raise ConfigError(f"pure_draft_prefix_len is {prefix!r}; expected 0 or more.")

    @property
    @abstractmethod
    def sizes(self) -> str:
        """The sizes in words, for messages."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` turns back into an equal configuration."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> HeadConfig:
        """Build the kind that the values name; without one, a GRU's size means Domino."""
        named = dict(values)
        kind = named.pop("kind", None)
        if kind is None and "gru_hidden_dim" in named:
            kind = DominoHeadConfig.kind
        if kind not in HEAD_CONFIGS:
            raise ConfigError(
                f"the head's kind is {kind!r}; known kinds are "
                f"{', '.join(map(repr, HEAD_CONFIGS))}. Name the one it was trained as."
            )
        cls = HEAD_CONFIGS[kind]
        return cls(**known_fields(cls, named))


@dataclass(frozen=True, kw_only=True)
class DominoHeadConfig(HeadConfig):
    """A GRU over the drafted prefix and a low-rank correction of the logits."""

    kind: ClassVar[str] = "domino"
    gru_hidden_dim: int

    def __post_init__(self) -> None:
        require_positive(self, "gru_hidden_dim")
        super().__post_init__()

    @property
    def sizes(self) -> str:
        """The sizes in words, for messages."""
        return f"GRU {self.gru_hidden_dim}, rank {self.emb_dim}"


@dataclass(frozen=True, kw_only=True)
class MarkovHeadConfig(HeadConfig):
    """A low-rank table of bigrams: the correction depends on the previous token alone."""

    kind: ClassVar[str] = "markov"

    @property
    def sizes(self) -> str:
        """The sizes in words, for messages."""
        return f"bigrams of rank {self.emb_dim}"


HEAD_CONFIGS: Mapping[str, type[HeadConfig]] = {
    config.kind: config for config in (DominoHeadConfig, MarkovHeadConfig)
}


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape and meaning of a drafter. Frozen: use `dataclasses.replace` to vary one."""

    # The backbone's own shape.
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 40960
    layer_types: tuple[str, ...] = ()
    """`full_attention` or `sliding_attention` per layer; empty means all full."""
    sliding_window: int | None = None
    causal_window: bool = False
    """Whether a sliding layer is causal inside the block (full layers never are)."""

    # What it was made for.
    vocab_size: int
    """The target's vocabulary, whose embedding and lm_head the drafter borrows."""
    draft_vocab_size: int | None = None
    """Size of a reduced candidate vocabulary; None means the target's own."""
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """0-based target layers whose outputs are fused into the context feature."""
    mask_token_id: int

    # What it proposes.
    block_size: int
    shift_label: bool
    """True: slot i predicts token t+1+i. False: slot i predicts t+i and slot 0 is unused."""
    head: HeadConfig | None = None
    """None is a plain DFlash drafter."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        layer_types = tuple(self.layer_types) or (FULL_ATTENTION,) * max(self.num_layers, 0)
        object.__setattr__(self, "layer_types", layer_types)
        object.__setattr__(self, "rope_parameters", dict(self.rope_parameters))
        self._check_shape()
        self._check_layers()
        self._check_vocabulary()
        self._check_target_layers()
        self._check_block()

    @property
    def num_captured_layers(self) -> int:
        """How many target layers are fused."""
        return len(self.target_layer_ids)

    @property
    def output_vocab_size(self) -> int:
        """How many tokens the drafter can propose."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first draft."""
        return 0 if self.shift_label else 1

    @property
    def default_depth(self) -> int:
        """Drafts a cycle: B-1 for both alignments, so that B positions are verified."""
        return self.block_size - 1

    @property
    def max_depth(self) -> int:
        """Drafts the block can give: B with shifted labels, B-1 without."""
        return self.block_size - self.first_slot

    @property
    def trained_depth(self) -> int:
        """Drafts after each anchor that training looks at."""
        return self.max_depth

    @property
    def token_width(self) -> int:
        """Numbers that the draft cache holds for each token: keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def alignment(self) -> str:
        """The alignment in words, for messages."""
        return "shift" if self.shift_label else "no-shift"

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` turns back into an equal configuration."""
        head = None if self.head is None else self.head.to_dict()
        return {**dataclasses.asdict(self), "head": head}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """Build from plain values; unknown or missing names are errors."""
        known = known_fields(cls, values)
        if isinstance(known.get("head"), Mapping):
            known["head"] = HeadConfig.from_dict(known["head"])
        return cls(**known)

    def _check_shape(self) -> None:
        require_positive(
            self,
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
            "vocab_size",
            "num_target_layers",
        )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads "
                f"({self.num_kv_heads}); every key head must serve as many query heads."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary positions need an even number.")

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"layer_types names {len(self.layer_types)} layers, num_layers says "
                f"{self.num_layers}; they must agree."
            )
        unknown = sorted(set(self.layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION})
        if unknown:
            raise ConfigError(
                f"layer_types holds {unknown}; only {FULL_ATTENTION!r} and "
                f"{SLIDING_ATTENTION!r} are known."
            )
        if SLIDING_ATTENTION in self.layer_types and not self.sliding_window:
            raise ConfigError(
                "layer_types has sliding layers but sliding_window is "
                f"{self.sliding_window}; set the window's length."
            )

    def _check_vocabulary(self) -> None:
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self.mask_token_id}, outside the vocabulary of "
                f"{self.vocab_size}; expected the id the drafter was trained with."
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size < self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size is {self.draft_vocab_size}; a reduced vocabulary has between 1 "
                f"and {self.vocab_size - 1} tokens (leave it out for the target's own vocabulary)."
            )

    def _check_target_layers(self) -> None:
        ids = self.target_layer_ids
        if not ids:
            raise ConfigError(
                "target_layer_ids is empty; at least one target layer must be captured."
            )
        outside = [i for i in ids if not 0 <= i < self.num_target_layers]
        if outside:
            raise ConfigError(
                f"target_layer_ids {list(ids)} names layers {outside} outside the target's "
                f"{self.num_target_layers} layers (0 to {self.num_target_layers - 1})."
            )
        if len(set(ids)) != len(ids):
            raise ConfigError(f"target_layer_ids {list(ids)} names a layer twice.")

    def _check_block(self) -> None:
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}; a block holds at least 2 slots.")
        if self.head and self.head.pure_draft_prefix_len >= self.max_depth:
            raise ConfigError(
                f"pure_draft_prefix_len is {self.head.pure_draft_prefix_len}, so the head would "
                f"never act on a block of {self.max_depth} drafts; expected less than that."
            )


def default_target_layer_ids(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly spread layers from the second layer to the fourth last."""
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = tuple(round(1 + i * span / (count - 1)) for i in range(count))
    if span < count - 1:
        raise ConfigError(
            f"a target of {num_target_layers} layers is too shallow for {count} evenly spread "
            "layers to capture; name target_layer_ids or capture fewer."
        )
    return ids
