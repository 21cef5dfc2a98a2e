"""Functions in forks of a process that has imported Transformers, Triton and the engine.

That takes seconds, once for all tests of a worker. It has no TRITON_INTERPRET: where that is set,
Triton cannot compile.
"""

import importlib.util
from typing import Any

from tests.support.forks import Forks, serve

_FORKS = Forks(__name__, without=("TRITON_INTERPRET", "DOMINO_KERNELS"))


def ask(module: str, function: str, *given: Any) -> Any:
    """What a function of a module returns there; what is given and returned is JSON."""
    job = {"module": module, "function": function, "given": given}
    return _FORKS.run(job)["found"]


def _work(job: dict[str, Any]) -> dict[str, Any]:
    function = getattr(importlib.import_module(job["module"]), job["function"])
    return {"found": function(*job["given"])}


if __name__ == "__main__":
    installed = [name for name in ("triton", "transformers") if importlib.util.find_spec(name)]
    if "triton" in installed:
        from triton.runtime.cache import triton_key

        triton_key()  # a second of reading, kept: else each fork that compiles reads anew
    serve(_work, imported=[*installed, "domino_spec.engine.engine"])
