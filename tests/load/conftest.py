import pytest

from tests.load.fake import running


@pytest.fixture
def fake():
    with running() as server:
        yield server
