"""Where and with what a result was taken: device, versions, commit; and the peak memory of one run.

Names of hosts and folders are left out: a result says what kind of machine it is from, not which.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import hf_specdec

__all__ = ["PeakMemory", "describe", "device_name", "model_facts"]

PACKAGES = ("accelerate", "bitsandbytes", "numpy", "scikit-learn", "torch", "transformers")
#: CPU flags that decide how fast matrices are multiplied, best first, and how a device's name shows them
CPU_FEATURES = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "sve", "asimd")
ROOT = Path(__file__).parents[2]


def device_name(device: torch.device) -> str:
    """The kind of machine, as a folder name: ``cpu-2core-avx512bf16``, ``cuda-nvidia-h200``."""
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        return re.sub(r"[^a-z0-9]+", "-", f"{device.type}-{name}".lower()).strip("-")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    feature = next((name for name in CPU_FEATURES if name in _cpu_flags()), platform.machine())
    return f"cpu-{cores}core-{feature.replace('_', '').lower()}"


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def describe(device: torch.device) -> dict[str, Any]:
    """Device, threads, versions, commit and date, as plain JSON data."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {"hf_specdec": hf_specdec.__version__, **_versions()},
        "commit": _git("rev-parse", "HEAD"),
        "has_uncommitted_changes": bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def model_facts(model: Any, source: str) -> dict[str, Any]:
    """Revision, size and attention of a loaded model: its commit on the Hub, or the digest of its folder's weights."""
    revision = getattr(model.config, "_commit_hash", None)
    if revision is None and Path(source).is_dir():
        digest = hashlib.sha256()
        for path in sorted(Path(source).glob("*.safetensors")):
            with path.open("rb") as weights:
                while chunk := weights.read(1 << 22):
                    digest.update(chunk)
        revision = f"sha256:{digest.hexdigest()}"
    return {
        "class": type(model).__name__,
        "revision": revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weight_bytes": model.get_memory_footprint(),
        "attention": getattr(model.config, "_attn_implementation", None),
    }


class PeakMemory:
    """Peak bytes since it was made: allocated on a CUDA device, else resident in this process (weights included)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):  # elsewhere the peak is that of the process so far
                Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM

    def bytes(self) -> int:
        """The peak so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        except OSError:
            found = None
        if found:
            return int(found[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
