"""How much memory there is for a model."""

import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a container's own limit stands."""


def available_memory() -> int:
    """Bytes that this process may still allocate, by free memory and by its own limits."""
    import psutil  # not for those who only load a model

    bounds = [psutil.virtual_memory().available]
    try:
        limit_text = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        if limit_text != "max":
            bounds.append(int(limit_text) - int((CGROUP / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            bounds.append(limit - psutil.Process().memory_info().vms)
    return min(bounds)
