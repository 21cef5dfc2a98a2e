"""The vLLM plugin: teaches an unmodified vLLM to serve Domino drafters.

vLLM calls `register` in every process (entry point group `vllm.general_plugins`). Models are added
to its registry, and two of its own names (`DFlashDraftModel`, which Domino checkpoints carry too,
and `Qwen3DSparkModel`) are taken over by classes that hand every drafter without a Domino head
straight to vLLM's own. Nothing else of vLLM is changed but the seeds of our sampled drafts
(`draft_seeds`).
"""

from __future__ import annotations

from domino_spec.plugins.vllm.versions import SUPPORTED, problem

__all__ = ["SUPPORTED", "register"]

_DFLASH = "domino_spec.plugins.vllm.dflash:DominoForDFlash"
_DSPARK = "domino_spec.plugins.vllm.dspark:DominoForDSpark"
_REFUSAL = "domino_spec.plugins.vllm.refusal:UnsupportedVersion"

# vLLM puts "DFlash" before a draft architecture's name when method is "dflash" and it lacks it.
_OURS = {
    "DominoDraftModel": _DFLASH,
    "DFlashDominoDraftModel": _DFLASH,
    "MarkovDraftModel": _DFLASH,
    "DFlashMarkovDraftModel": _DFLASH,
}
_SHARED = {"DFlashDraftModel": _DFLASH, "Qwen3DSparkModel": _DSPARK}


def register() -> None:
    """Add the models; outside the supported versions only what refuses them when they are used."""
    import vllm
    from vllm import ModelRegistry

    if problem(vllm.__version__) is None:
        models = _OURS | _SHARED
    else:
        from domino_spec.plugins.vllm.refusal import guard

        models = dict.fromkeys(_OURS, _REFUSAL)
        guard(ModelRegistry, _SHARED)
    for architecture, path in models.items():
        ModelRegistry.register_model(architecture, path)
