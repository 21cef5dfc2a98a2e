"""What the caller of a loader knows and a config.json may leave out."""

from __future__ import annotations

from dataclasses import dataclass

from domino_spec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Values that fill a gap in a config.

    An alignment that contradicts the config is an error here. A depth that does is left to the
    check against the target, which can say whose drafter it is.
    """

    shift_label: bool | None = None
    num_target_layers: int | None = None

    def alignment(self, stated: bool | None, *, label: str, has_head: bool) -> bool:
        """The alignment; a head whose config is silent about it needs an explicit value."""
        given = self.shift_label
        if stated is not None and given is not None and stated != given:
            raise ConfigError(
                f"{label} is {stated} in config.json but shift_label={given} was asked for; a "
                "drafter works only with the alignment it was trained with. Drop the argument, or "
                "correct config.json if it is wrong."
            )
        if stated is not None:
            return stated
        if given is not None:
            return given
        if has_head:
            raise ConfigError(
                f"config.json has a head but lacks {label}, and the weights cannot tell. "
                "Pass shift_label=True (--shift-label) if slot 0 predicts the token behind the "
                "anchor, as in public Qwen3 Domino checkpoints, shift_label=False "
                "(--no-shift-label) if slot 1 does."
            )
        return False

    def target_depth(self, stated: int | None, *, label: str) -> int:
        """The number of target layers, from the config or from the caller."""
        depth = self.num_target_layers if stated is None else stated
        if depth is None:
            raise ConfigError(
                f"config.json lacks {label}; pass num_target_layers with the number of layers of "
                "the target model."
            )
        return depth
