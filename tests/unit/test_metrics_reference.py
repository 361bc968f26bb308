"""docs/reference/metrics.md has every metric of ours, and none that is gone. Alert rules, the dashboard and the how-to
name only those."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from corral.controller.metrics.controller import ControllerMetrics
from corral.controller.metrics.fleet import FleetMetrics
from corral.controller.metrics.replicas import ReplicaMetrics
from corral.controller.metrics.requests import RequestMetrics
from corral.gateway.receipts.metrics import Metrics, render
from corral.worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference" / "metrics.md"
ADDED_BY_WIRING = ROOT / "src" / "corral" / "gateway"
NAME = re.compile(r"\bcorral_[a-z0-9_]+")
_SUFFIXES = re.compile(r"_(bucket|count|sum)$")


def metrics_of_the_controller() -> list[Metric]:
    anything: Any = None
    metrics = ControllerMetrics(
        anything, anything, anything, anything, RequestMetrics(anything, anything), ReplicaMetrics(),
        FleetMetrics(anything, dict),
    )  # fmt: skip
    return [*metrics.registry.collect(), *metrics.request_registry.collect()]


def names_in_the_code() -> set[str]:
    text = render(Metrics(), now=0.0).decode() + WorkerMetrics().render().decode()
    typed = re.findall(r"(?m)^# TYPE (corral_\w+) (\w+)$", text)
    names = {name for name, _ in typed if not name.endswith("_created")}
    names |= {f"{each.name}_total" if each.type == "counter" else each.name for each in metrics_of_the_controller()}
    for path in ADDED_BY_WIRING.rglob("*.py"):  # figures that other parts of a gateway keep
        source = path.read_text()
        names |= {f"corral_gateway_{name}" for name in re.findall(r'\.gauges\["(\w+)"\]', source)}
        names |= {f"corral_gateway_{name}_total" for name in re.findall(r'\.totals\["(\w+)"\]', source)}
        for kind, entries in re.findall(r"metrics\.(totals|gauges) \|= \{\n(.*?)\n    \}\n", source, re.DOTALL):
            suffix = "_total" if kind == "totals" else ""
            names |= {f"corral_gateway_{name}{suffix}" for name in re.findall(r'(?m)^        "(\w+)": ', entries)}
    return names


def names_in(path: Path) -> set[str]:
    return {_SUFFIXES.sub("", name) for name in NAME.findall(path.read_text())}


def test_the_reference_has_every_metric_and_no_other() -> None:
    documented = set(re.findall(r"(?m)^\| `(corral_\w+)`", REFERENCE.read_text()))
    assert documented == names_in_the_code()


def test_everything_else_names_metrics_that_exist() -> None:
    known = names_in_the_code()
    pages = [ROOT / "docs" / "how-to" / "monitor.md", ROOT / "docs" / "tour.md"]
    pages += [path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yml", ".json")]
    assert len(pages) >= 5
    assert {str(path): names_in(path) - known for path in pages if names_in(path) - known} == {}
