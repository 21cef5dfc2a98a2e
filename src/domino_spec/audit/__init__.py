"""The audit: is decoding with drafts lossless, token by token and as a distribution?"""

from domino_spec.audit.greedy import Difference, GreedyAudit, audit_greedy, judge_first
from domino_spec.audit.prompts import PROMPTS
from domino_spec.audit.report import Audit
from domino_spec.audit.sampling import SamplingAudit, audit_sampling
from domino_spec.audit.ways import EngineWay, Pass, ReferenceWay, Way, Written

__all__ = [
    "PROMPTS",
    "Audit",
    "Difference",
    "EngineWay",
    "GreedyAudit",
    "Pass",
    "ReferenceWay",
    "SamplingAudit",
    "Way",
    "Written",
    "audit_greedy",
    "audit_sampling",
    "judge_first",
]
