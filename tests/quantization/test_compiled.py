"""The kernel is compiled once for a machine; where it cannot be, PyTorch gives the same."""

import multiprocessing
import os
import platform
import re

import pytest
import torch

from domino_spec.quantization import QuantizedWeight, compiled, reference
from domino_spec.quantization.check import check
from domino_spec.quantization.compiled import Kernel, kernel
from domino_spec.quantization.rows import KeyRanges, attend, rms_norm, silu


def forget() -> None:
    kernel.cache_clear()
    compiled._found.cache_clear()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not asked for the kernel yet, with a cache of its own.

    Its compiler gives it this session's library, which is the right one, and writes down its name.
    """
    assert kernel() is not None
    own, compiler = compiled._cached(), tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'echo "$2" >> {tmp_path}/made\ncp {own} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_check", lambda made: None)  # seconds, in another process
    forget()
    yield tmp_path
    forget()


def compilations(folder) -> int:
    made = folder / "made"
    return len(made.read_text().splitlines()) if made.exists() else 0


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
    check(kernel())
    ranges = KeyRanges.of([(0, 0, 2)], [[3]])
    states = torch.randn(1, 2, 4, 8, device="cpu", dtype=torch.float32)
    mixed = attend(states[0, :, :1].transpose(0, 1), states, states, ranges, 0.3)
    weight = QuantizedWeight.quantize(states.view(2, 32), "Q8_0")
    for found in (mixed, weight[slice(1, 2)].dequantize(), weight.linear(states.view(2, 32))):
        assert found.dtype is torch.float32
        assert found.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_token_attends_as_it_would_alone_to_the_last_bit(threads):
    """However many go through the keys together, of one sequence or several, with extras or not."""
    generator = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, 2, 3, 700, 64, generator=generator)
    for tokens in (2, 3, 5, 8, 11, 17):
        query = torch.randn(tokens, 6, 64, generator=generator)
        spans = [(t % 5 // 4, t % 7, 600 + 3 * t) for t in range(tokens)]
        extras = [list(range(690, 690 + t % 3)) for t in range(tokens)]
        seen = KeyRanges.of(spans, extras)
        found = kernel().attend(query, keys, values, seen.spans, seen.extras, 0.3, threads)
        for t in range(tokens):
            own = KeyRanges.of(spans[t : t + 1], extras[t : t + 1])
            given = (query[t : t + 1], keys, values, own.spans, own.extras, 0.3)
            assert torch.equal(found[t : t + 1], kernel().attend(*given, 1))
            torch.testing.assert_close(found[t : t + 1], reference.attend(*given))


def test_what_c_would_take_for_something_else_is_refused():
    weight, x = product()
    rows = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"found torch\.int32 on cpu, expected torch\.int64"):
        kernel().rows(weight.tiles, weight.kind, rows)
    with pytest.raises(TypeError, match=r"on meta, expected torch\.float32 on the CPU"):
        kernel().rms_norm(x, torch.empty(96, device="meta"), 1e-5)


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_that_works_the_reference_is_there(fresh, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    weight, x = product()
    found = weight.linear(x)
    reason = compiled.unsupported_reason()
    assert compiler in reason
    assert "\n" not in reason
    assert torch.equal(found, reference.linear(weight.unpack(), weight.kind, x))


def test_no_compiler_on_the_path(fresh, monkeypatch):
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(fresh))
    assert kernel() is None
    assert "install one" in compiled.unsupported_reason()


def test_a_cached_library_needs_no_compiler(fresh, monkeypatch):
    assert kernel() is not None
    forget()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(fresh))
    assert kernel() is not None


def test_a_cached_library_that_does_not_load_is_made_again(fresh):
    compiled._cached().parent.mkdir(parents=True, mode=0o755)
    compiled._cached().write_bytes(b"cut short")
    assert kernel() is not None
    assert compilations(fresh) == 1


@pytest.mark.parametrize("name", ["linear", "rows", "rms_norm", "silu", "attend"])
def test_a_kernel_that_computes_something_else_is_refused(monkeypatch, name):
    found, own = kernel(), getattr(Kernel, name)
    check(found)
    monkeypatch.setattr(Kernel, name, lambda *inputs: own(*inputs) * 1.001)
    with pytest.raises(RuntimeError, match="is not the reference's"):
        check(found)


def test_a_library_that_ends_its_process_is_not_loaded(fresh, monkeypatch):
    """By instructions that this CPU does not know, say."""
    monkeypatch.undo()
    monkeypatch.setenv("DOMINO_CACHE", str(fresh))
    source = fresh / "wrong.c"
    source.write_text("__attribute__((constructor)) static void run(void) { __builtin_trap(); }")
    monkeypatch.setattr(compiled, "_SOURCE", source)
    assert kernel() is None
    assert re.search("quantization.check .* ended with -", compiled.unsupported_reason())
    assert not list((fresh / "kernels").iterdir())


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has such owners and modes")
def test_what_others_may_have_written_is_not_loaded(fresh, monkeypatch):
    def made_again() -> bool:
        before = compilations(fresh)
        forget()
        assert kernel() is not None
        return compilations(fresh) > before

    assert made_again()
    path = compiled._cached()
    assert not made_again()
    path.chmod(0o775)
    assert made_again()
    assert not made_again()  # put right
    path.parent.chmod(0o777)
    assert made_again()
    assert made_again()  # and nothing kept there
    path.parent.chmod(0o755)
    assert not made_again()
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert made_again() == (owner != 0)  # root may write what it likes


def test_the_switch_turns_it_off(fresh, monkeypatch):
    monkeypatch.setenv("DOMINO_KERNELS", "off")
    assert kernel() is None
    assert compiled.unsupported_reason() == "DOMINO_KERNELS is off"
    assert not compilations(fresh)


def test_two_processes_at_once_leave_one_library(fresh):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=compiled._load) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(100)
    assert [process.exitcode for process in both] == [0, 0]
    assert list((fresh / "cache" / "kernels").iterdir()) == [compiled._cached()]
    before = compilations(fresh)
    assert kernel() is not None
    assert compilations(fresh) == before  # found, not made again


@pytest.mark.parametrize("writable", [True, False])
def test_what_is_compiled_ahead_is_not_compiled_again(fresh, monkeypatch, writable):
    if not writable:
        (fresh / "cache").touch()  # no folder can be made there
    compiled.compile_ahead()
    assert kernel() is not None
    assert compilations(fresh) == 1


def test_a_failure_ahead_is_not_tried_again(fresh, monkeypatch):
    (fresh / "compiler").write_text(f"#!/bin/sh\necho tried >> {fresh}/made\nexit 3\n")
    compiled.compile_ahead()
    assert kernel() is None
    assert "ended with 3" in compiled.unsupported_reason()
    assert compilations(fresh) == 1


X86 = platform.machine() in ("x86_64", "AMD64")
LEVELS = {"AVX2": ["-march=x86-64-v3"], "AVX512": ["-march=x86-64-v3", "-march=x86-64-v4"]}


@pytest.mark.parametrize(
    "flag", ["-DDOMINO_SCALAR", *LEVELS.get(torch.backends.cpu.get_cpu_capability() * X86, [])]
)
def test_every_level_of_vectors_gives_the_same(tmp_path, monkeypatch, flag):
    """Those that this CPU has, besides its own, and what other machines than these compile."""
    assert kernel() is not None  # this process's own, made as usual
    made = tmp_path / "new.so"
    monkeypatch.setattr(compiled, "_FLAGS", (*compiled._FLAGS, "-O0"))  # a tenth of the time
    monkeypatch.setattr(compiled, "_native", lambda: flag)
    compiled._compile(made)
    found = Kernel(made)
    names = {
        "-DDOMINO_SCALAR": "plain C",
        "-march=x86-64-v3": "AVX2",
        "-march=x86-64-v4": "AVX-512",
    }
    assert found.instructions == names[flag]
    check(found)  # products of every kind
    x, weight = torch.randn(2, 3, 50).unbind()
    torch.testing.assert_close(found.rms_norm(x, weight[0], 1e-6), rms_norm(x, weight[0], 1e-6))
    torch.testing.assert_close(found.silu(x), silu(x))
