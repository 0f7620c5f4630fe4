"""The same pair under vLLM: one ``vllm serve`` command from the flag, an estimate and a plan.

The flag's keys are vLLM's own wherever it has one, so most of them go over as they are. What has no counterpart there
is refused where the command would mean something else, and named in a note where it would not.

Sources, read December 2026: keys of SpeculativeConfig in vllm/config/speculative.py at 002e77c1 and in
docs/features/speculative_decoding/configuration.md at 9d0e0b83; arguments of ``vllm serve`` in its engine arguments;
4-bit weights in vllm/model_executor/model_loader/bitsandbytes_loader.py at 0406fb9f. Runs without vLLM, torch or
transformers.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DOCUMENTED_ARGUMENTS", "DOCUMENTED_KEYS", "DOCUMENTED_METHODS", "Export", "export_vllm", "measured_length"]

DOCUMENTED_KEYS = frozenset(
    {
        *("attention_backend", "code_revision", "disable_eagle_block_drop", "disable_padded_drafter_batch"),
        *("draft_load_config", "draft_sample_method", "draft_tensor_parallel_size", "dspark_draft_topk"),
        *("enable_adaptive_verification", "enforce_eager", "index_share_for_mtp_iteration", "kv_cache_dtype"),
        *("max_model_len", "method", "model", "moe_backend", "num_speculative_tokens"),
        *("num_speculative_tokens_per_batch_size", "parallel_drafting", "prompt_lookup_max", "prompt_lookup_min"),
        *("quantization", "rejection_sample_method", "revision", "suffix_decoding_max_cached_requests"),
        *("suffix_decoding_max_spec_factor", "suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob"),
        *("synthetic_acceptance_length", "synthetic_acceptance_rates", "use_heterogeneous_vocab"),
        "use_local_argmax_reduction",
    }
)
DOCUMENTED_METHODS = frozenset({"draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "ngram", "suffix"})
DOCUMENTED_ARGUMENTS = frozenset(
    {
        *("--dtype", "--max-model-len", "--max-num-seqs", "--quantization", "--revision", "--speculative-config"),
        "--tensor-parallel-size",
    }
)
SUFFIX_LENGTH = 32
"""vLLM's own, which cuts each proposal by how long the match was."""
NO_METHOD = {
    "base": "it drafts with the target's adapters off, and vLLM has no such method",
    "early_exit": "it drafts with the target's first layers, and vLLM has no such method",
}
AGAINST = {
    "draft_vocab": "vLLM's drafts propose from the draft's whole vocabulary",
    "early_exit_layer": NO_METHOD["early_exit"],
}
WITHOUT_MEANING = {
    "deterministic": "vLLM takes one draft length for all steps",
    "device": "vLLM puts the draft beside the target",
    "draft_lengths": "vLLM takes one draft length for all steps",
    "dtype": "vLLM runs the draft in the target's dtype",
    "on_inexact": "vLLM does not ask",
}
PASSED = DOCUMENTED_KEYS - {
    *("draft_load_config", "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    *("quantization", "rejection_sample_method", "revision"),
    *("synthetic_acceptance_length", "synthetic_acceptance_rates"),  # lossy
}
"""Keys that mean something there only, and go over as they are."""
MEASURED = ("draft_model", "ngram")
"""Methods that an estimate has rows of."""
IN_FLIGHT = "nf4"
"""What vLLM makes of plain weights under ``--quantization bitsandbytes``, with nested constants."""


@dataclass(frozen=True)
class Export:
    """A command and what to know of it.

    Attributes:
        arguments: of the shell.
        speculative_config: what is in it as JSON; empty: serve without speculation.
        notes: what differs there, one line each.
    """

    arguments: list[str]
    speculative_config: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """One line for a shell."""
        return shlex.join(self.arguments)


def export_vllm(
    target: str,
    flag: Mapping[str, Any],
    *,
    quantization: str | None = None,
    revision: str | None = None,
    estimate: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    num_heads: int | None = None,
) -> Export:
    """The ``vllm serve`` command for `target` with the drafter that `flag` describes.

    Args:
        target: Hub id or folder.
        flag: keys of `SpeculativeConfig`, those that are given; those that vLLM alone knows go over as they are.
        quantization: of the target: "nf4", or None for what its checkpoint holds.
        revision: of the target.
        estimate: what ``specdec estimate --json`` printed; decides the draft length where the flag has no integer.
        plan: what ``specdec plan --json`` printed; its GPUs are the tensor-parallel size.
        num_heads: attention heads of the target, if known: they have to be divisible.

    Raises:
        ValueError: something that vLLM cannot be told, or a draft length that nobody measured.
    """
    notes: list[str] = []
    arguments = ["vllm", "serve", target]
    if revision is not None:
        arguments += ["--revision", revision]
    if plan is not None:
        planned, quantization = _planned(plan, target, quantization, num_heads, notes)
        arguments += planned
    if quantization is not None:
        arguments += ["--quantization", _bitsandbytes(quantization, "target")]
    config = _speculative(dict(flag), estimate, plan, notes)
    if config:
        arguments += ["--speculative-config", json.dumps(config)]
    return Export(arguments, config, notes)


def measured_length(estimate: Mapping[str, Any], method: str) -> tuple[int, float]:
    """(K, speedup): the draft length that an estimate finds fastest over its kinds of text, each alike; 0 is plain.

    Args:
        estimate: what ``specdec estimate --json`` printed.
        method: whose rows are asked: look-ups have rows of their own.
    """
    tables = []
    for kind in estimate.get("kinds", ()):
        asked = kind.get("draft") if method == "draft_model" else kind.get("lookup")
        rows = (asked or {}).get("rows") or []
        if rows:
            tables.append({row["draft_length"]: row["speedup"] for row in rows})
    if not tables:
        raise ValueError(f"The estimate has no speeds for {method}. Run specdec estimate with that drafter.")
    lengths = set.intersection(*map(set, tables))
    # As many tokens of each kind: seconds add up, so speedups go by their harmonic mean.
    speeds = {length: len(tables) / sum(1 / table[length] for table in tables) for length in sorted(lengths)}
    best = max(speeds, key=lambda length: speeds[length])
    return best, speeds[best]


# --- the flag -------------------------------------------------------------------------------------------------------


def _speculative(flag: dict[str, Any], estimate: Any, plan: Any, notes: list[str]) -> dict[str, Any]:
    """The value of ``--speculative-config``; empty where nothing should be drafted."""
    method = flag.get("method") or "auto"
    if method == "auto":
        method = "ngram" if flag.get("model") is None else "draft_model"
        if method == "draft_model":
            notes.append("auto: the draft model serves every request; vLLM does not choose between it and a look-up.")
    if method in NO_METHOD:
        raise ValueError(f"method={method!r} cannot be exported: {NO_METHOD[method]}. Use a draft model or ngram.")
    if method not in DOCUMENTED_METHODS:
        raise ValueError(f"method={method!r} cannot be exported: it is registered here only.")
    for key, why in AGAINST.items():
        if flag.get(key) is not None:
            raise ValueError(f"{key} cannot be exported: {why}. Leave it out.")
    for key, why in WITHOUT_MEANING.items():
        if flag.get(key):
            notes.append(f"{key} is left out: {why}.")
    config: dict[str, Any] = {"method": method}
    if method == "draft_model":
        config |= _draft(flag)
    length = _length(flag, method, estimate, plan, notes)
    if length == 0:
        return {}
    config["num_speculative_tokens"] = length
    if method == "ngram":
        config |= _lookup(flag)
    if flag.get("rejection_sample_method") is not None:
        config["rejection_sample_method"] = flag["rejection_sample_method"]
    config |= {key: value for key, value in flag.items() if key in PASSED and value is not None}
    if method == "draft_model" and "draft_sample_method" not in config:
        notes.append(
            'Where texts are sampled, vLLM drafts greedily unless "draft_sample_method" is "probabilistic", and keeps '
            "fewer tokens; both are lossless."
        )
    return config


def _draft(flag: Mapping[str, Any]) -> dict[str, Any]:
    if flag.get("model") is None:
        raise ValueError("method='draft_model' needs the draft's Hub id or folder: --draft.")
    own, copied = flag.get("quantization"), flag.get("draft_quantization")
    if copied == "int8":
        raise ValueError(
            "draft_quantization='int8' cannot be exported: it is a copy that this package makes in memory. Leave it "
            "out, or name a draft that is saved quantized."
        )
    quantized = own if own is not None else copied if copied not in (None, "auto", "none") else None
    config = {"model": flag["model"]}
    if flag.get("revision") is not None:
        config["revision"] = flag["revision"]
    if quantized is not None:
        config["quantization"] = _bitsandbytes(quantized, "draft")
    return config


def _lookup(flag: Mapping[str, Any]) -> dict[str, int]:
    least, most = flag.get("prompt_lookup_min"), flag.get("prompt_lookup_max")
    return {
        "prompt_lookup_max": most if most is not None else max(4, least or 1),
        "prompt_lookup_min": least if least is not None else min(1, most or 1),
    }


def _length(flag: Mapping[str, Any], method: str, estimate: Any, plan: Any, notes: list[str]) -> int:
    asked = flag.get("num_speculative_tokens", "auto")
    if asked != "auto":
        return int(asked)
    if estimate is not None and method in MEASURED:
        length, speedup = measured_length(estimate, method)
        where = estimate.get("setting", {}).get("device", "this machine")
        if length == 0:
            notes.append(f"No speculation: measured on {where}, no draft length is faster than plain decoding.")
        else:
            notes.append(f"{length} tokens: fastest by measurement with transformers on {where}, {speedup:.2f}x plain.")
        return length
    if method == "suffix":
        return SUFFIX_LENGTH
    predicted = 0 if plan is None else int(plan.get("plan", plan).get("draft_length") or 0)
    if predicted and method == "draft_model":
        notes.append(f"{predicted} tokens: the plan's prediction; specdec estimate would measure it.")
        return predicted
    raise ValueError(
        'num_speculative_tokens is "auto", which is measured here at every step; vLLM takes one number. Give '
        "--estimate with the output of specdec estimate --json, or --num-speculative-tokens."
    )


def _bitsandbytes(quantization: Any, whose: str) -> str:
    """vLLM's name for `quantization`, if it makes the same of plain weights."""
    name = quantization
    if isinstance(quantization, Mapping):
        is_4bit = bool(quantization.get("load_in_4bit"))
        name = quantization.get("bnb_4bit_quant_type", "fp4") if is_4bit else "int8"
    if name == IN_FLIGHT:
        return "bitsandbytes"
    if name in ("fp4", "int8"):
        raise ValueError(
            f"{name} of the {whose} cannot be exported: of plain weights vLLM makes nf4 only. Save the model quantized "
            "and name that checkpoint (vLLM reads its config), or use nf4."
        )
    raise ValueError(
        f"{name!r} of the {whose} cannot be exported: only nf4 is made while loading. Name a checkpoint that is saved "
        "quantized, without a quantization here: vLLM reads its config."
    )


# --- the plan -------------------------------------------------------------------------------------------------------


def _planned(
    plan: Mapping[str, Any], target: str, quantization: str | None, num_heads: int | None, notes: list[str]
) -> tuple[list[str], str | None]:
    """(arguments, quantization) of a plan."""
    plan = plan.get("plan", plan)
    if plan.get("fits") is False:
        raise ValueError("The plan does not fit, so there is nothing to export. Plan again with one of its changes.")
    planned = plan.get("target") or {}
    if planned.get("name") not in (None, target, target.rstrip("/").rpartition("/")[2]):
        notes.append(f"The plan was made for {planned['name']}.")
    used = _gpus(plan.get("devices") or plan.get("gpus") or ())
    arguments = []
    if len(used) > 1:
        if num_heads is not None and num_heads % len(used):
            raise ValueError(
                f"{num_heads} attention heads cannot be split over {len(used)} GPUs by tensor parallelism. Plan with a "
                "number of GPUs that divides them."
            )
        if num_heads is None:
            notes.append(f"The target's attention heads are not known here: {len(used)} GPUs have to divide them.")
        arguments += ["--tensor-parallel-size", str(len(used))]
        sizes = {device.get("memory") for device in used if isinstance(device, Mapping)}
        if len(sizes) > 1:
            notes.append("The GPUs are of unequal size: tensor parallelism gives each the same share.")
    workload = plan.get("workload") or {}
    for key, name in (("max_length", "--max-model-len"), ("max_batch", "--max-num-seqs")):
        if workload.get(key):
            arguments += [name, str(workload[key])]
    if quantization is None and not planned.get("is_pre_quantized"):  # else vLLM reads the checkpoint's own config
        quantization = planned.get("quantization")
    return arguments, quantization


def _gpus(devices: Sequence[Any]) -> list[Any]:
    """The GPUs that hold layers of the target; a list of names will do."""
    used = []
    for device in devices:
        is_detailed = isinstance(device, Mapping)
        label = str(device.get("label", device.get("device", "")) if is_detailed else device)
        holds = bool(device.get("layers") or device.get("weights")) if is_detailed else True
        if holds and label.startswith("cuda"):
            used.append(device)
        elif holds:
            raise ValueError(
                f"The plan keeps weights of the target on {label}, and vLLM wants them on GPUs. Plan with more GPU "
                "memory, a lower precision or a shorter context."
            )
    if not used:
        raise ValueError("The plan names no GPU that holds the target, and vLLM's tensor parallelism is over GPUs.")
    return used
