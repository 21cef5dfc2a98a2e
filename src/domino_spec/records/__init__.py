"""Raw records of measurements: where, when and with what they were made."""

from domino_spec.records.environment import environment
from domino_spec.records.files import append_record, read_records

__all__ = ["append_record", "environment", "read_records"]
