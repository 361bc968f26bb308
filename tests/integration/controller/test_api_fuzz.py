"""Whatever the schema allows, and much it does not: no request makes the API fail on its own account."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from schemathesis import Case, GenerationMode
    from schemathesis.schemas import APIOperation

ENDLESS = "/api/events"


@pytest.mark.timeout(300)
def test_no_request_makes_the_controller_fail(cluster: Cluster) -> None:
    import schemathesis  # two seconds of imports, which the other processes of a run can do without
    from schemathesis.core.result import Ok

    schema = schemathesis.openapi.from_url(f"{cluster.members[0].url}/openapi.json").exclude(path=ENDLESS)
    statuses: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        # Any text is a segment of a path: a search for one that is not allowed finds nothing, and takes long.
        can_be_wrong = operation.body or operation.query
        modes = list(schemathesis.GenerationMode) if can_be_wrong else [schemathesis.GenerationMode.POSITIVE]
        for mode in modes:
            _ask(operation, mode, cluster, statuses.setdefault(operation.label, set()))
    assert len(statuses) > 25
    assert all(status for status in statuses.values())
    controller = cluster.members[0].controller
    assert controller is not None
    assert controller.running
    assert "Traceback" not in controller.output()


def _ask(
    operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, cluster: Cluster, statuses: set[int]
) -> None:
    @settings(max_examples=5, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case[Any]) -> None:
        # The key in use is never the one that is revoked: the API refuses that.
        response = case.call(headers={"Authorization": f"Bearer {cluster.key}"}, timeout=60)
        statuses.add(response.status_code)
        assert response.status_code < 500, f"{operation.label}: {response.status_code} {response.text[:500]}"

    try:
        ask()
    except Unsatisfiable:
        assert mode.value == "negative", "an operation without parameters has nothing to get wrong"
