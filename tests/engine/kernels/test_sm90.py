"""Every kernel compiles with production shapes, for the H200 and for others, and fits there."""

import pytest

from tests.engine.kernels import sm90

pytestmark = pytest.mark.compiled

CANDIDATES = ("best", "best_drawn")
VOCABULARY = ("everything", "everything_drawn")
TREES = ("tree", "tree_drawn")


def launched(*shapes, arch=90):
    return sm90.launched("tests.engine.kernels.launches", *shapes, arch=arch)


def test_attention():
    found = launched("plain")
    sm90.assert_fits(found["plain"])
    assert found["plain"].keys() == {"_rotate", "_attend", "_join"}


def test_a_drafters_window_and_sink_tokens():
    found = launched("windowed_sinks")
    sm90.assert_fits(found["windowed_sinks"])
    assert found["windowed_sinks"].keys() == {"_rotate", "_attend", "_join"}


def test_sequences_of_different_lengths():
    found = launched("ragged")
    sm90.assert_fits(found["ragged"])
    assert found["ragged"].keys() == {"_attend", "_margins", "_lengths", "_pad_tokens", "_learn"}


def test_what_stands_between_products():
    found = launched("norms")
    sm90.assert_fits(found["norms"])
    assert found["norms"].keys() == {"_weigh", "_add_and_weigh", "_gate"}


def test_experts_are_two_launches():
    found = launched("mixture")
    sm90.assert_fits(found["mixture"])
    assert {name: needs["launches"] for name, needs in found["mixture"].items()} == {"_experts": 4}


def test_weights_of_few_bits():
    found = launched("few_bits")
    sm90.assert_fits(found["few_bits"])
    launches = {name: needs["launches"] for name, needs in found["few_bits"].items()}
    assert launches == {"_few_rows": 3, "_dequantize": 1}


@pytest.mark.parametrize("shapes", CANDIDATES)
def test_rollout_over_candidates_is_one_launch_a_draft(shapes):
    found = launched(shapes)
    sm90.assert_fits(found[shapes])
    launches = {name: needs["launches"] for name, needs in found[shapes].items()}
    assert launches == {"_step": 15, "_last": 1}


def test_trees_are_two_launches_a_depth_or_one():
    found = launched(*TREES)
    for shapes in TREES:
        sm90.assert_fits(found[shapes])
    launches = {name: needs["launches"] for name, needs in found["tree"].items()}
    ends = {"_commit_tree": 1, "_compact": 1}
    assert launches == {"_advance": 15, "_multiply": 15, "_finish": 1, **ends}
    assert {name: needs["launches"] for name, needs in found["tree_drawn"].items()} == {
        "_search": 1
    }


@pytest.mark.parametrize("shapes", VOCABULARY)
def test_rollout_over_the_vocabulary_is_two(shapes):
    found = launched(shapes)
    sm90.assert_fits(found[shapes])
    launches = {name: needs["launches"] for name, needs in found[shapes].items()}
    assert launches == {"_read": 15, "_score": 15, "_last": 1}


# Other architectures ------------------------------------------------------------------------------

OTHERS = [arch for arch in sm90.ROOM if arch != 90]


def assert_all_fit(arch, *shapes):
    for found in launched(*shapes, arch=arch).values():
        sm90.assert_fits(found, arch=arch)


@pytest.mark.parametrize("arch", sm90.ROOM)
def test_attention_of_other_shapes(arch):
    assert_all_fit(
        arch, "block", "windowed", "widest", "narrow", "wide", "wide_token",
        "partly_rotated", "sinks",
    )  # fmt: skip


@pytest.mark.parametrize("arch", sm90.ROOM)
@pytest.mark.parametrize(("shapes", "spills"), [("exact", 1024), ("branched", 32), ("uneven", 32)])
def test_attention_that_spills_a_few_numbers_finds_room(shapes, spills, arch):
    """Registers do not suffice, which costs time; shared memory must.

    A tree's mask takes the last of them on every architecture, heads of 96 on sm_120.
    """
    found = launched(shapes, arch=arch)[shapes]
    assert found["_attend"]["shared"] <= sm90.ROOM[arch]
    assert found["_attend"]["spills"] <= spills  # bytes; not whole tiles


@pytest.mark.parametrize("arch", OTHERS)
def test_attention_and_products_elsewhere(arch):
    """Weights of 8-bit floats need sm_89."""
    few_bits = ["few_bits"] if arch >= 89 else []
    assert_all_fit(arch, "plain", "windowed_sinks", "product", "mixture", "norms", *few_bits)


@pytest.mark.parametrize("arch", OTHERS)
def test_rollouts_and_trees_elsewhere(arch):
    assert_all_fit(arch, "ragged", *CANDIDATES, *VOCABULARY, *TREES)
