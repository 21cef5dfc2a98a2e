"""What the OpenAPI description allows, and what it does not: no 500, and nothing undescribed."""

from collections import defaultdict

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from domino_spec.serving.http.app import make_app
from domino_spec.serving.http.metrics import PrometheusMeter
from domino_spec.serving.settings import ServerSettings
from tests.serving.fake import MODEL, FakeService

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


def described():
    service = FakeService(settings=ServerSettings(model=MODEL, page=False, host="0.0.0.0"))
    app = make_app(service, meter=PrometheusMeter())
    return schemathesis.openapi.from_asgi("/openapi.json", app)


seen: defaultdict[str, set[int]] = defaultdict(set)
schema = described()


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_description_is_true(case):
    response = case.call_and_validate(checks=CHECKS)
    seen[case.operation.label].add(response.status_code)


def test_that_it_got_through():
    """A fuzzer whose every request is refused at the door proves little."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert {200, 400} <= seen[f"POST {path}"]
