"""A chat of two turns through transformers' own pipeline; nothing in it knows of the draft.

python examples/pipeline_chat.py
"""

import torch
from transformers import pipeline

import hf_specdec
from hf_specdec.cli.models import resolve

chat = pipeline("text-generation", resolve("smollm2-135m"), dtype=torch.bfloat16)
hf_specdec.enable(chat.model, resolve("smol-draft"), num_speculative_tokens=1)

messages = [{"role": "system", "content": "You answer in one sentence."}]
for question in ("What is a glacier?", "And where would I see one?"):
    messages.append({"role": "user", "content": question})
    messages = chat(messages, max_new_tokens=48, do_sample=True, temperature=0.7)[0]["generated_text"]
    report = hf_specdec.report(chat.model)
    print(f"> {question}\n{messages[-1]['content']}")
    print(f"  [{report.mean_acceptance_length:.2f} tokens per target pass]\n")
