"""Every kernel compiles for the H200 with production shapes and fits there."""

import pytest

from tests.engine.kernels import sm90


@pytest.mark.parametrize("shapes", [
    "plain", *(pytest.param(name, marks=pytest.mark.slow)
               for name in ("block", "windowed", "widest", "narrow", "wide")),
])  # fmt: skip
def test_attention(shapes):
    found = sm90.launched("tests.engine.kernels.launches", shapes)
    sm90.assert_fits(found)
    assert found.keys() == {"_rotate", "_attend", "_join"}


@pytest.mark.slow
def test_attention_in_float32_finds_room():
    """Its registers do not suffice, which costs time; shared memory must."""
    found = sm90.launched("tests.engine.kernels.launches", "exact")
    assert found["_attend"]["shared"] <= sm90.ROOM
    assert found["_attend"]["spills"] < 1024  # a few numbers, not whole tiles


@pytest.mark.parametrize("shapes", ["best", "best_drawn"])
def test_rollout_over_candidates_is_one_launch_a_draft(shapes):
    found = sm90.launched("tests.engine.kernels.launches", shapes)
    sm90.assert_fits(found)
    assert {name: needs["launches"] for name, needs in found.items()} == {"_step": 15, "_last": 1}


@pytest.mark.parametrize("shapes", ["everything", "everything_drawn"])
def test_rollout_over_the_vocabulary_is_two(shapes):
    found = sm90.launched("tests.engine.kernels.launches", shapes)
    sm90.assert_fits(found)
    launches = {name: needs["launches"] for name, needs in found.items()}
    assert launches == {"_read": 15, "_score": 15, "_last": 1}
