"""The typed description of a drafter of each kind: its shape and what it proposes."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
        """Plain values for a record."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


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
        return f"GRU {self.gru_hidden_dim}, rank {self.emb_dim}"


@dataclass(frozen=True, kw_only=True)
class MarkovHeadConfig(HeadConfig):
    """A low-rank table of bigrams: the correction depends on the previous token alone."""

    kind: ClassVar[str] = "markov"

    @property
    def sizes(self) -> str:
        return f"bigrams of rank {self.emb_dim}"


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a drafter's layers are like: attention with rotary positions, and an MLP."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 40960


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(LayerShape):
    """Shape and meaning of a drafter. Frozen: use `dataclasses.replace` to vary one."""

    # The backbone's own shape.
    hidden_size: int
    num_layers: int
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

    @property
    def kind(self) -> str:
        """That of its head."""
        return "dflash" if self.head is None else self.head.kind

    @property
    def described(self) -> str:
        """What it is, for messages: what decides how many drafts it gives."""
        return f"this drafter ({self.alignment}, block of {self.block_size})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        head = None if self.head is None else self.head.to_dict()
        return {**dataclasses.asdict(self), "head": head}

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
        check_reduced(self.draft_vocab_size, self.vocab_size)

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


@dataclass(frozen=True, kw_only=True)
class ModuleConfig(ABC):
    """What drafters that draft no blocks have: a target whose lm_head they borrow."""

    kind: ClassVar[str]
    hidden_size: int
    vocab_size: int
    """The target's vocabulary."""
    draft_vocab_size: int | None = None
    """Size of a reduced vocabulary; None means the target's own."""
    num_target_layers: int

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size", "vocab_size", "num_target_layers")
        check_reduced(self.draft_vocab_size, self.vocab_size)

    @property
    def described(self) -> str:
        """What it is, for messages."""
        return f"this {self.kind} drafter"

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
class Eagle3Config(LayerShape, ModuleConfig):
    """One autoregressive layer over fused hidden states (EAGLE-3), drafting a chain.

    It shares the target's lm_head and by default its whole vocabulary: a reduced one is faster
    and cannot name rare tokens, which is no property of the method and would favour or hurt one
    drafter alone.
    """

    kind: ClassVar[str] = "eagle3"
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


def known_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as arguments of a dataclass; unknown or missing names are errors."""
    fields = dataclasses.fields(cls)
    names = {f.name for f in fields}
    unknown = sorted(set(values) - names)
    if unknown:
        raise ConfigError(
            f"{cls.__name__} has no field {', '.join(map(repr, unknown))}; "
            f"known fields are {', '.join(sorted(names))}."
        )
    required = {
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(values))
    if missing:
        raise ConfigError(f"{cls.__name__} lacks the field {', '.join(map(repr, missing))}.")
    return dict(values)


def check_reduced(size: int | None, vocab_size: int) -> None:
    """Refuse a reduced vocabulary that is none."""
    if size is not None and not 0 < size < vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {size}; a reduced vocabulary has between 1 and "
            f"{vocab_size - 1} tokens (leave it out for the target's own vocabulary)."
        )


def require_positive(config: Any, *names: str) -> None:
    """Raise unless each of these fields is a positive whole number."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; expected a positive whole number.")
