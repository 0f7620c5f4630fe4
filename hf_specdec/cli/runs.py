"""Decoding one prompt, timed: speculatively, plainly, or both in turn.

Knows nothing of how results are shown (`display`).
"""

__all__ = ["Result", "Run", "Settings", "decode", "load", "measure"]

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console


@dataclass(frozen=True)
class Settings:
    """How to decode: temperature 0 is greedy; `chat` None means "if the tokenizer has a chat template"."""

    temperature: float = 0.0
    max_new_tokens: int = 128
    chat: bool | None = None
    seed: int = 0

    def keywords(self) -> dict[str, Any]:
        """The keywords of `generate()`."""
        drawing = {"do_sample": True, "temperature": self.temperature} if self.temperature > 0 else {"do_sample": False}
        return {"max_new_tokens": self.max_new_tokens, **drawing}


@dataclass(frozen=True)
class Run:
    """One finished call of `generate()`."""

    text: str
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens ÷ seconds of the whole call, prefill included."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Result:
    """One prompt, decoded speculatively and, when compared, plainly; the report is the last speculative run's."""

    prompt: str
    speculative: list[Run]
    report: Any
    plain: list[Run] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        """Speculative ÷ plain tokens per second, medians; None when plain was not run."""
        if not self.plain:
            return None
        plain = median_speed(self.plain)
        return median_speed(self.speculative) / plain if plain else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON data."""
        return {
            "prompt": self.prompt,
            "text": self.speculative[-1].text,
            "speculative": _speeds(self.speculative),
            "plain": _speeds(self.plain) if self.plain else None,
            "speedup": self.speedup,
            "report": self.report.to_dict() if self.report is not None else None,
        }


def median_speed(runs: list[Run]) -> float:
    """The median tokens per second of `runs`."""
    return statistics.median(run.tokens_per_second for run in runs)


def _speeds(runs: list[Run]) -> dict[str, Any]:
    return {
        "tokens_per_second": median_speed(runs),
        "num_tokens": [run.num_tokens for run in runs],
        "seconds": [run.seconds for run in runs],
    }


def fail(error: Exception) -> typer.Exit:
    """Print what went wrong, without a traceback, and give the exception that ends the command."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    Console(stderr=True).print(f"[bold red]Error:[/] {rich_escape(str(message))}", highlight=False)
    return typer.Exit(1)


def rich_escape(text: str) -> str:
    """`text` with its square brackets shown as they are."""
    from rich.markup import escape

    return escape(text)


def load(
    source: str, *, dtype: str, device: str | None, is_silent: bool, console: Console, quantization: str | None = None
) -> tuple[Any, Any]:
    """The target at `source` on `device` (a CUDA device where there is one), and its tokenizer.

    Raises:
        ImportError: a `quantization` ("nf4") without bitsandbytes.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if is_silent:
        logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with console.status(f"Loading {source}"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        options = {} if quantization is None else _quantized(quantization, dtype, device)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
        (model if options else model.to(device)).eval()
    if model.generation_config.pad_token_id is None:  # else every call says that it takes the end-of-text token
        model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return model, tokenizer


def _quantized(quantization: str, dtype: str, device: str) -> dict[str, Any]:
    """The keywords of ``from_pretrained`` for 4-bit weights that compute in `dtype`."""
    import importlib.util

    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            "A quantized target needs bitsandbytes, which is not installed: pip install 'hf_specdec[bitsandbytes]'."
        )
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantization, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}


def _encode(tokenizer: Any, prompt: str, chat: bool | None, device: Any) -> Any:
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return tokenizer(prompt, return_tensors="pt").to(device)
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(
        device
    )


def decode(
    model: Any, tokenizer: Any, prompt: str, settings: Settings, *, streamer: Any = None, **keywords: Any
) -> Run:
    """Decode `prompt` once, timed; `keywords` go to `generate()`."""
    import torch

    inputs = _encode(tokenizer, prompt, settings.chat, model.device)
    torch.manual_seed(settings.seed)
    _synchronize(model)
    started = time.perf_counter()
    output = model.generate(**inputs, **settings.keywords(), streamer=streamer, **keywords)
    _synchronize(model)
    seconds = time.perf_counter() - started
    new_ids = output[0, inputs["input_ids"].shape[1] :]
    return Run(tokenizer.decode(new_ids, skip_special_tokens=True), len(new_ids), seconds)


def _synchronize(model: Any) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def measure(
    model: Any, tokenizer: Any, prompt: str, settings: Settings, *, streamer: Any = None, num_rounds: int = 0
) -> Result:
    """Decode `prompt` on an enabled `model`: once to read, then plainly and speculatively in turn, `num_rounds` times.

    With rounds, the first run is their warm-up: it is shown, not counted.
    """
    import hf_specdec

    first = decode(model, tokenizer, prompt, settings, streamer=streamer)
    if num_rounds == 0:
        return Result(prompt, [first], hf_specdec.report(model))
    plain, speculative, report = [], [], None
    for _ in range(num_rounds):
        plain.append(decode(model, tokenizer, prompt, settings, speculative_config=False))
        speculative.append(decode(model, tokenizer, prompt, settings))
        report = hf_specdec.report(model)
    return Result(prompt, speculative, report, plain)
