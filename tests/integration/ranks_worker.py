"""What each rank of test_ranks.py runs. Writes what came of every case into `<folder>/<kind>-<rank>.json`."""

import json
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import transformers
from torch import distributed
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import hf_specdec
from tests.integration.pairs import llama, noisy_copy, prompts

NEW = 20
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Rank:
    """This process: its target, the draft, its number, and what both say about the last call."""

    def __init__(self, target, draft, folder):
        self.target, self.draft, self.folder, self.number = target, draft, folder, distributed.get_rank()

    def run(self, draft=None, flag=None, **options):
        """A flagged call, under a seed of this rank's own."""
        draft = self.draft if draft is None else draft
        options = {"max_new_tokens": NEW, **options}
        torch.manual_seed(self.number)
        with hf_specdec.enable(self.target, draft, **(flag or {"num_speculative_tokens": 3})):
            output = self.target.generate(**options)
        report = hf_specdec.report(self.target)
        ids = getattr(output, "sequences", output)
        return {"ids": ids.tolist(), "reason": report.reason, "accepted": report.accepted, "notes": report.notes}

    def plain(self, **options):
        options = {"max_new_tokens": NEW, **options}
        return self.target.generate(**options).tolist()


# --- the text -------------------------------------------------------------------------------------------------------


@case
def greedy(rank):
    return [{**rank.run(**prompts(batch)), "plain": rank.plain(**prompts(batch))} for batch in (1, 3)]


@case
def rows_end_apart(rank):
    inputs = prompts(4, 8)
    ends = {"eos_token_id": list(range(2, 40, 5)), "pad_token_id": 0}
    return {**rank.run(**inputs, **ends), "plain": rank.plain(**inputs, **ends)}


@case
def sampled_under_a_seed_per_rank(rank):
    return rank.run(**prompts(2), do_sample=True, top_k=0)


@case
def sampled_with_processors(rank):
    return rank.run(**prompts(2), do_sample=True, temperature=0.8, top_k=20, repetition_penalty=1.2)


@case
def measured_lengths(rank):
    flag = {"num_speculative_tokens": "auto", "method": "draft_model"}
    return [{**rank.run(flag=flag, **prompts(2)), "plain": rank.plain(**prompts(2))} for _ in range(3)]


@case
def drafts_longer_than_a_message(rank):
    return {**rank.run(flag={"num_speculative_tokens": 15}, **prompts(70)), "plain": rank.plain(**prompts(70))}


@case
def looked_up(rank):
    inputs = prompts(2, 8)
    inputs["input_ids"] = inputs["input_ids"].repeat(1, 3)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    flag = {"method": "ngram", "num_speculative_tokens": 3}
    return {**rank.run(flag=flag, **inputs), "plain": rank.plain(**inputs)}


@case
def turns_on_one_cache(rank):
    with hf_specdec.enable(rank.target, rank.draft, num_speculative_tokens=3):
        first = rank.target.generate(
            **prompts(1), max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True, do_sample=False
        )
        ids = torch.cat([first.sequences, prompts(1, seed=5)["input_ids"]], dim=1)
        keyword = "cache" if "cache" in first else "past_key_values"
        heads = first[keyword].layers[0].keys.shape[1]
        second = rank.target.generate(ids, max_new_tokens=NEW, **{keyword: first[keyword]})
    report = hf_specdec.report(rank.target)
    scores = torch.stack(first.scores).double().sum().item()
    return {
        "ids": second.tolist(),
        "plain": rank.plain(inputs=ids),
        "reason": report.reason,
        "accepted": report.accepted,
        "heads": heads,
        "scores": scores,
    }


# --- code of the caller's own ---------------------------------------------------------------------------------------


class Streamer:
    """Collects; raises at the token `fails_at`."""

    def __init__(self, fails_at=None):
        self.tokens, self.fails_at = [], fails_at

    def put(self, value):
        self.tokens += value.flatten().tolist()
        if self.fails_at is not None and len(self.tokens) >= self.fails_at:
            raise ConnectionError("the reader has gone")

    def end(self):
        if self.fails_at == 0:
            raise ConnectionError("the reader has gone")


@case
def streamer_on_one_rank(rank):
    streamer = Streamer() if rank.number == 0 else None
    result = rank.run(**prompts(1), streamer=streamer)
    return {**result, "streamed": None if streamer is None else streamer.tokens}


@case
def criteria_that_disagree(rank):
    def at_length(ids, scores):
        return torch.full((ids.shape[0],), ids.shape[1] >= 12 + 3 * rank.number)

    return rank.run(**prompts(2), stopping_criteria=StoppingCriteriaList([at_length]), pad_token_id=0)


@case
def clocks_that_disagree(rank):
    class Slow(LogitsProcessor):
        position_wise = True

        def __call__(self, input_ids, scores):
            time.sleep(0.002 * (1 + rank.number))
            return scores

    return rank.run(**prompts(1), max_new_tokens=200, max_time=0.3, logits_processor=LogitsProcessorList([Slow()]))


def caught(rank, **options):
    """What the call raised here, and whether the next call is as if nothing had been."""
    try:
        rank.run(**prompts(2), **options)
        error = None
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, **rank.run(**prompts(2)), "plain": rank.plain(**prompts(2))}


