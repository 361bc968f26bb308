"""Looks at the machine: GPUs, memory, disk, platform, and the capability that follows. Start at `probe.py`.

Every source (NVML, sysfs, a command) may be absent or broken on odd hardware: it is then told once in the log and left
out of the report. Nothing here is asynchronous; callers use `asyncio.to_thread`.
"""
