"""What the OpenAPI description allows, and what it does not: no 500, and nothing undescribed."""

import pytest

from domino_spec.serving.app import make_app
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.metrics import Metrics
from tests.serving.fake import MODEL, FakeService
from tests.serving.scripted import TEMPLATE


@pytest.mark.parametrize("examples", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_the_description_is_true(examples):
    import schemathesis  # for seconds, and needed here alone
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode, checks
    from schemathesis.specs.openapi import checks as openapi

    service = FakeService(config=ServerConfig(model=MODEL, page=False, host="0.0.0.0"))
    service.tokenizer.chat_template = TEMPLATE  # which takes tools
    app = make_app(service, metrics=Metrics())
    described = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) > 5
    wanted = [
        checks.not_a_server_error,
        openapi.content_type_conformance,
        openapi.response_schema_conformance,
        openapi.status_code_conformance,
    ]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    for operation in operations:
        seen = set()

        def fuzz(case):
            seen.add(case.call_and_validate(checks=wanted).status_code)  # noqa: B023

        for mode in modes if operation.method == "post" else modes[:1]:
            settings(
                max_examples=examples, deadline=None, database=None, derandomize=True,
                phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
            )(given(case=operation.as_strategy(generation_mode=mode))(fuzz))()  # fmt: skip
        if operation.method == "post":
            refused_all = (
                f"{operation.label}: a fuzzer whose every request is refused proves little"
            )
            assert {200, 400} <= seen, refused_all
