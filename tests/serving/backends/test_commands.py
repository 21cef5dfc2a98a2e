"""Each field of the command line is translated or refused by its name, by every backend."""

from dataclasses import replace

import pytest

from domino_spec.errors import InputError
from domino_spec.serving.backends import ServeArgs, find_backend, launch
from domino_spec.serving.backends.args import option
from tests.serving.backends import samples

FIELDS = list(ServeArgs.model_fields)
BASE = ServeArgs(target="org/target", draft="drafter")
REFUSED = {
    "vllm": {
        "device_map", "attn_implementation", "candidates", "tree", "remeasure", "pack", "page",
        "quantize", "draft_window", "draft_sinks",
        "max_prompt_tokens", "max_body_bytes", "max_image_bytes", "max_image_pixels",
        "strict", "tool_call_parser", "reasoning_parser",
    },
    "sglang": {
        "device_map", "attn_implementation", "candidates", "tree", "remeasure", "pack", "page",
        "quantize", "draft_window", "draft_sinks",
        "max_prompt_tokens", "max_body_bytes", "max_image_bytes", "max_image_pixels",
        "max_new_tokens", "max_choices", "drain_seconds",
        "strict", "allowed_origins", "tool_call_parser", "reasoning_parser",
    },
}  # fmt: skip


@pytest.fixture
def planned(monkeypatch):
    """What is planned, with stand-ins that show what the engine's place and the drafter got."""

    def find(engine, python):
        found = samples.vllm() if engine.title == "vLLM" else samples.sglang()
        return replace(found, python=python or found.python, command=f"{python}/command")

    def draft(request, needs):
        seen = (request.draft, request.draft_revision, request.shift_label)
        return replace(samples.DRAFT, folder=samples.DRAFT.folder / str(seen))

    monkeypatch.setattr(launch, "find_engine", find)
    monkeypatch.setattr(launch, "plan_draft", draft)

    def made(name, request):
        made, _, _ = launch.plan(request, find_backend(name), environment={})
        return (made.argv, made.env, made.secret_env, made.secret_config)

    return made


def test_there_is_a_sample_for_every_field_and_it_is_not_the_default():
    assert set(samples.SAMPLES) == set(FIELDS)
    assert set(samples.SAMPLES) <= set(BASE.replace(**samples.SAMPLES).given())


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_changes_what_is_run_or_is_refused(name, field, planned):
    more = {"slots": 8} if field == "max_queue" else {}
    request = BASE.replace(**more)
    changed = request.replace(**{field: samples.SAMPLES[field]})
    if field in REFUSED[name]:
        with pytest.raises(InputError, match=f"--backend {name} has no {option(field)}"):
            planned(name, changed)
    else:
        assert planned(name, changed) != planned(name, request)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_no_page_is_what_the_others_have_anyway(name, planned):
    assert planned(name, BASE.replace(page=False)) == planned(name, BASE)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_every_refusal_of_a_command_line_is_told_at_once(name, planned):
    wrong = BASE.replace(device_map="auto", candidates=3)
    with pytest.raises(InputError, match="no --device-map .*, no --candidates"):
        planned(name, wrong)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"memory_share": 1.5}, "memory_share is 1.5"),
        ({"memory_share": 0.0}, "memory_share is 0.0"),
        ({"port": 70000}, "port is 70000"),
        ({"slots": 0}, "slots is 0"),
        ({"api_keys": (" ",)}, "an API key is empty"),
        ({"extra_args": ("stray",)}, "'stray' follows the target"),
        ({"draft": None, "depth": 3, "shift_label": True}, "--shift-label, --depth without"),
    ],
)
def test_values_that_make_no_sense_are_refused_for_every_backend(changes, told):
    with pytest.raises(InputError, match=told):
        BASE.replace(**changes)


@pytest.mark.parametrize(
    ("target", "name"),
    [("org/Model-8B", "Model-8B"), ("model", "model"), ("/no/such/folder/", "folder")],
)
def test_the_short_name(target, name):
    assert ServeArgs(target=target).name == name


def test_a_folder_and_a_file_are_named_by_where_they_lie(tmp_path, monkeypatch):
    (tmp_path / "Small").mkdir()
    (tmp_path / "Small" / "small.Q8.gguf").touch()
    monkeypatch.chdir(tmp_path / "Small")
    assert ServeArgs(target=".").name == "Small"
    assert ServeArgs(target="small.Q8.gguf").name == "small.Q8"


def test_keys_are_not_in_a_requests_text():
    request = BASE.replace(api_keys=samples.KEYS)
    assert request.config().api_keys == samples.KEYS
    assert samples.KEYS[0] not in repr(request)
