"""How much memory there is for a model."""

import os
from pathlib import Path


def available_memory() -> int | None:
    """Bytes this process may still allocate, by free memory and by its own limits; None if neither is known."""
    bounds = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            entries = dict(line.split(":", 1) for line in file)
        bounds.append(int(entries["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:  # a container's own limit
        limit_text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit_text != "max":
            bounds.append(int(limit_text) - int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            with open("/proc/self/statm", encoding="ascii") as file:
                bounds.append(limit - int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError, ValueError):
        pass
    return min(bounds) if bounds else None
