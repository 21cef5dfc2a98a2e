"""What is measured, in which order, and that the baseline is no strawman."""

from collections import Counter

import pytest

from domino_spec.bench.paths import EnginePath, Prompt
from domino_spec.bench.runner import first_difference, measure, turns
from domino_spec.bench.settings import BenchSettings, Cell
from domino_spec.bench.summary import summarise
from domino_spec.decoding import PlainDecoding
from domino_spec.engine.models.base import InferenceModel
from domino_spec.errors import InputError, MismatchError
from domino_spec.targets import Target
from tests.bench.helpers import DEPTH, NEW, hopeless, journal_of, knowing, make_run, prompt_set
from tests.engine.runs import own
from tests.support.pair import bigram_target

LOOPS = ("reference", "fast")


@pytest.fixture
def forwards(monkeypatch):
    """Every forward of a target: how many tokens a sequence, and whether states were captured."""
    seen = []
    plain_forward, engine_forward = Target.forward, InferenceModel.forward

    def reference(self, tokens, cache, *, capture_layers=(), **options):
        seen.append((tokens.shape[1], bool(capture_layers)))
        return plain_forward(self, tokens, cache, capture_layers=capture_layers, **options)

    def engine(self, block, metadata, capture_layers=()):
        seen.append((block.shape[1], bool(capture_layers)))
        return engine_forward(self, block, metadata, capture_layers)

    monkeypatch.setattr(Target, "forward", reference)
    monkeypatch.setattr(InferenceModel, "forward", engine)
    return seen


@pytest.mark.parametrize("engine", LOOPS)
def test_plain_decoding_is_one_forward_a_token_and_no_more(engine, forwards, monkeypatch):
    run = make_run(engine, batches=(2,))
    drafter = run.methods[1]

    def busy(*_, **__):
        raise AssertionError("plain decoding must leave the drafter alone")

    for name in ("propose", "update_cache"):
        monkeypatch.setattr(type(drafter), name, busy)
    batch = [Prompt(0, (3, 7, 11)), Prompt(1, (4, 8, 12))]
    if engine == "fast":
        assert run.path.engines["plain"].drafter is None
    forwards.clear()
    timed = run.path.run(run.methods[0], batch, run.settings.params(0.0))
    assert forwards == [(3, False)] + [(1, False)] * (NEW - 1)
    assert timed.cycles == NEW - 1
    assert all(sequence.stats.offered == [] for sequence in timed.sequences)


def test_plain_and_drafted_share_weights():
    run = make_run("fast")
    one, other = (engine.target for engine in run.path.engines.values())
    assert one.embedding.data_ptr() == other.embedding.data_ptr()


@pytest.mark.parametrize("engine", LOOPS)
@pytest.mark.parametrize("batch", [1, 2])
def test_records_hold_what_happened(engine, batch, tmp_path):
    sets = [prompt_set(numbers=(0, 1, 2))]
    run = make_run(engine, batches=(batch,), temperatures=(0.0, 0.9), sets=sets, warm_up=0)
    journal = journal_of(run, tmp_path / "r.jsonl")
    measure(run, journal)
    (summary,) = summarise(journal.records)
    greedy, sampled = summary.cells
    assert (greedy.units, greedy.used, greedy.left_over) == (
        3 // batch,
        3 // batch * batch,
        3 % batch,
    )
    line = greedy.line("knowing")
    # A drafter that knows commits 8, then the rest of 11.
    assert line.tokens_per_cycle.value == pytest.approx((NEW - 1) / 2)
    assert line.counts.acceptance_by_position[:3] == [1.0, 1.0, 1.0]
    assert len(line.counts.offered) == DEPTH
    for found in (greedy, sampled):  # a seed gives the same text with drafts and without
        assert (found.line("knowing").same, found.line("knowing").compared) == (found.used,) * 2
        assert found.line("plain").tokens_per_cycle.value == 1.0
        assert found.line("plain").speed_up.value == 1.0
        assert found.line("plain").compared == 0
        assert found.line("knowing").repeats_agree
    cycle = line.cycle
    assert cycle.draft > 0
    assert cycle.verify > 0
    assert greedy.line("plain").cycle.draft < cycle.draft
    units = [r for r in journal.records if r["record"] == "unit"]
    for unit in units:
        for found in unit["methods"].values():
            assert len(found["seconds"]) == 2
            assert all(0 < p < s for p, s in zip(found["prefill"], found["seconds"], strict=True))
            assert found["peak_memory"] > 0
    assert all(r["environment"]["hardware"] and r["key"] == journal.key for r in journal.records)


def test_any_drafter_takes_part(tmp_path):
    run = make_run("reference", methods=[hopeless()])
    journal = journal_of(run, tmp_path / "r.jsonl")
    measure(run, journal)
    (summary,) = summarise(journal.records)
    line = summary.cells[0].line("hopeless")
    assert line.same == line.compared == 5
    assert line.tokens_per_cycle.value < 1.2
    with pytest.raises(MismatchError, match="Use the reference loop"):
        make_run("fast", methods=[hopeless()])


