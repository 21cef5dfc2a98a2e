"""What the OpenAPI description allows, and what it does not: no 500, and nothing undescribed."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from domino_spec.serving.app import make_app
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.metrics import Metrics
from tests.serving.fake import MODEL, FakeService

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


def described():
    service = FakeService(config=ServerConfig(model=MODEL, page=False, host="0.0.0.0"))
    app = make_app(service, metrics=Metrics())
    return schemathesis.openapi.from_asgi("/openapi.json", app)


schema = described()
OPERATIONS = {found.ok().label: found.ok() for found in schema.get_all_operations()}
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


# Not the fuzzer's own parametrisation: its tests share a name, and only one of them would run
# where tests are spread over processes by their names.
@pytest.mark.parametrize("label", OPERATIONS)
def test_the_description_is_true(label):
    operation, seen = OPERATIONS[label], set()

    def fuzz(case):
        response = case.call_and_validate(checks=CHECKS)
        seen.add(response.status_code)

    for mode in MODES if operation.method == "post" else MODES[:1]:
        settings(
            max_examples=10, deadline=None, database=None, derandomize=True,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        )(given(case=operation.as_strategy(generation_mode=mode))(fuzz))()  # fmt: skip
    if operation.method == "post":
        assert {200, 400} <= seen, "a fuzzer whose every request is refused proves little"
