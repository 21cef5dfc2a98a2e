"""A vLLM that the plugin does not know: our drafters are refused by name, all others served."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from domino_spec.checkpoints import export_drafter
from domino_spec.checkpoints.layouts import HEAD_PROJECTORS
from domino_spec.errors import CheckpointError
from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import knowing_drafter, save_bigram_target, save_knowing_drafter
from tests.engines.vllm.test_v1 import PROMPTS, speculative, table_answer

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")

OTHERS = ((9, 0), (9, 9))
REFUSAL = "domino-spec serves Domino drafters on vLLM 9.0 to 9.9. Install one of these"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(save_bigram_target(tmp_path_factory.mktemp("target")))


@pytest.mark.parametrize("form", ["vllm", "hf"])
def test_a_domino_drafter_is_refused_by_its_own_name_and_by_the_shared_one(target, tmp_path, form):
    drafter = knowing_drafter(shift_label=True, prefix_len=1)
    folder = export_drafter(drafter, tmp_path / "draft", to=form, dtype=torch.float32)
    with pytest.raises(AssertionError, match=REFUSAL) as failure:
        run_job(target=target, speculative=speculative(folder), prompts=PROMPTS, supported=OTHERS)
    assert "not supported for now" not in str(failure.value), "vLLM's words for unknown names"


def test_a_plain_drafter_is_served(target, tmp_path):
    folder = save_knowing_drafter(tmp_path / "draft", shift_label=False, prefix_len=0, head=False)
    result = run_job(
        target=target, speculative=speculative(folder), prompts=PROMPTS, supported=OTHERS
    )
    assert result["drafted"] > 100
    assert result["answers"][0] == [[table_answer(prompt, 32)] for prompt in PROMPTS]


class Own:
    """Stands for vLLM's class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.prefix = prefix


class Entry:
    """Stands for vLLM's entry in its registry."""

    answer = 42

    def load_model_cls(self) -> type:
        return Own


def config_of(section: object) -> SimpleNamespace:
    draft = SimpleNamespace(hf_config=SimpleNamespace(dflash_config=section))
    return SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))


@pytest.mark.parametrize("name", ["DFlashDraftModel", "Qwen3DSparkModel"])
def test_vllms_entries_for_both_shared_names_can_be_guarded(monkeypatch, name):
    from vllm import ModelRegistry

    from domino_spec.plugins.vllm import refusal, versions

    monkeypatch.setattr(versions, "SUPPORTED", OTHERS)
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    own = ModelRegistry.models[name]
    refusal.guard(ModelRegistry, [name])
    guarded = ModelRegistry.models[name].load_model_cls()
    assert issubclass(guarded, own.load_model_cls())
    with pytest.raises(CheckpointError, match=REFUSAL):
        guarded(vllm_config=config_of({"projector_type": "domino"}), prefix="draft")


def test_only_entries_that_vllm_has_are_guarded():
    from domino_spec.plugins.vllm.refusal import Guard, guard

    registry = SimpleNamespace(models={"Shared": Entry(), "Other": Entry(), "Odd": 1})
    guard(registry, ["Shared", "Missing", "Odd"])
    kinds = {name: type(entry) for name, entry in registry.models.items()}
    assert kinds == {"Shared": Guard, "Other": Entry, "Odd": int}
    assert registry.models["Shared"].answer == 42, "the rest is asked of vLLM's own"
    guard(SimpleNamespace(), ["Shared"])  # a registry without entries


@pytest.fixture
def guarded(monkeypatch):
    from domino_spec.plugins.vllm import refusal, versions

    monkeypatch.setattr(versions, "SUPPORTED", OTHERS)
    return refusal.Guard(Entry()).load_model_cls()


@pytest.mark.parametrize(
    "section", [*({"projector_type": p} for p in HEAD_PROJECTORS), {"shift_label": True}]
)
def test_what_vllm_would_serve_without_its_head_is_refused(guarded, section):
    with pytest.raises(CheckpointError, match=REFUSAL):
        guarded(vllm_config=config_of(section), prefix="draft")


@pytest.mark.parametrize(
    "config",
    [
        config_of(None),
        config_of({}),
        config_of({"projector_type": "dflash", "shift_label": False}),
        config_of({"projector_type": "of a later vLLM"}),
        config_of(SimpleNamespace(projector_type="domino")),
        SimpleNamespace(speculative_config=None),
        SimpleNamespace(),
    ],
)
def test_anything_else_is_exactly_what_vllm_builds(guarded, config):
    model = guarded(vllm_config=config, prefix="draft")
    assert type(model) is Own
    assert model.prefix == "draft"
    assert issubclass(guarded, Own), "vLLM looks at the class too"
