"""docs/reference/http.md says what the doors are, and every door says what it is for."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType


def load_generator() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "_http_reference.py"
    spec = importlib.util.spec_from_file_location("_http_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    generator = load_generator()
    assert generator.PAGE.read_text() == generator.render(), "run .venv/bin/python scripts/_http_reference.py"


def test_no_service_is_taken_for_something_callers_give() -> None:
    """A service the generator does not know shows up as a query parameter."""
    wiring = Path(__file__).parents[2] / "src" / "corral" / "controller" / "wiring" / "services.py"
    returned = [each.value for each in ast.walk(ast.parse(wiring.read_text())) if isinstance(each, ast.Return)]
    handed = {
        key.value
        for each in returned
        if isinstance(each, ast.Dict)
        for key in each.keys
        if isinstance(key, ast.Constant)
    }
    assert len(handed) > 20
    assert handed <= set(load_generator().SERVICES)


def test_every_call_says_who_may_and_what_it_does() -> None:
    rows = [line for line in load_generator().render().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    for row in rows:
        call, who, what, *_ = (cell.strip() for cell in row.strip("|").split(" | "))
        assert who, call
        assert len(what) > 3, call


def test_the_contracts_routes_are_all_there() -> None:
    page = load_generator().render()
    for call in (
        "GET /api/operations",
        "POST /api/operations/{job_id}/cancel",
        "POST /api/operations/{job_id}/pause",
        "POST /api/operations/{job_id}/dismiss",
        "GET /api/operations/history",
        "DELETE /api/operations/history",
        "GET /api/nodes/{node}/backends",
        "POST /api/nodes/{node}/backends/install",
        "POST /api/nodes/{node}/backends/upgrade",
        "POST /api/nodes/{node}/backends/delete",
        "POST /backends/apply",
        "POST /backends/delete/{name}",
        "POST /backends/upgrade/{name}",
        "GET /backends/jobs/{job_id}",
        "GET /backends",
        "GET /backends/available",
        "GET /backends/known",
        "GET /backends/galleries",
        "GET /backends/upgrades",
        "POST /backends/upgrades/check",
        "GET /api/backends",
        "POST /api/backends/install/{name}",
        "POST /api/backends/install-external",
        "POST /api/backends/delete/{name}",
        "POST /api/backends/upgrade/{name}",
        "POST /api/backends/system/delete/{name}",
        "GET /api/backends/job/{job_id}",
        "GET /api/backends/upgrades",
        "POST /api/backends/upgrades/check",
    ):
        assert f"| `{call}` |" in page
