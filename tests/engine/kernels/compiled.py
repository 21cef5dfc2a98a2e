"""Work in a process that compiles kernels: where TRITON_INTERPRET is set, Triton cannot."""

import importlib
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
    serve(_work, imported=["triton", "transformers", "domino_spec.engine.engine"])
