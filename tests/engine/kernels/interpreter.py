"""Mends of Triton 3.6's interpreter: bfloat16's rounding, its dot and how it comes of integers,
loops under NumPy 2.4, and what it repeats at every call."""

from typing import Any

import numpy as np
import torch


def mend() -> None:
    """Round to nearest even, as GPUs do; multiply bfloat16 matrices as numbers; let tensors be
    bounds of a range, which NumPy 2.4 forbids to arrays of one element; patch and check less."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if getattr(InterpreterBuilder, "mended", False):
        return
    cast_impl, create_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar.is_int() and kind.scalar == tl.bfloat16:
            source = cast_impl(self, source, tl.float32)
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            wide = torch.from_numpy(np.array(source.data))
            bits = wide.to(torch.bfloat16).view(torch.uint16).numpy()
            return TensorHandle(bits, tl.bfloat16)
        return cast_impl(self, source, kind)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast_impl(self, side, tl.float32) for side in (a, b))
        return create_dot(self, a, b, *rest)

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    patch_and_check_less()
    reduce_by_xor_at_once()
    for name in ("create_fp_ext", "create_fp_trunc", "create_si_to_fp", "create_ui_to_fp"):
        setattr(InterpreterBuilder, name, cast)
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.mended = True


def reduce_by_xor_at_once() -> None:
    """Sorting does it at every step, and the interpreter number by number."""
    import triton.language as tl
    from triton.runtime.interpreter import ReduceOps

    apply_impl = ReduceOps.apply_impl

    def apply(self: Any, given: Any) -> Any:
        if self.combine_fn != tl.standard._xor_combine:
            return apply_impl(self, given)
        data = given[0].handle.data
        found = np.bitwise_xor.reduce(data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, given[0].dtype)

    ReduceOps.apply_impl = apply


def patch_and_check_less() -> None:
    """Patch the language once a kernel, not at every function it calls; let integers wrap."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        """A function that a kernel calls finds the language patched for that kernel."""
        langs = [value for value in fn.__globals__.values() if value in (tl, tl.core)]
        if langs and not any(tl.core.is_builtin(lang.load) for lang in langs):
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    interpreter._patch_lang = patch_once
    # As on a GPU; shapes of tests are too small to overflow anything.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
