"""An operation in sentences, with the numbers."""

from __future__ import annotations

from corral.contract.admin import OperationNodeView, OperationView
from corral.contract.rollouts import RolloutClassView, RolloutFigureView, RolloutView
from corral.controller.operations.why import explain, explain_rollout


def operation(*rows: OperationNodeView) -> OperationView:
    return OperationView("vllm", "vllm", "vllm", "op7", 50, "Installation", False, True, False, True, "", nodes=rows)


def test_nodes_with_the_same_reason_are_one_sentence() -> None:
    waiting = [OperationNodeView(f"id{n}", f"n{n}", "queued", 0.0, error="waits for its turn") for n in range(5)]
    failing = OperationNodeView("x", "attic", "error", 10.0, error="exit 1", failures=3, next_retry_at="at noon")
    done = OperationNodeView("y", "barn", "success", 100.0)
    found = explain(operation(*waiting, failing, done), None)
    assert found.lines == (
        "attic: error, exit 1; failed 3 times, next attempt at noon",
        "n0, n1, n2 and 2 more: queued, waits for its turn",
    )


def test_a_rollout_says_what_its_nodes_wait_for() -> None:
    view = RolloutView("op7", "vllm", "canary", "", message="a switches first")
    row = OperationNodeView("a", "a", "queued", 0.0, error="waits until another node serves m")
    assert explain_rollout(view, [row]).lines == (
        "rollout: a switches first",
        "a: queued, waits until another node serves m",
    )


def test_a_soak_is_explained_with_its_figures() -> None:
    figure = RolloutFigureView("errors", "m", 0.0, 0.0, 30, 30, 0.02, words="failed requests of m: 0.0 %")
    classes = (
        RolloutClassView("gpu", ("a",), "a", "soaking", soaked_s=40, new_requests=30, figures=(figure,)),
        RolloutClassView("cpu", ("b", "c"), "b", "soaking", new_requests=3, old_requests=7, waiting="b is away"),
        RolloutClassView("tpu", ("d",), "d", "passed", passed="promoted by ann"),
    )
    view = RolloutView(
        "op7", "vllm", "soak", "", soak="5m", min_requests=20, message="a soaks", classes=classes, reverted_by=("op8",)
    )
    assert explain(operation(), view).lines == (
        "rollout: a soaks",
        "gpu (1 node): a soaks for 5m, 40 s so far",
        "  failed requests of m: 0.0 %: within the limit",
        "cpu (2 nodes): b soaks for 5m, 0 s so far; b is away",
        "  too few requests to judge yet: 3 by the new build, 7 by the old one; 20 of each are needed, "
        "of the same model",
        "tpu (1 node): passed on d: promoted by ann",
        "nodes return to their previous version: `corral ops watch op8`",
    )
