"""Configurations of the trained drafters that are no block drafters."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from domino_spec.drafter.fields import known_fields, require_positive
from domino_spec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModuleConfig(ABC):
    """What each of them has: a target whose lm_head it borrows."""

    kind: ClassVar[str]
    hidden_size: int
    vocab_size: int
    """The target's vocabulary."""
    draft_vocab_size: int | None = None
    """Size of a reduced vocabulary; None means the target's own."""
    num_target_layers: int

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size", "vocab_size", "num_target_layers")
        size = self.draft_vocab_size
        if size is not None and not 0 < size < self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size is {size}; a reduced vocabulary has between 1 and "
                f"{self.vocab_size - 1} tokens (leave it out for the target's own vocabulary)."
            )

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs are read; what the lm_head reads is no layer's."""
        return ()

    @property
    def output_vocab_size(self) -> int:
        """How many tokens it can propose."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    @abstractmethod
    def default_depth(self) -> int:
        """Drafts a cycle: as many as it was trained for."""

    @property
    def trained_depth(self) -> int:
        """Drafts after each anchor that training looks at."""
        return self.default_depth

    @property
    def max_depth(self) -> int | None:
        """Drafts it can give in a cycle; None where there is no end."""
        return self.default_depth

    @property
    @abstractmethod
    def token_width(self) -> int:
        """Numbers that its cache holds for each token."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` turns back into an equal configuration."""
        return {"drafter": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModuleConfig:
        """Build the kind that the values name; unknown or missing names are errors."""
        named = dict(values)
        kind = named.pop("drafter", None)
        if kind not in MODULE_CONFIGS:
            raise ConfigError(
                f"the drafter's kind is {kind!r}; known kinds are "
                f"{', '.join(map(repr, MODULE_CONFIGS))}."
            )
        cls = MODULE_CONFIGS[kind]
        return cls(**known_fields(cls, named))


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(ModuleConfig):
    """Parallel heads on the state that gave the target's last logits (Medusa-1: frozen target).

    Each head ends in the target's own lm_head. A head of its own for each would be trained too
    in the original; here no drafter trains an output matrix of the vocabulary's size times the
    hidden size, so that what differs is the way of drafting.
    """

    kind: ClassVar[str] = "medusa"
    num_heads: int
    """Head k, from 1, predicts the k-th token after the one the target itself predicts."""
    num_layers: int = 1
    """Residual blocks in a head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "num_heads", "num_layers")

    @property
    def default_depth(self) -> int:
        """One draft a head."""
        return self.num_heads

    @property
    def token_width(self) -> int:
        """What the lm_head reads."""
        return self.hidden_size


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(ModuleConfig):
    """One autoregressive layer over fused hidden states (EAGLE-3), drafting a chain.

    It shares the target's lm_head and by default its whole vocabulary: a reduced one is faster
    and cannot name rare tokens, which is no property of the method and would favour or hurt one
    drafter alone.
    """

    kind: ClassVar[str] = "eagle3"
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 40960
    tapped_layers: tuple[int, ...]
    """0-based target layers, low to high, whose outputs are fused; the key in its config.json."""
    unrolled: int = 7
    """Steps that training feeds it its own states; more can be drafted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tapped_layers", tuple(self.tapped_layers))
        object.__setattr__(self, "rope_parameters", dict(self.rope_parameters))
        require_positive(
            self, "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "unrolled",
            "max_position_embeddings",
        )  # fmt: skip
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.num_heads} heads of {self.head_dim} with {self.num_kv_heads} key heads; "
                "expected a multiple of the key heads, and an even head_dim."
            )
        outside = [i for i in self.tapped_layers if not 0 <= i < self.num_target_layers]
        twice = len(set(self.tapped_layers)) < len(self.tapped_layers)
        if not self.tapped_layers or outside or twice:
            raise ConfigError(
                f"tapped_layers is {list(self.tapped_layers)}; expected some of the target's "
                f"layers 0 to {self.num_target_layers - 1}, each once."
            )

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The fused layers."""
        return self.tapped_layers

    @property
    def default_depth(self) -> int:
        """As many as training unrolled."""
        return self.unrolled

    @property
    def max_depth(self) -> int | None:
        """A chain has no end."""
        return None

    @property
    def token_width(self) -> int:
        """Keys, values and the feature."""
        return 2 * self.num_kv_heads * self.head_dim + self.hidden_size


MODULE_CONFIGS: Mapping[str, type[ModuleConfig]] = {
    config.kind: config for config in (MedusaConfig, Eagle3Config)
}
