"""Which builds a node can run, as one word (docs/reference/wire/gallery.md#capability).

The worker finds the word out (`worker/hardware/capability.py`); here is what it means and what a controller concludes
about a node that sent none. Choosing a build by it is `gallery`'s. Pure.
"""

from __future__ import annotations

DEFAULT = "default"
DISABLED = "disable"  # switches capability filtering off
# A GPU with no more than this serves no model worth its name: such a node counts as one without.
TOO_LITTLE_VRAM_BYTES = 4 * 1024**3


def fallback_capability(gpu_vendor: str, total_vram: int) -> str:
    """The vendor's name, or `default` without a vendor or with too little memory to serve from."""
    return gpu_vendor if gpu_vendor and total_vram > TOO_LITTLE_VRAM_BYTES else DEFAULT


def capability_of(reported: str, gpu_vendor: str, total_vram: int) -> str:
    """What the node itself said, else what its vendor and memory suggest."""
    return reported or fallback_capability(gpu_vendor, total_vram)
