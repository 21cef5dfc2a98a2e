"""The doctor: a target, a drafter and a machine before anything runs, read and measured."""

from domino_spec.doctor.examine import Examination, examine_files, examine_loaded
from domino_spec.doctor.reading import Finding, Plans, worst

__all__ = ["Examination", "Finding", "Plans", "examine_files", "examine_loaded", "worst"]
