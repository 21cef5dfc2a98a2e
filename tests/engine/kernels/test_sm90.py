"""Every kernel compiles for the H200 with production shapes and fits there; some for others too."""

import pytest

from tests.engine.kernels import sm90

CANDIDATES = ("best", "best_drawn")
VOCABULARY = ("everything", "everything_drawn")
TREES = ("tree", "tree_drawn")


@pytest.fixture(scope="module")
def found():
    shapes = (
        "plain", "windowed_sinks", "ragged", "mixture", "norms", "few_bits", *CANDIDATES,
        *VOCABULARY, *TREES,
    )  # fmt: skip
    return sm90.launched("tests.engine.kernels.launches", *shapes)


def test_attention(found):
    sm90.assert_fits(found["plain"])
    assert found["plain"].keys() == {"_rotate", "_attend", "_join"}


def test_a_drafters_window_and_sink_tokens(found):
    sm90.assert_fits(found["windowed_sinks"])
    assert found["windowed_sinks"].keys() == {"_rotate", "_attend", "_join"}


def test_sequences_of_different_lengths(found):
    sm90.assert_fits(found["ragged"])
    assert found["ragged"].keys() == {"_attend", "_margins", "_lengths", "_pad_tokens", "_learn"}


def test_what_stands_between_products(found):
    sm90.assert_fits(found["norms"])
    assert found["norms"].keys() == {"_weigh", "_add_and_weigh", "_gate"}


def test_experts_are_two_launches(found):
    sm90.assert_fits(found["mixture"])
    assert {name: needs["launches"] for name, needs in found["mixture"].items()} == {"_experts": 4}


def test_weights_of_few_bits(found):
    sm90.assert_fits(found["few_bits"])
    launches = {name: needs["launches"] for name, needs in found["few_bits"].items()}
    assert launches == {"_few_rows": 3, "_dequantize": 1}


@pytest.mark.slow
def test_attention_of_other_shapes():
    shapes = (
        "block",
        "branched",
        "windowed",
        "widest",
        "narrow",
        "uneven",
        "wide",
        "partly_rotated",
        "sinks",
    )
    for found in sm90.launched("tests.engine.kernels.launches", *shapes).values():
        sm90.assert_fits(found)


@pytest.mark.slow
def test_attention_in_float32_finds_room():
    """Its registers do not suffice, which costs time; shared memory must."""
    found = sm90.launched("tests.engine.kernels.launches", "exact")["exact"]
    assert found["_attend"]["shared"] <= sm90.ROOM[90]
    assert found["_attend"]["spills"] < 1024  # a few numbers, not whole tiles


@pytest.mark.parametrize("shapes", CANDIDATES)
def test_rollout_over_candidates_is_one_launch_a_draft(found, shapes):
    sm90.assert_fits(found[shapes])
    launches = {name: needs["launches"] for name, needs in found[shapes].items()}
    assert launches == {"_step": 15, "_last": 1}


def test_trees_are_two_launches_a_depth_or_one(found):
    for shapes in TREES:
        sm90.assert_fits(found[shapes])
    launches = {name: needs["launches"] for name, needs in found["tree"].items()}
    ends = {"_commit_tree": 1, "_compact": 1}
    assert launches == {"_advance": 15, "_multiply": 15, "_finish": 1, **ends}
    assert {name: needs["launches"] for name, needs in found["tree_drawn"].items()} == {
        "_search": 1
    }


@pytest.mark.parametrize("shapes", VOCABULARY)
def test_rollout_over_the_vocabulary_is_two(found, shapes):
    sm90.assert_fits(found[shapes])
    launches = {name: needs["launches"] for name, needs in found[shapes].items()}
    assert launches == {"_read": 15, "_score": 15, "_last": 1}


# Other architectures ------------------------------------------------------------------------------

OTHERS = [arch for arch in sm90.ROOM if arch != 90]
ALL = (
    "plain", "windowed_sinks", "ragged", "mixture", "norms", "product", *CANDIDATES, *VOCABULARY,
    *TREES, "block", "branched", "windowed", "widest", "narrow", "uneven", "wide",
    "partly_rotated", "sinks",
)  # fmt: skip


def fits_elsewhere(arch, *shapes):
    for each in sm90.launched("tests.engine.kernels.launches", *shapes, arch=arch).values():
        sm90.assert_fits(each, arch=arch)


@pytest.mark.parametrize("arch", OTHERS)
def test_the_product_with_most_steps_on_their_way_has_room(arch):
    fits_elsewhere(arch, "product")


def test_attention_with_the_largest_tiles_has_room():
    fits_elsewhere(89, "wide_token")


@pytest.mark.slow
@pytest.mark.parametrize("arch", OTHERS)
def test_every_kernel_on_every_architecture(arch):
    """Weights of 8-bit floats aside, which need sm_89."""
    fits_elsewhere(arch, *ALL, *(["few_bits"] if arch >= 89 else []))
    exact = sm90.launched("tests.engine.kernels.launches", "exact", arch=arch)["exact"]
    assert exact["_attend"]["shared"] <= sm90.ROOM[arch]
