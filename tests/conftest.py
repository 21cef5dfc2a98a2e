import gc
import importlib.util
import math
import os
import platform
import signal
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is imported: on ARM its small products take eight times as long with more threads.
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("DOMINO_TEST_THREADS", "1"))

import pytest


def _prepare() -> None:
    import torch
    import transformers

    # Kernels are tested in Triton's interpreter, which must be chosen before anything imports
    # Triton; in the engines' environments Triton is theirs.
    if not torch.cuda.is_available() and importlib.util.find_spec("vllm") is None:
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(int(os.environ.get("DOMINO_TEST_THREADS", "1")))
    if platform.machine() == "aarch64":
        # A tenth of the time goes to oneDNN's detours for tiny products, and without bfloat16
        # instructions one such product turns it off, after which others round otherwise. Weights
        # that the engine packs go through it all the same.
        torch.backends.mkldnn.enabled = False
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


# The process that hands tests out to workers (make test) runs none, and needs no torch.
if "-n" not in sys.argv or "PYTEST_XDIST_WORKER" in os.environ:
    _prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests that take long come first: at the end one worker would wait for them."""
    items.sort(key=lambda item: "kernels" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Torch's and Transformers' objects stay: collections need not walk over them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """What tests measure on this machine is not the user's."""
    before = os.environ.get("DOMINO_CACHE")
    cache = tmp_path_factory.mktemp("cache")
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers compile the C kernels once
        kernels = tmp_path_factory.getbasetemp().parent / "kernels"
        kernels.mkdir(exist_ok=True, mode=0o755)  # where others could write none is loaded
        (cache / "kernels").symlink_to(kernels, target_is_directory=True)
    os.environ["DOMINO_CACHE"] = str(cache)
    yield
    os.environ.pop("DOMINO_CACHE")
    if before is not None:
        os.environ["DOMINO_CACHE"] = before


@pytest.fixture
def packing_small_weights(monkeypatch):
    """Weights of tiny models are packed too, as those of real ones are."""
    monkeypatch.setattr("domino_spec.engine.kernels.packing.SMALL", 0)


@pytest.fixture
def heeding_ctrl_c():
    """As in a terminal: what a script starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Costs are kept however busy this machine is."""
    monkeypatch.setattr("domino_spec.engine.measure._NEARLY", math.inf)
