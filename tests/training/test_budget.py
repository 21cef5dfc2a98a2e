"""Runs over seconds: what counts, what does not, and where the schedule is."""

import pytest

from domino_spec.training import train
from domino_spec.training.observers import LOG_FILE, read_log
from domino_spec.training.schedule import PLACES, Budget
from domino_spec.training.state import Checkpoints
from tests.training.helpers import Reports, ready


class Clock:
    """Moves when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def steps(budget, clock, *seconds):
    for took in seconds:
        clock.now += took
        budget.count()


def test_the_first_steps_count_at_the_pace_of_the_later_ones():
    clock = Clock()
    budget = Budget(seconds=20.0, clock=clock)
    budget.begin()
    steps(budget, clock, 50.0, 9.0, 1.0)  # the compiler
    assert budget.seconds == 0
    assert budget.place(3) == 0
    steps(budget, clock, 1.0)
    assert budget.seconds == pytest.approx(4.0)  # four steps of one second
    steps(budget, clock, *[1.0] * 6)
    assert budget.seconds == pytest.approx(10.0)
    assert budget.place(10) == PLACES // 2
    assert not budget.over(10)
    assert budget.last_step(10) > 10**9
    steps(budget, clock, *[1.0] * 10)
    assert budget.over(20)
    assert budget.last_step(20) == 20
    steps(budget, clock, 5.0)
    assert budget.place(21) == PLACES, "never past the end"


def test_pauses_cost_nothing_and_earlier_runs_count():
    clock = Clock()
    budget = Budget(seconds=20.0, clock=clock)
    budget.resume(15.0)
    assert budget.place(0) == 0.75 * PLACES
    budget.begin()
    steps(budget, clock, 1.0, 1.0, 1.0)
    clock.now += 300.0  # an evaluation
    budget.pause(300.0)
    steps(budget, clock, 1.0)
    assert budget.seconds == pytest.approx(19.0)


def test_a_budget_of_steps_is_at_the_step():
    budget = Budget(steps=8)
    assert (budget.places, budget.place(3), budget.last_step(3)) == (8, 3, 8)
    assert not budget.over(7)
    assert budget.over(8)


@pytest.mark.parametrize(("most", "seconds"), [(10, 100.0), (100, 10.0)])
def test_of_steps_and_seconds_the_first_to_pass_ends_the_run(most, seconds):
    clock = Clock()
    budget = Budget(steps=most, seconds=seconds, clock=clock)
    budget.begin()
    steps(budget, clock, *[1.0] * 6)
    assert (budget.places, budget.place(6)) == (PLACES, int(0.6 * PLACES))
    assert (budget.expected_steps(6), budget.seconds_left(6)) == (10, pytest.approx(4.0))
    assert not budget.over(6)
    assert budget.last_step(6) == most
    steps(budget, clock, *[1.0] * 4)
    assert budget.over(10)
    assert budget.last_step(10) == 10


@pytest.mark.parametrize("limit", [{"steps": 100}, {"seconds": 200.0}])
def test_the_time_left_is_known_once_steps_were_timed(limit):
    clock = Clock()
    budget = Budget(**limit, clock=clock)
    budget.begin()
    steps(budget, clock, 50.0, 9.0, 1.0, 2.0, 2.0)  # the compiler, and too few to go by
    assert budget.pace is budget.seconds_left(5) is None
    steps(budget, clock, 2.0)
    assert (budget.pace, budget.expected_steps(6)) == (2.0, 100)
    assert budget.share(6) == pytest.approx(0.06)
    assert budget.seconds_left(6) == pytest.approx(188.0)
    steps(budget, clock, *[2.0] * 4)
    clock.now += 10.0  # one evaluation in ten steps: a second a step
    budget.pause(10.0)
    assert budget.seconds_left(10) == pytest.approx(270.0)
    steps(budget, clock, *[2.0] * 90)
    assert (budget.share(100), budget.seconds_left(100)) == (1.0, 0.0)


@pytest.fixture
def clocked(monkeypatch):
    """A step takes a second, whatever it does."""
    clock = Clock()
    count = Budget.count

    def counted(self):
        clock.now += 1.0
        count(self)

    monkeypatch.setattr(Budget, "count", counted)
    monkeypatch.setattr(Budget, "pause", lambda self, seconds: None)
    make = Budget.__init__
    monkeypatch.setattr(
        Budget, "__init__", lambda self, **options: make(self, **{**options, "clock": clock})
    )


CURRICULUM = {"curriculum_ratio": 1.0, "base_weight": 0.0}
TIMED = {"steps": None, "max_seconds": 12.0, "save_every": None, "log_every": 1}


def test_a_run_over_seconds_ends_where_its_schedule_ends(tmp_path, corpus, loaded, clocked):
    reports = Reports()
    run = ready(tmp_path / "run", corpus, loaded, reports, **TIMED, **CURRICULUM, eval_every=None)
    outcome, folder = train(run)
    assert outcome.finished
    assert outcome.step == 12
    assert folder is not None
    rates = [values["learning_rate"] for _, values in reports.trained]
    shares = [values["lambda"] for _, values in reports.trained]
    assert max(rates) == pytest.approx(3e-3, rel=0.25)
    assert rates[-1] < 0.1 * max(rates)
    assert shares[0] == 1.0
    assert shares[-1] == pytest.approx(1 / 12, abs=1e-3)
    tenths = [4, 5, 6, 8, 9, 10, 11, 12]  # no time has passed before step 4
    assert [step for step, _ in reports.evaluated] == tenths
    assert Checkpoints(tmp_path / "run", keep=2).steps() == tenths[-2:]
    left = [values.get("seconds_left") for _, values in reports.trained]
    assert left == [None] * 5 + [6, 5, 4, 3, 2, 1, 0]
    assert reports.trained[-1][1]["training_seconds"] == pytest.approx(12.0)


def test_a_run_over_epochs_and_seconds(tmp_path, corpus, loaded, clocked):
    short = {"steps": None, "epochs": 1, "save_every": 0, "eval_every": 0}
    epoch = ready(tmp_path / "one", corpus, loaded, **short).config.steps
    for name, seconds, made in (("steps", 10 * epoch, epoch), ("seconds", epoch // 2, epoch // 2)):
        run = ready(tmp_path / name, corpus, loaded, max_seconds=float(seconds), **short)
        outcome, _ = train(run)
        assert (outcome.finished, outcome.step) == (True, made)


@pytest.mark.parametrize("over", [{"max_seconds": 40.0, "steps": None}, {"steps": 40}])
def test_the_plan_is_told_when_the_pace_is_known(tmp_path, corpus, loaded, clocked, over):
    told = []

    class Listens:
        def report(self, step, values):
            told.append((step, values))

        def close(self):
            pass

    train(ready(tmp_path / "run", corpus, loaded, Listens(), log_every=50, save_every=0, **over))
    (step, values), _ = told
    assert (step, values["seconds_per_step"], values["seconds_left"]) == (6, 1.0, 34.0)
    if "max_seconds" in over:  # the steps of the other are known before
        assert (values["plan"]["steps"], values["plan"]["tokens"]) == (40, 40 * 2 * 64)
    else:
        assert "plan" not in values
    lines = read_log(tmp_path / "run" / LOG_FILE)
    assert [line["step"] for line in lines] == [6, 40]


def test_a_resumed_run_has_only_the_rest(tmp_path, corpus, loaded, clocked):
    class Stop:
        def report(self, step, values):
            if step == 7:
                raise RuntimeError("stopped")

        def close(self):
            pass

    settings = {**TIMED, "save_every": 5}
    with pytest.raises(RuntimeError, match="stopped"):
        train(ready(tmp_path / "run", corpus, loaded, Stop(), **settings))
    again = ready(tmp_path / "run", corpus, loaded, resume=True, **settings)
    assert again.trainer.step == 5
    assert again.trainer.budget.seconds == pytest.approx(5.0)
    outcome, _ = train(again)
    assert outcome.step == 12
