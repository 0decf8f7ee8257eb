"""Whatever the OpenAPI document allows, and what it does not, gets an answer in an envelope. scripts/fuzz goes on."""

import pytest

from tests.support.running import serving

from .fakes import FakeEngine


@pytest.mark.full  # tests/server/test_refusals.py and tests/api/test_any*.py are its short form
def test_no_request_breaks_a_route() -> None:
    from scripts._fuzz.routes import fuzz_operation, operations  # what it imports takes half a second

    with serving(FakeEngine()) as server:
        found = [(label, operation) for label, operation in operations(server.url) if _has_fake(label)]
        assert len(found) >= 8
        for number, (_, operation) in enumerate(found):
            fuzz_operation(operation, server.url, number=number, num_examples=1)


def _has_fake(label: str) -> bool:
    """The fake engine has no figures."""
    return not any(path in label for path in ("/v1/status", "/v1/cache", "/metrics", "/v1/requests"))