class Failing(LogitsProcessor):
    position_wise = True

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores):
        self.calls -= 1
        if self.calls < 0:
            raise ValueError("no such grammar")
        return scores


@case
def processor_raises(rank):
    return [
        caught(rank, logits_processor=LogitsProcessorList([Failing(calls if rank.number == who else 1 << 30)]))
        for who in (0, 1)
        for calls in (0, 1, 9)
    ]


@case
def criterion_raises(rank):
    def failing(who):
        def criterion(ids, scores):
            if rank.number == who and ids.shape[1] > 14:
                raise ValueError("no such grammar")
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        return criterion

    return [caught(rank, stopping_criteria=StoppingCriteriaList([failing(who)])) for who in (0, 1)]


@case
def streamer_raises(rank):
    def call(who, fails_at):
        streamer = Streamer(fails_at if rank.number == who else None)
        try:
            rank.run(**prompts(1), streamer=streamer, return_dict_in_generate=True)
            error = None
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return {"error": error, **rank.run(**prompts(2)), "plain": rank.plain(**prompts(2))}

    return [call(who, fails_at) for who in (0, 1) for fails_at in (0, 9)]


@case
def calls_that_differ(rank):
    """What is cut on the device has to be alike everywhere: anything else would wait for ever, or end apart."""
    mine = [{"max_new_tokens": 10 + 10 * rank.number}, {"do_sample": rank.number == 1}]
    mine += [{"eos_token_id": [5 + rank.number]}, {} if rank.number else {"eos_token_id": 5}]
    found = []
    for options in mine:
        try:
            rank.run(**{**prompts(2), **options})
            error = None
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found.append({"error": error, **rank.run(**prompts(2)), "plain": rank.plain(**prompts(2))})
    return found


@case
def draft_missing_on_one_rank(rank):
    name = str(rank.folder / ("draft" if rank.number == 0 else "nowhere"))
    error = None
    with hf_specdec.register():
        try:
            flag = {"model": "draft" if rank.number == 0 else name, "num_speculative_tokens": 2}
            rank.target.generate(**prompts(1), max_new_tokens=4, speculative_config=flag)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"error": error, **rank.run(**prompts(2)), "plain": rank.plain(**prompts(2))}


# --- what decodes plainly -------------------------------------------------------------------------------------------


@case
def target_as_its_own_draft(rank):
    return {**rank.run(draft=rank.target, **prompts(2)), "plain": rank.plain(**prompts(2))}


@case
def targets_own_layers(rank):
    flag = {"method": "early_exit", "num_speculative_tokens": 3}
    return {**rank.run(flag=flag, **prompts(2)), "plain": rank.plain(**prompts(2))}


@case
def unknown_processor(rank):
    def halved(input_ids, scores):
        return scores / 2

    options = {**prompts(1), "logits_processor": LogitsProcessorList([halved])}
    return {**rank.run(**options), "plain": rank.plain(**options)}


@case
def fallback_on_one_rank(rank):
    """A reason that one rank alone has is everybody's."""
    options = {**prompts(1), "logits_processor": LogitsProcessorList([lambda ids, scores: scores] * rank.number)}
    return {**rank.run(**options), "plain": rank.plain(**options)}


# --- a whole model on every rank ------------------------------------------------------------------------------------


def data_parallel(folder):
    """Different prompts, lengths and numbers of calls; nothing of ours may wait for the other rank."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    number = accelerator.process_index
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft").eval()
    results = []
    with hf_specdec.enable(target, draft, num_speculative_tokens=3):
        for turn in range(1 + 2 * number):
            options = {**prompts(1 + number, seed=turn + 10 * number), "max_new_tokens": 8 + 9 * number}
            ids = target.generate(**options)
            report = hf_specdec.report(target)
            plain = target.generate(**options, speculative_config=False)
            results.append(
                {"ids": ids.tolist(), "plain": plain.tolist(), "reason": report.reason, "accepted": report.accepted}
            )
        target.generate(**prompts(1), max_new_tokens=4, synced_gpus=True)
        synced = hf_specdec.report(target).reason
    return number, {"size": accelerator.num_processes, "calls": results, "synced": synced}


def fully_sharded(folder):
    from transformers.distributed import DistributedConfig

    target = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=DistributedConfig(fsdp_size=2))
    target.eval()
    rank = Rank(target, AutoModelForCausalLM.from_pretrained(folder / "draft").eval(), folder)
    return rank.number, {**rank.run(**prompts(2)), "plain": rank.plain(**prompts(2))}


def tensor_parallel(folder):
    target = AutoModelForCausalLM.from_pretrained(folder / "target", tp_plan="auto").eval()
    rank = Rank(target, noisy_copy(llama()), folder)
    results = {}
    for name, function in CASES.items():
        started = time.perf_counter()
        results[name] = function(rank)
        print(rank.number, name, f"{time.perf_counter() - started:.1f} s", flush=True)
    return rank.number, results


def main(kind, folder):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if kind != "data_parallel":
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    number, results = globals()[kind](folder)
    (folder / f"{kind}-{number}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1], Path(sys.argv[2]))
