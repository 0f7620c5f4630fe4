"""A tokenizer made in code, with a chat template, and checkpoints of a tiny pair that speak through it.

One token per printable ASCII character, so that any text of a random model is valid and streams token by token.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.integration.pairs import llama, noisy_copy

__all__ = ["EOS", "TEXT_VOCAB", "save", "text_pair", "tokenizer"]

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<turn>")
EOS = 2
_CHARACTERS = [chr(code) for code in range(33, 127)] + ["Ġ"]  # the byte-level name of a space
TEXT_VOCAB = len(SPECIAL) + len(_CHARACTERS)

_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Character by character; decoding any ids and encoding the text again gives the same ids."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *_CHARACTERS])}
    inner = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
        chat_template=_TEMPLATE,
        padding_side="left",
    )


def text_pair(seed: int = 3, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(target, draft) over that tokenizer's ids; under this seed greedy text stays lively."""
    target = llama(seed, TEXT_VOCAB, **changes)
    return target, noisy_copy(target)


def save(model: PreTrainedModel, folder: Path) -> str:
    """Write `model` and the tokenizer as an ordinary checkpoint; returns its name."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
