"""A container reports what its control groups leave it, not its host."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.worker.hardware import cgroup
from corral.worker.hardware.machine import Space, limited, read_cpus, read_ram
from tests.unit.hardware.fake_machine import GIB, FakeMachine

V1_UNLIMITED = 9223372036854771712


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def ram_of(machine: FakeMachine) -> Space:
    return read_ram(machine.host(), lambda: Space(64 * GIB, 48 * GIB))


def test_without_control_groups_the_machine_is_ours(machine: FakeMachine) -> None:
    assert ram_of(machine) == Space(64 * GIB, 48 * GIB)


def test_a_container_with_its_own_namespace_reads_its_limit_at_the_mount(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/memory.max", 8 * GIB)
    machine.write("sys/fs/cgroup/memory.current", 3 * GIB)
    machine.write("sys/fs/cgroup/memory.stat", f"anon 1\ninactive_file {GIB}\nactive_file 7")
    assert ram_of(machine) == Space(8 * GIB, 6 * GIB)


def test_the_tightest_level_above_us_counts(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "0::/system.slice/worker.service")
    machine.write("sys/fs/cgroup/system.slice/worker.service/memory.max", "max")
    machine.write("sys/fs/cgroup/system.slice/memory.max", 16 * GIB)
    machine.write("sys/fs/cgroup/system.slice/memory.current", 15 * GIB)
    assert ram_of(machine) == Space(16 * GIB, GIB)


def test_version_1_in_a_container_that_sees_its_hosts_path(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/docker/abc\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 4 * GIB)
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    machine.write("sys/fs/cgroup/memory/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB // 2}")
    assert ram_of(machine) == Space(4 * GIB, 7 * GIB // 2)


def test_version_1_says_no_limit_with_a_huge_number(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", V1_UNLIMITED)
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    assert ram_of(machine) == Space(64 * GIB, 48 * GIB)


def test_the_machine_may_have_less_left_than_the_group(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "0::/../../elsewhere")
    machine.write("sys/fs/cgroup/elsewhere/memory.max", 60 * GIB)
    machine.write("sys/fs/cgroup/elsewhere/memory.current", 0)
    assert ram_of(machine) == Space(60 * GIB, 48 * GIB)


def test_a_group_over_its_limit_has_nothing_left(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/memory.max", 2 * GIB)
    machine.write("sys/fs/cgroup/memory.current", 3 * GIB)
    assert ram_of(machine) == Space(2 * GIB, 0)


def test_odd_files_limit_nothing(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "garbage\n0::\n:::\n4:memory")
    machine.write("sys/fs/cgroup/memory.max", "many")
    assert ram_of(machine) == Space(64 * GIB, 48 * GIB)


def test_ram_that_cannot_be_read_is_told_as_unknown(machine: FakeMachine) -> None:
    def broken() -> Space:
        raise OSError("no /proc/meminfo")

    assert read_ram(machine.host(), broken) == Space(0, None)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 3),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "10000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_processors_are_limited_too(machine: FakeMachine, files: dict[str, str], limit: int | None) -> None:
    for path, content in files.items():
        machine.write(path, content)
    assert cgroup.cpu_limit(machine.host()) == limit
    assert 1 <= read_cpus(machine.host()) <= (limit or 100_000)


@settings(deadline=None)  # the machine may be busy
@given(
    total=st.integers(1, 2**40),
    available=st.none() | st.integers(0, 2**40),
    limits=st.lists(st.tuples(st.integers(1, 2**63), st.none() | st.integers(0, 2**63)), max_size=4),
)
def test_limits_only_ever_lower_the_numbers(
    total: int, available: int | None, limits: list[tuple[int, int | None]]
) -> None:
    if available is not None:
        available = min(available, total)
    ram = limited(Space(total, available), [cgroup.MemoryLimit(*limit) for limit in limits])
    assert ram.total_bytes == min([total, *(limit for limit, _ in limits)])
    if ram.available_bytes is not None:
        assert 0 <= ram.available_bytes <= ram.total_bytes
        assert available is None or ram.available_bytes <= available
