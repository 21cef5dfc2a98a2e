from __future__ import annotations

from dataclasses import replace

import pytest

from domino_spec.errors import InputError
from domino_spec.serving.backends import ServeArgs
from domino_spec.serving.backends.sglang import BACKEND as sglang
from tests.cli import tiny
from tests.serving.backends import samples

BASE = ServeArgs(target="org/Model", draft="drafter")
START = (
    "/env/python", "-m", "sglang.launch_server", "--model-path", "org/Model",
    "--served-model-name", "Model",
)  # fmt: skip
LISTEN = ("--host", "127.0.0.1", "--port", "8000", "--enable-metrics")
DRAFTING = (
    "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "/drafts/one",
)  # fmt: skip
EXACT = ("--speculative-domino-candidate-pool-size", "0")


def launch(request=BASE, draft=samples.DRAFT):
    sglang.refuse(request)
    return sglang.command(request, samples.sglang(), draft, {})


def test_the_usual_command_line():
    made = launch()
    assert made.argv == (*START, *LISTEN, *DRAFTING, *EXACT)
    assert not made.env


def test_a_drafter_without_a_head_has_no_pool():
    plain = replace(samples.DRAFT, config=tiny.drafter_config(head=False))
    assert launch(draft=plain).argv == (*START, *LISTEN, *DRAFTING)
    assert launch(ServeArgs(target="org/Model"), draft=None).argv == (*START, *LISTEN)


def test_everything_that_can_be_said():
    request = BASE.replace(revision="v1", dtype="bfloat16", device="cuda:2", trust_remote_code=True,
        thinking=True, slots=4, max_queue=10, context=4096, tensor_parallel=1, memory_share=0.8,
        depth=5, extra_args=("--random-seed", "1"),
    )  # fmt: skip
    assert launch(request).argv == (
        *START, "--revision", "v1", "--dtype", "bfloat16", "--device", "cuda", "--base-gpu-id",
        "2", "--trust-remote-code", "--default-chat-template-kwargs", '{"enable_thinking": true}',
        *LISTEN, "--max-running-requests", "4", "--max-queued-requests", "10", "--context-length",
        "4096", "--tp-size", "1", "--mem-fraction-static", "0.8", *DRAFTING, *EXACT,
        "--speculative-num-draft-tokens", "6", "--random-seed", "1",
    )  # fmt: skip


def test_a_key_goes_by_a_private_file_and_is_masked_in_the_log():
    made = launch(BASE.replace(api_keys=samples.KEYS))
    assert made.argv == launch().argv
    assert made.secret_config == {"api-key": samples.KEYS[0]}
    assert made.prints == samples.KEYS
    assert samples.KEYS[0] not in repr(made) + made.shown()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"api_keys": ("a", "b")}, "takes one key, 2 were given"),
        ({"device": "cpu"}, "needs CUDA"),
        ({"dtype": "float16"}, "in bfloat16 only"),
        ({"dtype": "fastest"}, "no --dtype fastest"),
        ({"page": True}, "no --page"),
        ({"target": "m.gguf"}, "GGUF"),
        ({"port": 0}, "port is 0"),
        ({"depth": 8}, "1 to 7 drafts a cycle"),
        ({"candidates": 9}, "--speculative-domino-candidate-pool-size N"),
        ({"api_keys": ("a",), "extra_args": ("--config", "f")}, "--config was passed on"),
    ],
)
def test_refusals(changes, told):
    with pytest.raises(InputError, match=told):
        launch(BASE.replace(**changes))


def test_a_target_whose_states_come_a_layer_early_is_refused():
    text = replace(samples.DRAFT, target_architectures=("Qwen3_5ForCausalLM",))
    published = replace(samples.DRAFT, target_architectures=("Qwen3_5ForConditionalGeneration",))
    with pytest.raises(InputError, match=r"Qwen3_5ForCausalLM one layer too early.*#38096"):
        launch(draft=text)
    assert launch(draft=published).argv == launch().argv
    assert sglang.command(BASE, samples.sglang("0.5.23"), text, {}).argv == launch().argv


def test_a_target_alone_may_run_anywhere_in_any_type():
    alone = ServeArgs(target="org/Model", device="cpu", dtype="float32")
    assert launch(alone, draft=None).argv == (
        *START, "--dtype", "float32", "--device", "cpu", *LISTEN,
    )  # fmt: skip


def test_its_open_door_is_pointed_out():
    assert "every site" in sglang.warnings(BASE)[0]
    assert sglang.warnings(BASE.replace(api_keys=("k",))) == []
