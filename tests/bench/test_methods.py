"""What takes part: any drafter by path or name, each with a fingerprint of its own."""

import pytest

from domino_spec.bench.runner import open_drafters, recorded
from domino_spec.checkpoints import save_drafter
from domino_spec.errors import InputError
from domino_spec.targets import LoadedTarget
from tests.support.baselines import random_baseline
from tests.support.families import make_target, random_drafter


def test_any_kind_of_drafter_is_a_method(tmp_path):
    loaded = LoadedTarget.of(make_target("llama"))
    for kind in ("medusa", "eagle3"):
        save_drafter(random_baseline(kind), tmp_path / kind)
    save_drafter(random_drafter(), tmp_path / "domino")
    sources = [*(str(tmp_path / kind) for kind in ("domino", "medusa", "eagle3")), "lookup:4"]
    methods = open_drafters(sources, loaded)
    assert [m.name for m in methods] == ["plain", "domino", "medusa", "eagle3", "lookup:4"]
    assert [m.kind for m in methods] == ["plain", "domino", "medusa", "eagle3", "lookup"]
    records = [recorded(method) for method in methods]
    assert [record["nbytes"] > 0 for record in records] == [False, True, True, True, False]
    assert len({record["fingerprint"] for record in records}) == len(methods)
    assert [m.depth for m in methods] == [0, 7, 5, 5, 4]


def test_what_only_block_drafters_know_is_told_to_them_alone(tmp_path):
    loaded = LoadedTarget.of(make_target("llama"))
    save_drafter(random_baseline("medusa"), tmp_path / "medusa")
    save_drafter(random_drafter(), tmp_path / "domino")
    medusa, domino = str(tmp_path / "medusa"), str(tmp_path / "domino")
    methods = open_drafters([medusa, domino, "lookup"], loaded, candidates=8)
    assert [m.candidates for m in methods[1:]] == [None, 8, None]
    with pytest.raises(InputError, match="no candidates"):
        open_drafters([medusa], loaded, candidates=8)


def test_a_source_given_twice_is_refused():
    loaded = LoadedTarget.of(make_target("llama"))
    with pytest.raises(InputError, match="given twice"):
        open_drafters(["lookup", "lookup"], loaded)