def test_methods_take_turns():
    names = ["plain", "a", "b"]
    firsts = Counter()
    for unit in range(30):
        order = turns(names, seed=0, cell=Cell("maths", 0.0, 1), unit=unit, repeats=3)
        assert [sorted(turn) for turn in order] == [sorted(names)] * 3
        assert {turn[0] for turn in order} == set(names)  # each repeat another one begins
        firsts[order[0][0]] += 1
    assert min(firsts.values()) >= 4
    again = turns(names, seed=0, cell=Cell("maths", 0.0, 1), unit=29, repeats=3)
    assert again == order


def test_loops_and_short_answers_are_counted_and_not_timed(tmp_path, monkeypatch):
    """The bigram target walks a cycle of 39 tokens: an answer much longer than that is a loop."""
    sets = [prompt_set(numbers=(0, 1), too_long=2)]
    run = make_run(max_new_tokens=120, repeats=1, sets=sets)
    journal = journal_of(run, tmp_path / "loops.jsonl")
    measure(run, journal)
    (summary,) = summarise(journal.records)
    (cell,) = summary.cells
    assert (cell.loops, cell.used, cell.units, cell.too_long) == (2, 0, 0, 2)
    assert cell.lines == ()
    run = make_run(shortest_answer=NEW + 1, repeats=1)
    journal = journal_of(run, tmp_path / "short.jsonl")
    measure(run, journal)
    assert summarise(journal.records)[0].cells[0].short == 5


def test_a_difference_is_found_and_placed(tmp_path):
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    run = make_run()
    honest, calls = run.path.run, []

    def lying(method, batch, params):
        timed = honest(method, batch, params)
        if method.name == "knowing" and 3 in [prompt.number for prompt in batch]:
            timed.sequences[0].output[4] = 0
        calls.append(method.name)
        return timed

    run.path.run = lying
    journal = journal_of(run, tmp_path / "r.jsonl")
    measure(run, journal)
    line = summarise(journal.records)[0].cells[0].line("knowing")
    assert (line.same, line.compared) == (4, 5)
    (wrong,) = [u for u in journal.records if u.get("prompts") == [3]]
    assert wrong["methods"]["knowing"]["rows"][0]["differs_at"] == 4


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_texts_that_need_not_agree_are_not_compared(tmp_path, rule):
    run = make_run(temperatures=(0.8,), accept=rule, repeats=1)
    journal = journal_of(run, tmp_path / "r.jsonl")
    measure(run, journal)
    assert summarise(journal.records)[0].cells[0].line("knowing").compared == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repeats": 0}, "repeats is 0; expected 1 or more."),
        ({"max_new_tokens": 1}, "max_new_tokens is 1; expected 2 or more."),
        ({"engine": "gpu"}, "engine is 'gpu'; input should be 'auto', 'fast' or 'reference'."),
        ({"engine": "reference", "adaptive": True}, "only the engine adapts"),
        ({"temperature": ()}, "no temperature"),
        ({"temperature": (0.0, 0.0)}, "a temperature is given twice: 0, 0."),
        ({"temperature": (-1.0,)}, "temperature is -1.0; expected 0 or more."),
        ({"batch_size": (0,)}, "batch_size is 0; expected 1 or more."),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        BenchSettings(target="x", **change)


def test_settings_are_recorded_as_ever():
    """They are part of a run's key: another form of them would not find its file again."""
    assert BenchSettings(target="x", engine="fast", temperature=(0.0, 1.0)).recorded() == {
        "engine": "fast", "max_new_tokens": 256, "longest_prompt": 399, "shortest_answer": 32,
        "repeats": 3, "warm_up": 1, "seed": 0, "accept": "coupled", "adaptive": False,
    }  # fmt: skip


def test_adapting_the_depth_keeps_the_text(tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    target = own(bigram_target())
    methods = [PlainDecoding(), knowing()]
    path = EnginePath(target, methods, eos=(), slots=1, capacity=64, adaptive=True)
    params = BenchSettings(target="x", max_new_tokens=NEW).params(0.0)
    for method in methods:
        path.prepare(method, 1, params)
    answers = [path.run(m, [Prompt(0, (3, 7))], params).sequences[0].output for m in methods]
    assert answers[0] == answers[1]
    assert path.engines["plain"].policy is None
    assert path.engines["knowing"].policy is not None
    path._inside = False  # as on a GPU, where a cycle is one piece
    assert path.stages(methods[1], 1, 16) is None  # and has no one depth to be divided at


def test_an_engine_whose_cycles_are_one_piece_is_divided_apart(tmp_path):
    run = make_run("fast")
    run.path._inside = False
    journal = journal_of(run, tmp_path / "r.jsonl")
    measure(run, journal)
    (stages,) = [r for r in journal.records if r["record"] == "stages"]
    assert stages["methods"]["plain"]["draft"] == 0
    assert all(found["verify"] > 0 for found in stages["methods"].values())
    assert stages["methods"]["knowing"]["draft"] > 0
    units = [r for r in journal.records if r["record"] == "unit"]
    assert all(u["methods"]["knowing"]["draft"] is None for u in units)
    (summary,) = summarise(journal.records)
    line = summary.cells[0].line("knowing")
    assert line.cycle.verify == pytest.approx(1e3 * stages["methods"]["knowing"]["verify"])
    assert summary.stage_context == stages["context"]
    assert len(journal.records) == len(units) + 3
    measure(make_run("fast"), journal_of(run, tmp_path / "r.jsonl"))  # nothing is timed twice
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == len(journal.records)
