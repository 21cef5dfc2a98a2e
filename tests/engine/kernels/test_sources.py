"""Sources of drafts over the kernels themselves: Medusa, EAGLE-3 and lookup as a GPU runs them."""

import pytest
import torch

from domino_spec.drafters import LookupDrafter, drafter_of
from domino_spec.engine.engine import Engine
from domino_spec.engine.model_runner import Plan
from tests.engine.runs import finish, make_requests, own
from tests.support.baselines import knowing_eagle3, knowing_medusa
from tests.support.families import plain_greedy
from tests.support.pair import bigram_target, successor

SIZE = 64  # heads of 16, which is as narrow as the kernels take
DRAFTS, NEW = 2, 4
PROMPTS = [[4, 9, 4]]
TABLE = successor(SIZE)
SOURCES = {
    "medusa": lambda: drafter_of(knowing_medusa(heads=DRAFTS, table=TABLE)),
    "eagle3": lambda: drafter_of(knowing_eagle3(unrolled=DRAFTS, size=SIZE)),
    "lookup": lambda: LookupDrafter(depth=DRAFTS),
}


@pytest.mark.parametrize("kind", [
    "eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("medusa", "lookup")),
])  # fmt: skip
def test_drafts_are_right_and_what_fills_up_a_batch_changes_nothing(kind, device):
    target = bigram_target(TABLE)
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in PROMPTS]
    target.model.to(device)
    engine = Engine(own(target), SOURCES[kind](), slots=2, capacity=24, pack=False, graphs=False)
    sequences = make_requests(PROMPTS, max_new_tokens=NEW)
    for sequence in sequences:
        engine.add_request(sequence)
    engine.step()
    spare = engine.slots.spare
    engine.runner.run_cycle(torch.tensor([spare, spare], device=device), Plan(DRAFTS))
    finish(engine)
    assert [sequence.output for sequence in sequences] == answers
    if kind != "lookup":
        assert all(each.stats.accepted == each.stats.offered for each in sequences)
