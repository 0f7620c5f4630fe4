"""One prompt, plainly and speculatively: the same call, fewer passes of the target.

python examples/quickstart.py
"""

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.cli.models import resolve

# Hub ids or folders go here. `resolve` gives the Hub id, or a fetched folder where the Hub cannot be reached.
TARGET, DRAFT = resolve("smollm2-135m"), resolve("smol-draft")

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
messages = [{"role": "user", "content": "Name three things that make bread rise."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def decode(title: str) -> None:
    """Generate, and print the text with its speed."""
    started = time.perf_counter()
    output = target.generate(**inputs, do_sample=True, temperature=0.7, max_new_tokens=64, pad_token_id=2)
    new_ids = output[0, inputs["input_ids"].shape[1] :]
    print(f"{title}: {len(new_ids) / (time.perf_counter() - started):.1f} tokens/s")
    print(tokenizer.decode(new_ids, skip_special_tokens=True), end="\n\n")


decode("plain")
with hf_specdec.enable(target, DRAFT, num_speculative_tokens=1):  # without `with`, it stays on
    decode("speculative")
    print(hf_specdec.report(target))
