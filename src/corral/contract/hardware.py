"""What a worker says about the machine it runs on (docs/reference/wire/nodes.md#devices).

Only the shape of the report. How the numbers are found is `worker/hardware`'s business; what follows from them is the
controller's. Sizes are bytes. None means "could not be measured", which is not the same as zero.
"""

from __future__ import annotations

from corral.contract.codec import Message, always

NVIDIA = "nvidia"
AMD = "amd"
INTEL = "intel"
VULKAN = "vulkan"
APPLE = "apple"


class Device(Message, frozen=True, kw_only=True):
    """One accelerator, or one MIG instance of it.

    `index` is the driver's own number of the physical device, so two MIG instances may share one: `key` tells devices
    apart. `unified` means that its memory *is* the machine's RAM: what is reserved here is gone there too.
    """

    index: int = always(int)
    vendor: str = always(str)
    name: str = ""
    uuid: str = ""  # what CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES accept; empty where the driver has none
    pci: str = ""  # bus address, 0000:65:00.0
    total_bytes: int = always(int)  # 0: the driver does not say
    free_bytes: int | None = None
    unified: bool = False
    compute_capability: str = ""  # NVIDIA's major.minor
    driver: str = ""
    mig: int | None = None  # number of the MIG instance on its physical device
    temperature_c: int | None = None
    utilisation: float | None = None  # 0..1
    power_w: int | None = None

    @property
    def key(self) -> str:
        """Tells this device from the others of its machine, across restarts where the driver lets us."""
        return self.uuid or self.pci or f"{self.vendor}-{self.index}"


class HardwareReport(Message, frozen=True, kw_only=True):
    """One machine at one moment. The field names are those of registration and heartbeat."""

    os: str = always(str)  # linux, darwin
    arch: str = always(str)  # amd64, arm64
    cpus: int = always(int)  # that this process may use, not that the machine has
    gpu_vendor: str = always(str)
    gpu_compute_capability: str = always(str)
    capability: str = always(str)
    devices: tuple[Device, ...] = ()  # every vendor's; the sums below count `gpu_vendor`'s only
    total_vram: int = always(int)
    available_vram: int | None = None  # left out where usage cannot be measured: total is not free
    total_ram: int = always(int)
    available_ram: int | None = None
    total_disk: int = always(int)  # of the models' filesystem; 0: does not report
    available_disk: int | None = None

    @property
    def platform(self) -> str:
        """As registration and image indexes write it: linux/amd64."""
        return f"{self.os}/{self.arch}"


# A capability is one word for the builds that a node can run (docs/reference/wire/gallery.md#capability). The worker
# finds it (`worker/hardware/capability.py`); `gallery` chooses a build by it.
DEFAULT = "default"
DISABLED = "disable"  # switches capability filtering off
# A GPU with no more memory than this is too small for models: such a node counts as one without a GPU.
TOO_LITTLE_VRAM_BYTES = 4 * 1024**3


def fallback_capability(gpu_vendor: str, total_vram: int) -> str:
    """The vendor's name, or `default` without a vendor or with too little memory to serve from."""
    return gpu_vendor if gpu_vendor and total_vram > TOO_LITTLE_VRAM_BYTES else DEFAULT


def capability_of(reported: str, gpu_vendor: str, total_vram: int) -> str:
    """What the node itself said, else what its vendor and memory suggest."""
    return reported or fallback_capability(gpu_vendor, total_vram)
