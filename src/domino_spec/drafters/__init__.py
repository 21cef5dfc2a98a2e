"""Drafters of every kind with one interface, their trained models and files, opened by name."""

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

if TYPE_CHECKING:
    from domino_spec.decoding.drafter import Drafter as Drafter
    from domino_spec.decoding.drafter import PlainDecoding as PlainDecoding
    from domino_spec.drafter.names import PLAIN as PLAIN
    from domino_spec.drafters.block import BlockDrafter as BlockDrafter
    from domino_spec.drafters.config import Eagle3Config as Eagle3Config
    from domino_spec.drafters.config import MedusaConfig as MedusaConfig
    from domino_spec.drafters.config import ModuleConfig as ModuleConfig
    from domino_spec.drafters.eagle3 import Eagle3 as Eagle3
    from domino_spec.drafters.eagle3 import Eagle3Drafter as Eagle3Drafter
    from domino_spec.drafters.files import load_baseline as load_baseline
    from domino_spec.drafters.files import save_baseline as save_baseline
    from domino_spec.drafters.lookup import LookupDrafter as LookupDrafter
    from domino_spec.drafters.medusa import Medusa as Medusa
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
            "block": "BlockDrafter Drafter",
            "config": "Eagle3Config MedusaConfig ModuleConfig",
            "eagle3": "Eagle3 Eagle3Drafter",
            "files": "load_baseline save_baseline",
            "lookup": "LookupDrafter",
            "medusa": "Medusa MedusaDrafter",
            "registry": "PLAIN MismatchWarning PlainDecoding describe_drafter drafter_of "
            "open_drafter short_name",
        },
    )
