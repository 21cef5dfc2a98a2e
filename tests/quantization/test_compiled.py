"""The kernel is compiled once for a machine; where it cannot be, PyTorch gives the same."""

import multiprocessing
import threading
import warnings

import pytest
import torch

from domino_spec.quantization import QuantizedWeight, compiled, reference
from domino_spec.quantization.compiled import Kernel, KernelNotice, kernel
from domino_spec.quantization.rows import KeyRanges, attend, rms_norm, silu


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not asked for the kernel yet, with a cache of its own."""
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_FLAGS", (*compiled._FLAGS, "-O0"))  # a tenth of the time
    kernel.cache_clear()
    yield tmp_path
    kernel.cache_clear()


def product(kind: str = "Q4_1") -> tuple[QuantizedWeight, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = QuantizedWeight.quantize(torch.randn(9, 96, generator=generator), kind)
    return weight, torch.randn(5, 96, generator=generator)


@pytest.fixture(params=["dtype", "device"])
def _other_default(request):
    """PyTorch's defaults are the caller's: C reads and writes float32 on the CPU."""
    kernel()  # loads the library
    before = torch.get_default_dtype()
    if request.param == "dtype":
        torch.set_default_dtype(torch.bfloat16)
    else:
        torch.set_default_device("meta")
    yield
    torch.set_default_dtype(before)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_other_default")
def test_the_default_type_and_device_do_not_matter():
    compiled._check(kernel())
    ranges = KeyRanges.of([(0, 0, 2)], [[3]])
    states = torch.randn(1, 2, 4, 8, device="cpu", dtype=torch.float32)
    mixed = attend(states[0, :, :1].transpose(0, 1), states, states, ranges, 0.3)
    weight = QuantizedWeight.quantize(states.view(2, 32), "Q8_0")
    for found in (mixed, weight[slice(1, 2)].dequantize(), weight.linear(states.view(2, 32))):
        assert found.dtype is torch.float32
        assert found.isfinite().all()


def test_what_c_would_take_for_something_else_is_refused():
    weight, x = product()
    rows = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"found torch\.int32 on cpu, expected torch\.int64"):
        kernel().rows(weight.tiles, weight.kind, rows)
    with pytest.raises(TypeError, match=r"on meta, expected torch\.float32 on the CPU"):
        kernel().rms_norm(x, torch.empty(96, device="meta"), 1e-5)


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_failing_compiler_is_said_once(fresh, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    weight, x = product()
    with pytest.warns(KernelNotice, match=f"PyTorch's operations.*{compiler}") as said:
        found = weight.linear(x)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert torch.equal(found, reference.linear(weight.unpack(), weight.kind, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight.linear(x)


def test_no_compiler_on_the_path(fresh, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.warns(KernelNotice, match="install one"):
        assert kernel() is None


@pytest.mark.parametrize("name", ["linear", "rows", "rms_norm", "silu", "attend"])
def test_a_kernel_that_computes_something_else_is_refused(monkeypatch, name):
    own, loaded = getattr(Kernel, name), compiled._load()
    kernel.cache_clear()
    monkeypatch.setattr(Kernel, name, lambda *inputs: own(*inputs) * 1.001)
    monkeypatch.setattr(compiled, "_load", lambda: loaded)
    with pytest.warns(KernelNotice, match="is not the reference's"):
        assert kernel() is None
    kernel.cache_clear()


def test_the_switch_turns_it_off(fresh, monkeypatch):
    monkeypatch.setenv("DOMINO_KERNELS", "off")
    weight, x = product()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = weight.linear(x)
    assert kernel() is None
    assert not list(fresh.iterdir())
    assert torch.equal(found, reference.linear(weight.unpack(), weight.kind, x))


def test_two_processes_at_once_leave_one_library(fresh):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=compiled._load) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(100)
    assert [process.exitcode for process in both] == [0, 0]
    made = list((fresh / "kernels").iterdir())
    assert [path.suffix for path in made] == [".so"]
    before = made[0].stat().st_mtime_ns
    assert kernel() is not None
    assert made[0].stat().st_mtime_ns == before  # found, not made again


def test_what_is_compiled_ahead_is_not_compiled_again(fresh, monkeypatch):
    run, ran = compiled._run, []
    monkeypatch.setattr(compiled, "_run", lambda command: ran.append(command) or run(command))
    compiled.compile_ahead()
    assert kernel() is not None
    assert sum(str(compiled._SOURCE) in command for command in ran) == 1


def test_a_failure_ahead_is_said_where_the_kernel_is_wanted(fresh, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.compile_ahead()
        for thread in threading.enumerate():
            if thread.name == "compile":
                thread.join()
    with pytest.warns(KernelNotice, match="no-such-compiler"):
        assert kernel() is None


def test_vectors_and_plain_c_give_the_same(fresh, monkeypatch):
    """On machines whose vectors the kernel does not know; here the cache cannot be written, too."""
    file = fresh / "file"
    file.touch()
    monkeypatch.setenv("DOMINO_CACHE", str(file))
    monkeypatch.setattr(compiled, "_FLAGS", (*compiled._FLAGS, "-DDOMINO_SCALAR"))
    plain = compiled._load()
    compiled._check(plain)  # products of every kind
    x, weight = torch.randn(2, 3, 50).unbind()
    torch.testing.assert_close(plain.rms_norm(x, weight[0], 1e-6), rms_norm(x, weight[0], 1e-6))
    torch.testing.assert_close(plain.silu(x), silu(x))
