"""The faults of tests/mutants/planted.py can all be planted: else they would be passed over without a word."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants.catalog import Catalog
from tests.mutants.planted import PLANTED


def test_every_planted_fault_can_be_planted() -> None:
    """When this fails because you changed a function, write its fault anew: what would be the same mistake now?"""
    catalog = Catalog(Path(__file__).parents[2])
    assert len({fault.name for fault in PLANTED}) == len(PLANTED) >= 15
    for fault in PLANTED:
        mutant = catalog.planted(fault)
        assert mutant.source != mutant.original
        ast.parse(mutant.source)
