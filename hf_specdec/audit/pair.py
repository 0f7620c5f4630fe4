"""What is audited, and whole calls of `generate()` on it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hf_specdec
from hf_specdec.host.draft_model import output_vocab_size
from hf_specdec.report import SpeculationReport

__all__ = ["Pair"]

# Sampled calls draw from this many ids in models whose scores are exact enough for the border to be certain.
TOP_K = 50
EXACT_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Pair:
    """An enabled target, the prompts, and how to decode.

    Attributes:
        target: the model, with the flag on.
        draft: the draft model; None for methods without one.
        prompts: int64 [seq] each.
        rule: the rule under audit, by its registered name.
        draft_length: K.
        temperature: of sampled calls.
        seed: of everything random.
    """

    target: Any
    draft: Any
    prompts: list[Tensor]
    rule: str
    draft_length: int
    temperature: float
    seed: int

    @property
    def vocab(self) -> int:
        """Rows of the target's head."""
        return output_vocab_size(self.target)

    @property
    def is_exact(self) -> bool:
        """Whether scores are float32 or wider and not quantized."""
        return self.target.dtype in EXACT_DTYPES and not getattr(self.target, "is_quantized", False)

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a text."""
        eos = self.target.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    @property
    def pad_id(self) -> int:
        """What fills finished rows."""
        pad = self.target.generation_config.pad_token_id
        return int(pad) if pad is not None else next(iter(self.eos_ids), 0)

    def sampling_options(self) -> dict[str, Any]:
        """Of sampled calls. In low precision ids tie at a border such as top-k's, so there is none."""
        top_k = TOP_K if self.is_exact else 0
        drawing = {"do_sample": True, "temperature": self.temperature, "top_k": top_k, "top_p": 1.0}
        return {**drawing, "num_beams": 1, "pad_token_id": self.pad_id}

    def batch(self, prompts: list[Tensor]) -> dict[str, Tensor]:
        """`prompts` left-padded, on the target's device."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt.cpu(), 1
        return {"input_ids": ids.to(self.target.device), "attention_mask": mask.to(self.target.device)}

    def generate(self, inputs: dict[str, Tensor], seed: int, flag: Any = None, **options: Any) -> Any:
        """One call; `flag` goes over what `enable` wrote, False is plain decoding."""
        torch.manual_seed(self.seed * 1_000_003 + seed)
        return self.target.generate(**inputs, speculative_config=flag, **options)

    def report(self) -> SpeculationReport:
        """Of the last call with the flag on."""
        report = hf_specdec.report(self.target)
        assert report is not None
        return report
