"""Prompts of different lengths in one batch: every row accepts as many tokens as it can, none waits for the others.

python examples/batch.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.cli.models import resolve

TARGET, DRAFT = resolve("smollm2-135m"), resolve("smol-draft")
PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):"]

tokenizer = AutoTokenizer.from_pretrained(TARGET, padding_side="left")
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)  # float32: equal to plain, token by token
inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)

plain = target.generate(**inputs, do_sample=False, max_new_tokens=32)
with hf_specdec.enable(target, DRAFT, num_speculative_tokens=2):
    speculative = target.generate(**inputs, do_sample=False, max_new_tokens=32)

for text in tokenizer.batch_decode(speculative, skip_special_tokens=True):
    print(f"* {text!r}")
print(f"\nequal to plain: {torch.equal(plain, speculative)}")
print(hf_specdec.report(target))
