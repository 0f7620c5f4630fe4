"""Is the plugin right and fast on this GPU? Exact checks first, then times beside what was predicted for them.

    python benchmarks/gpu_check.py --deadline 450 --stages all --json OUT     # a CUDA device, no downloads
    python benchmarks/gpu_check.py --device cpu --tiny                        # every stage that needs none, in seconds

Needs no weights: a small seeded net is widened by exact tiling to the cost of a 7B, a 0.5B and a 70B (`gpu.widening`),
and noise sets how often its drafts are accepted (`gpu.nets`). The exit status is 0 if and only if every correctness
check that ran has passed; a speed never fails a run.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # the script runs from a clone, installed or not

import torch  # noqa: E402
import transformers  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks.gpu import report  # noqa: E402
from benchmarks.gpu.models import FULL, TINY, Models  # noqa: E402
from benchmarks.gpu.run import Run, run_stages  # noqa: E402
from benchmarks.gpu.stages import chosen  # noqa: E402
from hf_specdec.benchmark.environment import describe  # noqa: E402

__all__ = ["main"]

PREDICTED_FOR = "H200"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: a 7B is too much for it")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    try:
        stages = chosen(options.stages)
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    started = time.monotonic()
    _configure()
    sizes = TINY if options.tiny else FULL
    run = Run(device, options.tiny, sizes, Models(sizes, device), started + options.deadline)
    run.has_predictions = not options.tiny and device.type == "cuda" and PREDICTED_FOR in _gpu_name(device)
    head: dict[str, Any] = {"check": "gpu_check", "is_tiny": options.tiny, "environment": describe(device)}
    records = run_stages(run, stages, head, options.json, lambda text: console.print(text, style="dim", markup=False))
    report.show(console, records, run.has_predictions)
    return int(not all(record.is_passed for record in records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deadline", type=float, default=450, metavar="SECONDS", help="no stage begins after it")
    parser.add_argument("--stages", default="all", help='"all", or numbers such as "0,2,4-6"')
    parser.add_argument("--json", type=Path, metavar="OUT", help="where results are written after every stage")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: does everything run?")
    return parser


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def _configure() -> None:
    """float32 means float32, sums of bfloat16 products are kept in float32, and no library speaks of its future."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


if __name__ == "__main__":
    sys.exit(main())
