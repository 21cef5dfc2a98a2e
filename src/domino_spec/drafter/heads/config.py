"""The typed description of a head: a kind, its sizes, and where it starts to act."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from domino_spec.drafter.fields import known_fields, require_positive
from domino_spec.errors import ConfigError


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
