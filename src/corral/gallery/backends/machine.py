"""What choosing a build needs to know of a node. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from corral.contract.capability import DEFAULT


@dataclass(frozen=True, slots=True, order=True)
class Machine:
    """Many nodes are the same machine: what is resolved for one holds for all."""

    capability: str = DEFAULT
    platform: str = ""  # os/arch; empty: a LocalAI worker, which does not say
    python: str = ""  # 3.11: of the interpreter that will run wheels; empty: as ours

    @property
    def runtime(self) -> str:
        """What a lock of wheels depends on."""
        return f"{self.platform} python{self.python}"
