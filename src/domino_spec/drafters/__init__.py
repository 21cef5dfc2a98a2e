"""Drafters of every kind with one interface, opened by name."""

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

if TYPE_CHECKING:
    from domino_spec.decoding.drafter import Drafter as Drafter
    from domino_spec.decoding.drafter import PlainDecoding as PlainDecoding
    from domino_spec.drafter.names import PLAIN as PLAIN
    from domino_spec.drafters.block import BlockDrafter as BlockDrafter
    from domino_spec.drafters.eagle3 import Eagle3Drafter as Eagle3Drafter
    from domino_spec.drafters.lookup import LookupDrafter as LookupDrafter
    from domino_spec.drafters.medusa import MedusaDrafter as MedusaDrafter
    from domino_spec.drafters.registry import MismatchWarning as MismatchWarning
    from domino_spec.drafters.registry import describe_drafter as describe_drafter
    from domino_spec.drafters.registry import drafter_of as drafter_of
    from domino_spec.drafters.registry import open_drafter as open_drafter
    from domino_spec.drafters.registry import short_name as short_name
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "block": "BlockDrafter",
            "eagle3": "Eagle3Drafter",
            "lookup": "LookupDrafter",
            "medusa": "MedusaDrafter",
            "registry": "PLAIN Drafter MismatchWarning PlainDecoding describe_drafter drafter_of "
            "open_drafter short_name",
        },
    )
