"""What `domino serve --backend sglang` would run, read by SGLang's own parser."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip(
    "sglang",
    reason="SGLang is not installed; see tests/engines/requirements-sglang.txt",
)

from sglang.srt.server_args import ServerArgs, prepare_server_args

from domino_spec.serving.backends import ServeArgs
from domino_spec.serving.backends.backend import Installed, find_engine
from domino_spec.serving.backends.drafts import ServedDraft
from domino_spec.serving.backends.sglang import BACKEND as backend
from tests.checkpoints.helpers import tiny_drafter

DRAFT = ServedDraft(folder=Path("/drafts/one"), config=tiny_drafter().config, is_own=True)
FULL = ServeArgs(
    target="org/Model", draft="one", revision="v1", dtype="bfloat16", device="cuda:1",
    trust_remote_code=True, thinking=False, depth=2, host="0.0.0.0", port=9000, model_name="mine",
    slots=30, max_queue=10, context=4096, tensor_parallel=1, memory_share=0.8,
    api_keys=("a secret: #1",), extra_args=("--random-seed", "7"),
)  # fmt: skip


@pytest.fixture(scope="module")
def here() -> Installed:
    return find_engine(backend, sys.executable)


def parsed(request: ServeArgs, found: Installed, draft=DRAFT) -> ServerArgs:
    backend.refuse(request)
    with backend.command(request, found, draft, {}).arguments() as words:
        assert words[1:3] == ["-m", "sglang.launch_server"]
        return prepare_server_args(words[3:])


def test_the_engine_here_is_found_as_itself(here):
    assert (here.distribution, here.version) == ("sglang", version("sglang"))
    assert backend.check_version(here.version) == []


def test_every_option_means_to_sglang_what_it_means_here(here):
    args = parsed(FULL, here)
    assert (args.model_path, args.served_model_name, args.revision) == ("org/Model", "mine", "v1")
    assert (args.dtype, args.device, args.base_gpu_id) == ("bfloat16", "cuda", 1)
    assert args.trust_remote_code is True
    assert args.default_chat_template_kwargs == {"enable_thinking": False}
    assert (args.host, args.port, args.enable_metrics) == ("0.0.0.0", 9000, True)
    assert (args.max_running_requests, args.max_queued_requests) == (30, 10)
    assert (args.context_length, args.tp_size, args.mem_fraction_static) == (4096, 1, 0.8)
    assert args.api_key == "a secret: #1"
    assert args.random_seed == 7
    assert args.speculative_algorithm == "DFLASH"
    assert args.speculative_draft_model_path == "/drafts/one"
    assert args.speculative_domino_candidate_pool_size == 0
    assert args.speculative_num_draft_tokens == 3


def test_what_is_passed_on_wins(here):
    pool = ("--speculative-domino-candidate-pool-size", "64")
    args = parsed(FULL.replace(extra_args=pool), here)
    assert args.speculative_domino_candidate_pool_size == 64


def test_a_target_alone(here):
    args = parsed(ServeArgs(target="org/Model"), here, draft=None)
    assert args.speculative_algorithm is None
    assert args.api_key is None
