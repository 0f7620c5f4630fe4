"""How much memory this process may still take: what the machine has available, and what its cgroups leave of it.

A container sees the memory of its whole machine; what it may use of it is the limit of its cgroup, or of one above.
What the kernel would drop first (file pages unused for long) counts as available, as psutil counts it.

Knows nothing of torch.
"""

__all__ = ["available_memory"]

from collections.abc import Iterator
from pathlib import Path

import psutil

_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version of cgroups: limit, usage, and the line of memory.stat with what can be dropped."""


def available_memory(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Bytes: the least of what the machine and every cgroup of this process have left.

    Args:
        mount: where cgroups are mounted.
        membership: the file that names this process's cgroups.
    """
    left = [room for version, folder in _folders(mount, membership) if (room := _room(folder, version)) is not None]
    return min([psutil.virtual_memory().available, *left])


def _folders(mount: Path, membership: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each cgroup that counts this process's memory, up to the mounted root.

    Inside a container the root is often the container's own cgroup, and the path that is named does not exist.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version, root = (1, mount / "memory") if controllers else (2, mount)
        folder = root / path.strip("/")
        yield from ((version, each) for each in (folder, *folder.parents) if each.is_relative_to(root))


def _room(folder: Path, version: int) -> int | None:
    """Bytes left in one cgroup; None where it has no limit, or cannot be read."""
    limit, usage, droppable = _FILES[version]
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        if most == "max":
            return None
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(most) - used + int(stat.get(droppable, 0)))
    except (OSError, ValueError):
        return None
