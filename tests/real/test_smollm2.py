"""The real SmolLM2 pair: text is plain's in float32, and what users do with it works."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import hf_specdec
from hf_specdec.cli.models import fetch

pytestmark = [pytest.mark.slow, pytest.mark.real]

PROMPTS = (
    "List three primary colours.",
    "Write a Python function that reverses a string.",
    "Correct the spelling: 'The quik brown fox jumpd over the lasy dog.'",
)


@pytest.fixture(scope="module")
def smollm2():
    target = AutoModelForCausalLM.from_pretrained(fetch("smollm2-135m"), dtype=torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(fetch("smol-draft"), dtype=torch.float32).eval()
    return target, draft, AutoTokenizer.from_pretrained(fetch("smollm2-135m"), padding_side="left")


def chats(tokenizer, *prompts):
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


@pytest.mark.parametrize("draft_length", [1, 3])
def test_greedy_batch_is_plains_text(smollm2, draft_length):
    target, draft, tokenizer = smollm2
    call = {**chats(tokenizer, *PROMPTS), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**call)
    with hf_specdec.enable(target, draft, num_speculative_tokens=draft_length):
        text = target.generate(**call)
    report = hf_specdec.report(target)
    assert text.tolist() == plain.tolist()
    assert report.reason is None
    assert 0.2 <= report.acceptance_rate <= 0.9
    report.check()


def test_processors_stop_strings_and_streaming_hold_on_real_text(smollm2):
    target, draft, tokenizer = smollm2
    call = {
        **chats(tokenizer, PROMPTS[1]),
        "max_new_tokens": 48,
        "do_sample": False,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 4,
        "stop_strings": ["return"],
        "tokenizer": tokenizer,
    }
    plain = target.generate(**call)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        text = target.generate(**call, streamer=streamer)
    prompt_length = call["input_ids"].shape[1]
    assert text.tolist() == plain.tolist()
    assert "".join(streamer) == tokenizer.decode(plain[0, prompt_length:])
    assert hf_specdec.report(target).accepted > 0


def test_sampled_turns_on_one_cache_speculate_and_replay_under_one_seed(smollm2):
    target, draft, tokenizer = smollm2

    def conversation():
        torch.manual_seed(0)
        ids, cache, reports = chats(tokenizer, PROMPTS[0])["input_ids"], None, []
        for question in PROMPTS[1:]:
            keyword = {} if cache is None else {cache_keyword: cache}
            output = target.generate(
                ids, do_sample=True, temperature=0.8, max_new_tokens=16, return_dict_in_generate=True, **keyword
            )
            reports.append(output.speculation)
            cache_keyword = "cache" if "cache" in output else "past_key_values"
            cache = output[cache_keyword]
            more = tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"]
            ids = torch.cat([output.sequences, more], dim=1)
        return ids, reports

    with hf_specdec.enable(target, draft, num_speculative_tokens=2):
        first, reports = conversation()
        second, _ = conversation()
    assert first.tolist() == second.tolist()
    assert all(report.reason is None and report.accepted > 0 for report in reports)
