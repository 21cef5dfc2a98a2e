import pytest

from tests.training.helpers import bigram_corpus, loaded_bigrams


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return bigram_corpus(tmp_path_factory.mktemp("bigrams"))


@pytest.fixture(scope="session")
def loaded():
    return loaded_bigrams()
