"""A kernel that may come early touches nothing but weights until it has waited."""

import ast
from pathlib import Path

import pytest
import torch

from domino_spec.engine.kernels import overlap

EARLY = {"weight", "inner", "source"}  # what kernels call their weights, or a choice of them
HARMLESS = {  # what may be called before the wait: these read no memory, or a weight's alone
    "tl.program_id", "tl.arange", "tl.where", "tl.minimum", "tl.cdiv", "tl.load",
    "let_next_come", "wait_for_last", "ask_for", "_rows_of",
}  # fmt: skip


def overlapping() -> dict[str, ast.FunctionDef]:
    """Every kernel that can be launched so, by module and name."""
    paths = [path for path in Path(overlap.__file__).parent.glob("*.py") if path.stem != "overlap"]
    return {
        f"{path.stem}.{node.name}": node
        for path in sorted(paths)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and "OVERLAP" in [argument.arg for argument in node.args.args]
    }


KERNELS = overlapping()


def called(node: ast.AST) -> list[tuple[str, ast.Call]]:
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return [(ast.unparse(call.func), call) for call in calls]


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_but_weights_is_touched_before_the_wait(name: str) -> None:
    body = KERNELS[name].body
    waits = [
        place
        for place, line in enumerate(body)
        if isinstance(line, ast.Expr) and ast.unparse(line) == "wait_for_last(OVERLAP)"
    ]
    assert len(waits) == 1, "every program waits, whatever branch it takes"
    for line in body[: waits[0]]:
        assert isinstance(line, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign), (
            f"{ast.unparse(line)} might end the program before it waits"
        )
        for function, call in called(line):
            assert function in HARMLESS or function.endswith(".to"), ast.unparse(line)
            if function == "tl.load":
                roots = {n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)}
                assert roots & EARLY, ast.unparse(line)


@pytest.mark.parametrize("name", ["split_attention._join", "rollout_vocabulary._read"])
def test_what_lives_off_the_memorys_speed_comes_last(name: str) -> None:
    """Let in earlier it took longer: measured, up to a seventh of a cycle."""
    assert ast.unparse(KERNELS[name].body[-1]) == "let_next_come(OVERLAP)"


@pytest.mark.parametrize(
    "name", ["few_rows._few_rows", "split_attention._attend", "rollout_vocabulary._score"]
)
def test_a_kernel_that_reads_much_has_read_it_when_the_next_one_comes(name: str) -> None:
    body = KERNELS[name].body
    loops = [
        place
        for place, line in enumerate(body)
        if isinstance(line.body[0] if isinstance(line, ast.If) else line, ast.For)
    ]
    come = [ast.unparse(line) for line in body].index("let_next_come(OVERLAP)")
    assert come == loops[-1] + 1


def test_every_launch_that_may_overlap_is_of_such_a_kernel() -> None:
    assert {name.split(".")[0] for name in KERNELS} == {
        path.stem
        for path in Path(overlap.__file__).parent.glob("*.py")
        if "import overlap\n" in path.read_text()
    }


def test_it_can_be_switched_off_and_is_off_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlap.overlap(torch.zeros(1)) == {"OVERLAP": False}
    far = torch.zeros(1, device="meta")
    assert overlap.overlap(far) == {"OVERLAP": True, "launch_pdl": True}
    monkeypatch.setenv(overlap.SWITCH, "off")
    assert overlap.overlap(far) == {"OVERLAP": False}
