"""The exact law of every token of given texts: one forward without a cache, then plain decoding's own processors.

What the audit compares sampled texts with. Nothing of the loop is in it: no cache, no block, no draft.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec import sampling
from hf_specdec.host.draft_model import output_vocab_size
from hf_specdec.host.runner import forward_keywords, input_device
from hf_specdec.vocabulary import VocabularyMap

__all__ = ["call_processors", "later_probs"]


class _Made(Exception):
    """The processors are there: nothing else of the call is wanted."""


def call_processors(model: Any, prompt_ids: Tensor, options: dict[str, Any]) -> LogitsProcessorList:
    """The list that a plain `generate()` of `prompt_ids` [1, seq] with `options` makes, its maximum length among them.
    Nothing is decoded."""
    lists: list[LogitsProcessorList] = []
    make = model._get_logits_processor

    def watched(*args: Any, **kwargs: Any) -> LogitsProcessorList:
        lists.append(make(*args, **kwargs))
        raise _Made

    model._get_logits_processor = watched
    try:
        model.generate(
            input_ids=prompt_ids, attention_mask=torch.ones_like(prompt_ids), speculative_config=False, **options
        )
    except _Made:
        pass
    finally:
        del model._get_logits_processor
    return lists[0]


@torch.no_grad()
def later_probs(
    model: Any, ids: Tensor, num_new: int, processors: LogitsProcessorList, vocab_size: int | None = None
) -> Tensor:
    """The law of each new token but the first, given the text before it.

    Args:
        model: target or draft.
        ids: int64 [batch, seq], without padding before the text.
        num_new: columns at the end of `ids` that are new.
        processors: position-wise; called on every prefix.
        vocab_size: of the target, if `model` is a draft: its probabilities are over the target's ids.

    Returns:
        float32 [batch, num_new - 1, vocab] on the device of `ids`.
    """
    keep = {"logits_to_keep": num_new} if "logits_to_keep" in forward_keywords(model) else {}
    own_size = output_vocab_size(model)
    fed: Any = ids.to(input_device(model, ids)).clamp(max=own_size - 1)
    logits = model(input_ids=fed, use_cache=False, **keep).logits[:, -num_new:-1].float().to(ids.device)
    if vocab_size is not None:
        logits = VocabularyMap(vocab_size, own_size).to_target_logits(logits)
    first = ids.shape[1] - num_new + 1
    prefixes: list[Any] = [ids[:, : first + i] for i in range(num_new - 1)]
    columns: list[Any] = list(logits.clone().unbind(dim=1))
    scores: list[Any] = list(map(processors, prefixes, columns))
    return sampling.softmax_probs(torch.stack(scores, dim=1))
