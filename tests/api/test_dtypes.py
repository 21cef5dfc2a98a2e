"""The type that is fastest: measured once on a CPU, the checkpoint's own half elsewhere."""

import json

import pytest
import torch
import transformers as tf

from domino_spec import DominoDecoder
from domino_spec.api import DtypeNotice, dtypes
from domino_spec.api.dtypes import dtype_rule, fastest_dtype
from domino_spec.errors import TargetError
from tests.support.families import make_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dtypes"


def taking(monkeypatch, **seconds):
    """A machine whose products take so long."""
    spent = {getattr(torch, name): value for name, value in seconds.items()}
    monkeypatch.setattr(dtypes, "measure_products", lambda: spent)


def config(dtype):
    return tf.LlamaConfig(dtype=dtype)


@pytest.mark.parametrize(("float32", "bfloat16"), [(1.0, 0.6), (1.0, 20.0)])
def test_a_cpu_takes_what_it_multiplies_faster(monkeypatch, float32, bfloat16):
    taking(monkeypatch, float32=float32, bfloat16=bfloat16)
    faster = torch.bfloat16 if bfloat16 < float32 else torch.float32
    assert fastest_dtype(config(torch.bfloat16), CPU) == faster


def test_it_is_measured_once(monkeypatch, cache):
    first = dtypes.product_seconds()
    assert set(first) == {torch.float32, torch.bfloat16}
    assert min(first.values()) > 0
    monkeypatch.setattr(dtypes, "measure_products", None)
    assert dtypes.product_seconds() == first


def test_measuring_leaves_pytorchs_fast_products_on(monkeypatch):
    """PyTorch turns them off where it has none for bfloat16."""

    def turning_them_off(calls, **_):
        torch.backends.mkldnn.enabled = False
        return dict.fromkeys(calls, 1.0), True

    monkeypatch.setattr(dtypes, "least_seconds", turning_them_off)
    before = torch.backends.mkldnn.enabled
    try:
        torch.backends.mkldnn.enabled = True
        dtypes.measure_products()
        assert torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = before


@pytest.mark.parametrize("spoiled", ["", "[]", "{}", '{"torch.float32": 0, "torch.bfloat16": 1}'])
def test_a_spoiled_file_is_measured_again(monkeypatch, cache, spoiled):
    taking(monkeypatch, float32=1.0, bfloat16=2.0)
    dtypes.faster_on_cpu()
    (path,) = cache.iterdir()
    path.write_text(spoiled)
    taking(monkeypatch, float32=3.0, bfloat16=2.0)
    assert dtypes.faster_on_cpu() == torch.bfloat16
    assert json.loads(path.read_text()) == {"torch.float32": 3.0, "torch.bfloat16": 2.0}


@pytest.mark.parametrize(("own", "found"), [
    (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16), (None, torch.bfloat16),
])  # fmt: skip
def test_a_gpu_keeps_the_checkpoints_half(own, found):
    assert fastest_dtype(config(own), GPU) == found


def test_rounding_a_float32_checkpoint_is_said(monkeypatch):
    taking(monkeypatch, float32=1.0, bfloat16=0.5)
    with pytest.warns(DtypeNotice, match="the checkpoint is float32: its weights are rounded"):
        assert fastest_dtype(config(torch.float32), CPU) == torch.bfloat16


def test_other_choices_are_the_loaders_own():
    for choice in (None, "auto", "float32", torch.float16):
        assert dtype_rule(choice) is choice


@pytest.mark.filterwarnings("ignore:bfloat16 is fastest")
def test_targets_load_in_the_fastest_type(monkeypatch, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "model")
    for seconds, found in ((0.5, torch.bfloat16), (5.0, torch.float32)):
        monkeypatch.setattr(dtypes, "product_seconds", lambda s=seconds: {
            torch.float32: 1.0, torch.bfloat16: s,
        })  # fmt: skip
        decoder = DominoDecoder.from_pretrained(
            tmp_path / "model", None, dtype="fastest", device="cpu"
        )
        assert decoder.target.dtype == found
        assert decoder.generate([5, 6], max_new_tokens=3).tokens
    plain = DominoDecoder.from_pretrained(tmp_path / "model", None, device="cpu")
    assert plain.target.dtype == torch.float32  # what gives identical tokens stays the default
    with pytest.raises(TargetError, match="dtype is 'quickest'"):
        DominoDecoder.from_pretrained(tmp_path / "model", None, dtype="quickest")
