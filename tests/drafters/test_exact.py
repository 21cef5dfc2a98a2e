"""Every other kind of drafter decodes exactly as the target alone, whatever it drafts."""

import pytest
import torch

from domino_spec.drafters import LookupDrafter, drafter_of
from tests.support.baselines import knowing_eagle3, knowing_medusa, random_baseline
from tests.support.families import VOCAB, make_target, plain_greedy, random_prompts
from tests.support.pair import SIZE, bigram_target, successor
from tests.support.runs import run

LENGTHS = (5, 12, 1, 20)
NEW = 15
KINDS = ("medusa", "eagle3", "lookup")


def opened(kind, **changes):
    if kind == "lookup":
        return LookupDrafter(depth=5)
    return drafter_of(random_baseline(kind, **changes)).with_depth(5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_greedy_is_plain_decoding(family):
    target = make_target(family)
    # Text that repeats itself, so that lookup finds something.
    prompts = [prompt + prompt[:2] for prompt in random_prompts(LENGTHS)]
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in prompts]
    for kind in KINDS:
        for rows in (1, len(prompts)) if family == "llama" else (len(prompts),):
            found, _ = run(target, opened(kind), prompts[:rows], max_new_tokens=NEW)
            assert found == answers[:rows], (kind, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_end_at_different_times(kind):
    target = make_target("llama")
    prompts = random_prompts(LENGTHS)
    answers, _ = run(target, None, prompts, max_new_tokens=NEW, eos=range(0, VOCAB, 6))
    assert len({len(answer) for answer in answers}) > 2, "the test is blind"
    found, _ = run(target, opened(kind), prompts, max_new_tokens=NEW, eos=range(0, VOCAB, 6))
    assert found == answers


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_sampling_gives_the_text_of_plain_decoding(kind):
    target = make_target("qwen3")
    prompts = random_prompts(LENGTHS)
    options = {"max_new_tokens": NEW, "temperature": 1.3, "seed": 5, "accept": "coupled"}
    plain, _ = run(target, None, prompts, **options)
    assert run(target, opened(kind), prompts, **options)[0] == plain
    reduced = {} if kind == "lookup" else {"draft_vocab_size": 30}
    assert run(target, opened(kind, **reduced), prompts, **options)[0] == plain


QUICK = (("eagle3", "rejection"), ("lookup", "match"))


@pytest.mark.parametrize(
    ("kind", "accept"),
    [
        pytest.param(kind, accept, marks=() if (kind, accept) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for accept in ("rejection", "match")
    ],
)
def test_drawn_tokens_follow_the_target(kind, accept):
    """The distribution of the third token, against the exact one of a bigram target."""
    target = bigram_target()
    with torch.no_grad():  # two more tokens compete
        for step, weight in ((1, 0.9), (2, 0.8)):
            target.model.lm_head.weight[(successor() + step) % SIZE, torch.arange(SIZE)] = weight
    with torch.no_grad():
        states = target.model.model(torch.arange(SIZE).unsqueeze(1)).last_hidden_state
        probability = target.logits(states)[:, 0].softmax(-1)
    exact = torch.linalg.matrix_power(probability, 3)[4]
    drafter = {
        "medusa": lambda: drafter_of(knowing_medusa()),
        "lookup": lambda: LookupDrafter(depth=4),
        "eagle3": lambda: drafter_of(_eagle()),
    }[kind]()
    rows = 1500
    found, _ = run(
        target, drafter, [[9, 4, 11, 3, 4]] * rows, max_new_tokens=3, temperature=1.0, seed=1,
        accept=accept,
    )  # fmt: skip
    counts = torch.tensor([answer[2] for answer in found]).bincount(minlength=SIZE).float()
    large = exact > 0.02
    assert large.sum() >= 3
    error = (counts / rows - exact)[large].abs()
    assert (error < 4 * (exact[large] * (1 - exact[large]) / rows).sqrt()).all()


def _eagle():
    drafter = knowing_eagle3()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return drafter


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_drafter_that_knows_the_target_is_always_accepted(kind, drafts):
    """Any misalignment of states, tokens and drafts would make it fail."""
    target = bigram_target()
    drafter = knowing_medusa(heads=drafts) if kind == "medusa" else knowing_eagle3(unrolled=drafts)
    prompts = [[4, 9], [20], [1, 2, 3, 4, 5]]
    found, stats = run(target, drafter_of(drafter), prompts, max_new_tokens=31)
    assert found == [plain_greedy(target.model, prompt, 31) for prompt in prompts]
    assert stats.acceptance.accepted == stats.acceptance.offered
    assert stats.tokens_per_cycle == drafts + 1
