"""Does the planner keep its rules on machines that are not here? Layouts are accelerate's own, on meta tensors."""

import functools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig

from hf_specdec.host.placement import _with_offload, find_machine, lay_out
from hf_specdec.host.quantized_sizes import read_quantization
from hf_specdec.host.sizes import Skeleton, read_dtype
from hf_specdec.placement.advice import changes_that_fit, what_keeps_the_draft
from hf_specdec.placement.cards import CARDS, find_card
from hf_specdec.placement.machine import GIB, make_machine, read_bytes, read_rate
from hf_specdec.placement.planner import make_plan
from hf_specdec.placement.sizes import Workload
from hf_specdec.placement.speed import Layout, PassTime
from hf_specdec.placement.table import facts, speeds

ROOT = Path(__file__).parents[2]
LAYERS = 16
WORK = Workload(max_length=2048, draft_length=8)
SHORT = Workload(max_length=256, draft_length=8)


@functools.cache
def target(quantization=None, **changes):
    """5.8 GiB in bfloat16: 16 layers of 0.33 GiB, embeddings and head of 0.24 GiB each."""
    options = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
        **changes,
    }
    return skeleton(LlamaConfig(**options), quantization, "target")


@functools.cache
def draft(num_layers=4, hidden_size=512, quantization=None):
    """0.1 GiB."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    return skeleton(config, quantization, "draft")


def skeleton(config, quantization, name):
    dtype = read_dtype("auto", config, name)
    return Skeleton(config, dtype, read_quantization(quantization, dtype, must_load=False), name)


def machine(*gpus, cpu=None, disk=None, **options):
    """GiB by device."""
    memory = {index: int(size * GIB) for index, size in enumerate(gpus)}
    memory |= {key: int(size * GIB) for key, size in (("cpu", cpu), ("disk", disk)) if size is not None}
    return make_machine(memory, **options)


def plan(here, drafting=None, work=WORK, of=None):
    verifying = of or target()
    return make_plan(verifying.sizes, drafting and drafting.sizes, here, work, lay_out(verifying))


def use(made, label):
    return next(device for device in made.devices if device.label == label)


def is_sound(made, of=None, drafting=None, work=WORK):
    """Every weight, cache and reserve is somewhere, once, and every device keeps its headroom."""
    sizes = (of or target()).sizes
    assert made.fits
    assert sum(device.cache for device in made.devices) == sum(sizes.cache_bytes(work))
    layers = [layer for device in made.devices for layer in device.layers]
    assert sorted(layers) == list(range(sizes.num_layers))  # none is split
    if not sizes.spills_plain:
        assert sum(device.weights for device in made.devices) == sizes.held_bytes
    if drafting is not None and made.draft_device is not None:
        holding = [device for device in made.devices if device.draft_weights]
        assert [device.draft_weights for device in holding] == [drafting.sizes.held_bytes]  # whole, on one device
    for device in made.devices:
        assert device.headroom >= device.reserve
    return True


# --- machines -------------------------------------------------------------------------------------------------------


def test_one_small_gpu_holds_both():
    made = plan(machine(8), draft())
    assert is_sound(made, drafting=draft())
    assert made.device_map == {"": 0}
    assert made.draft_device == 0
    assert made.speculative_tokens_per_second > made.plain_tokens_per_second


def test_two_unequal_gpus_share_the_target():
    made = plan(machine(3, 6), draft())
    assert is_sound(made, drafting=draft())
    first, second = (len(use(made, label).layers) for label in ("cuda:0", "cuda:1"))
    assert 0 < first < second
    assert "cpu" not in made.device_map.values()


def test_room_for_an_offloaded_layer_is_not_kept_where_nothing_is_offloaded():
    # accelerate alone keeps 0.33 GiB of the first GPU for that, and these two would then not hold the target.
    sizes = target().sizes
    spare = sizes.pass_bytes(WORK) + 0.1 * GIB
    each = (sizes.held_bytes + sum(sizes.cache_bytes(WORK))) / 2
    layer = sum(piece.held_bytes for piece in sizes.pieces if piece.layer == 0)
    made = plan(machine(*[(each + layer / 2 + spare) / 0.94 / GIB] * 2))
    assert is_sound(made)
    assert set(made.device_map.values()) == {0, 1}


def test_gpu_and_cpu_spill_keeps_caches_where_layers_run():
    made = plan(machine(4.5, cpu=16))
    assert is_sound(made)
    on_cpu = use(made, "cpu")
    assert on_cpu.layers
    assert on_cpu.cache == 0
    assert use(made, "cuda:0").cache == sum(target().sizes.cache_bytes(WORK))
    assert made.num_offloaded == len(on_cpu.layers)
    assert "layers are offloaded: every pass copies" in " ".join(made.notes)


def test_cpu_spills_to_disk_and_runs_itself():
    made = plan(machine(cpu=4, disk=100), draft())
    assert is_sound(made, drafting=draft())
    assert use(made, "disk").layers
    assert use(made, "disk").cache == 0
    assert made.draft_device == "cpu"


def test_cpu_only():
    made = plan(machine(cpu=16), draft())
    assert is_sound(made, drafting=draft())
    assert made.device_map == {"": "cpu"}


def test_nothing_fits_and_the_numbers_are_named():
    made = plan(machine(2), draft())
    assert not made.fits
    assert made.device_map == {}
    text = made.shortage
    assert "Not enough memory for target (max_batch=1, max_length=2048): target 5.77 GiB" in text
    assert "usable: cuda:0 1.88 of 2.00 GiB" in text
    assert "GiB too much" in text


def test_of_two_gpus_that_are_too_small_each_is_told_its_lack():
    made = plan(machine(2, 2))
    assert not made.fits
    assert all(device.weights for device in made.devices)


# --- rules ----------------------------------------------------------------------------------------------------------


def test_caches_come_before_weights():
    short, long = (plan(machine(7.5, cpu=32), work=Workload(max_length=length)) for length in (512, 16384))
    assert short.num_offloaded == 0
    assert long.num_offloaded > 0
    assert use(long, "cuda:0").cache == sum(target().sizes.cache_bytes(Workload(max_length=16384)))


def test_cache_of_the_draft_comes_before_weights():
    wide = draft(hidden_size=2048, num_layers=8)  # no grouped heads: a large cache
    work = Workload(max_length=8192)
    made = plan(machine(16, cpu=64), wide, work)
    assert use(made, "cuda:0").draft_cache == sum(wide.sizes.cache_bytes(work))


def test_rows_of_the_verify_pass_and_their_logits_come_before_weights():
    few, many = (
        plan(machine(16), work=Workload(max_batch=64, max_length=64, draft_length=length)) for length in (1, 32)
    )
    rows = 64 * (33 - 2)
    assert use(many, "cuda:0").passes - use(few, "cuda:0").passes >= rows * 32000 * 4


def test_draft_stays_with_the_output_head():
    made = plan(machine(4.5, 4.5), draft())
    assert is_sound(made, drafting=draft())
    head = next(device for device in made.devices if device.has_head)
    assert head.draft_weights


def test_draft_takes_a_free_device_where_the_head_has_no_room():
    both = target().sizes.held_bytes + sum(target().sizes.cache_bytes(WORK)) + target().sizes.pass_bytes(WORK)
    made = plan(machine((both + 0.05 * GIB) / 0.94 / GIB, 2), draft())
    assert is_sound(made, drafting=draft())
    assert made.device_map == {"": 0}
    assert made.draft_device == 1


def test_draft_leaves_for_a_device_that_is_faster_for_it():
    here = machine(16, 16, bandwidths={"0": 100e9, "1": 100e9})
    wide = draft(num_layers=2, hidden_size=4096)
    assert plan(here, wide).draft_device == 0
    faster = machine(16, 4, bandwidths={"0": 100e9, "1": 3000e9})
    assert plan(faster, wide).draft_device == 1


def test_more_tokens_than_the_models_were_made_for_are_a_line():
    here = machine(24, cpu=32)
    made = plan(here, draft(), Workload(max_length=4096), target(max_position_embeddings=4000))
    assert "max_length=4096 is more than the 4000 positions that target was made for." in made.notes
    assert "positions that draft" in " ".join(made.notes)  # 2048
    assert "positions" not in " ".join(plan(here, draft(), WORK).notes)


@pytest.mark.parametrize("is_room", [True, False])
def test_a_draft_that_was_left_out_is_kept_in_nf4_where_that_fits(is_room):
    without = replace(plan(machine(24, cpu=32), draft()), draft_device=None)
    told = what_keeps_the_draft(without, lambda **change: replace(without, draft_device=0 if is_room else None))
    assert told == ("With the draft in nf4 (draft_quantization='nf4') it would stay." if is_room else None)


def test_draft_pushes_nothing_off_where_going_without_is_faster():
    both = target().sizes.held_bytes + sum(target().sizes.cache_bytes(WORK)) + target().sizes.pass_bytes(WORK)
    here = machine((both + 0.05 * GIB) / 0.94 / GIB, cpu=32, bandwidths={"gpu": 1000e9})
    slow = draft(num_layers=8, hidden_size=2048)  # on the CPU it is slow, beside the target it pushes layers off
    made = plan(here, slow)
    assert is_sound(made)
    assert made.device_map == {"": 0}
    assert made.draft_device is None
    assert "No draft: it would" in " ".join(made.notes)
    assert "fewer than" in " ".join(made.notes)
    assert made.speculative_tokens_per_second is None


def test_draft_may_push_more_off_where_much_is_offloaded_anyway():
    here = machine(3, cpu=32, bandwidths={"gpu": 1000e9, "cpu": 5e9})
    made = plan(here, draft())
    assert is_sound(made, drafting=draft())
    assert made.draft_device == 0
    assert made.num_offloaded > 0
    assert made.speculative_tokens_per_second > 2 * made.plain_tokens_per_second


def test_target_runs_on_the_cpu_where_the_gpu_has_room_for_the_draft_only():
    made = plan(machine(0.6, cpu=16, bandwidths={"cpu": 40e9}), draft())
    assert is_sound(made, drafting=draft())
    assert made.device_map == {"": "cpu"}
    assert made.num_offloaded == 0


def test_layers_are_not_split_where_the_model_says_so():
    made = plan(machine(3, 6))
    assert is_sound(made)
    assert all(name.count(".") <= 2 for name in made.device_map)


@pytest.mark.parametrize("here", [machine(3, 6), machine(4, cpu=16)])
def test_tied_weights_are_placed_once_and_together(here):
    tied = target(tie_word_embeddings=True)
    made = plan(here, of=tied)
    assert is_sound(made, of=tied)
    assert made.device_map["lm_head"] == made.device_map["model.embed_tokens"]
    assert use(made, "cuda:0").has_head


def test_every_device_keeps_its_headroom():
    generous = plan(machine(4, 8, headroom=0.25))
    assert is_sound(generous)
    assert use(generous, "cuda:1").headroom >= 2 * GIB
    assert not plan(machine(8, headroom=0.5)).fits


def test_quantized_sizes_hold_constants_and_what_is_not_quantized():
    four = target("nf4")
    made = plan(machine(4), of=four)
    assert is_sound(made, of=four)
    linears = 16 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 11008)
    tables = 2 * 2 * 32000 * 4096
    assert use(made, "cuda:0").weights == pytest.approx(linears * (0.5 + 4 / 64) + tables, rel=1e-3)
    assert made.target.constants == linears * 4 / 64


def test_bitsandbytes_leaves_spilled_layers_as_they_are():
    four = target("nf4")
    made = plan(machine(2.2, cpu=16), of=four, work=SHORT)
    assert is_sound(made, of=four, work=SHORT)
    layers = use(made, "cpu").layers
    assert layers
    plain = sum(p.plain_bytes for p in four.sizes.pieces if p.layer in layers)
    assert use(made, "cpu").weights >= plain
    assert "unquantized, as this quantizer leaves what it offloads" in " ".join(made.notes)


def test_bitsandbytes_is_told_of_offload_in_a_copy_of_its_config():
    pytest.importorskip("bitsandbytes")
    config = read_quantization("nf4", read_dtype("bfloat16", LlamaConfig(), "target"))[1]
    assert _with_offload(config, {"a": 0, "b": "cpu"}).llm_int8_enable_fp32_cpu_offload
    assert not config.llm_int8_enable_fp32_cpu_offload
    assert _with_offload(config, {"": "cpu"}) is _with_offload(config, {"a": 0, "b": 1}) is config


def test_bitsandbytes_target_is_not_spread_over_cpu_and_disk():
    # transformers leaves everything on both unquantized then, also what would have fitted.
    made = plan(machine(cpu=1.5, disk=100), of=target("nf4"), work=SHORT)
    assert not made.fits
    assert plan(machine(cpu=4, disk=100), of=target("nf4"), work=SHORT).device_map == {"": "cpu"}


def test_larger_draft_than_the_quantized_target_is_a_line():
    large = draft(num_layers=24, hidden_size=2048)
    made = plan(machine(16), large, of=target("nf4"))
    assert made.fits
    assert "is larger than the target" in " ".join(made.notes)


def test_draft_that_is_not_expected_to_pay_is_a_line():
    unlike = Workload(max_length=2048, acceptance_rate=0.2)
    made = plan(machine(16), draft(num_layers=24, hidden_size=2048), unlike)
    assert made.draft_length == 0
    assert "not expected to pay here" in " ".join(made.notes)


# --- speeds ---------------------------------------------------------------------------------------------------------


def on(device, of, here):
    sizes = of.sizes
    return PassTime(Layout(sizes, {piece.name: device for piece in sizes.pieces}, device), here, SHORT)


def qwen(num_layers, hidden_size, intermediate_size, heads, quantization=None):
    config = LlamaConfig(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        dtype="bfloat16",
    )
    return skeleton(config, quantization, "qwen")


@pytest.mark.parametrize(
    ("quantization", "rows", "measured"),
    [(None, 1, 0.121), (None, 8, 0.156), (None, 16, 0.182), ("nf4", 1, 0.045), ("nf4", 8, 0.071), ("nf4", 16, 0.105)],
)
def test_passes_of_a_model_on_a_cpu_are_about_what_was_measured(quantization, rows, measured):
    # Qwen2.5-Coder-1.5B, two cores with AVX512-BF16. A quarter, since no staircase of a kernel is modelled.
    model = qwen(28, 1536, 8960, 12, quantization)
    assert on("cpu", model, machine(cpu=16)).seconds(rows) == pytest.approx(measured, rel=0.25)


def test_small_models_on_a_gpu_are_bound_by_launches():
    model = qwen(24, 896, 4864, 14)
    h200 = make_machine({0: 140 * GIB}, {0: "H200"})
    assert on(0, model, h200).seconds(1) == pytest.approx(24 * 0.26e-3)


def test_more_rows_touch_more_experts():
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=1,
        dtype="bfloat16",
    )
    here = machine(cpu=64)
    passes = on("cpu", skeleton(config, None, "moe"), here)
    assert passes.seconds(8) > 3 * passes.seconds(1)


def test_predictions_say_what_they_assume():
    known = make_machine({0: 24 * GIB}, {0: "NVIDIA GeForce RTX 4090"})
    assert not plan(known, draft()).is_speed_assumed
    guessed = plan(machine(24), draft())
    assert guessed.is_speed_assumed
    text = "\n".join([*facts(guessed), *speeds(guessed)])
    assert "bandwidths assumed" in text
    assert "if 70% of the drafted tokens are kept" in text


def test_given_bandwidth_is_the_speed():
    slow, fast = (plan(machine(24, bandwidths={"gpu": rate})) for rate in (100e9, 200e9))
    ratio = fast.plain_tokens_per_second / slow.plain_tokens_per_second
    assert ratio == pytest.approx(2, rel=0.02)


# --- what would fit -------------------------------------------------------------------------------------------------


def test_changes_are_listed_nearest_first():
    made = plan(machine(4.3), draft())
    four = target("nf4")

    def replan(*, quantization=None, max_length=None, has_draft=True, spill_to=None, **rest):
        if rest.get("draft_quantization"):
            return None
        of = four if quantization == "nf4" else target("int8") if quantization == "int8" else target()
        here = machine(4.3, **({spill_to: 100} if spill_to else {}))
        work = WORK if max_length is None else Workload(max_length=max_length, draft_length=8)
        return plan(here, draft() if has_draft else None, work, of)

    changes = changes_that_fit(made, replan)
    assert changes[0].startswith("the target in int8 (")
    assert changes[1].startswith("the target in nf4 (")
    assert "layers to the CPU" in changes[2]
    assert "layers to disk" in changes[3]


def test_shorter_context_is_found_to_the_step():
    work = Workload(max_length=16384)
    made = plan(machine(8), None, work)
    assert not made.fits

    def replan(*, max_length=None, **rest):
        return None if max_length is None else plan(machine(8), None, Workload(max_length=max_length))

    changes = changes_that_fit(made, replan)
    length = int(changes[0].split()[1])
    assert plan(machine(8), None, Workload(max_length=length)).fits
    assert not plan(machine(8), None, Workload(max_length=length + 256)).fits


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GiB", 24 * GIB), ("800MB", 800_000_000), ("1.5 GiB", 3 * GIB // 2), ("2000000", 2000000), (7, 7)],
)
def test_memory_is_read(text, value):
    assert read_bytes(text) == value


@pytest.mark.parametrize("text", ["much", "24 apples", "-3GiB", "i"])
def test_memory_that_cannot_be_read_is_named(text):
    with pytest.raises(ValueError, match="as an amount of memory. Write it as 24GiB"):
        read_bytes(text)


def test_bandwidth_is_read():
    assert read_rate("1008GB/s") == read_rate("1008") == 1008e9
    assert read_rate("3.35TB/s") == 3.35e12
    for text in ("fast", "0", "-1GB/s"):
        with pytest.raises(ValueError, match="as a bandwidth"):
            read_rate(text)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("3090", "RTX 3090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("24GiB", None),
        ("80GB", None),
        ("RTX", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("GeForce GTX 1080", None),
    ],
)
def test_cards_are_found_by_the_names_that_drivers_give(name, card):
    found = find_card(name)
    assert (found and found.name) == card


def test_known_cards_have_all_their_numbers():
    assert all(min(card.gib, card.bandwidth, card.arithmetic) > 0 and math.isfinite(card.gib) for card in CARDS)
    assert len({card.name for card in CARDS}) == len(CARDS)


def test_device_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"device 'cuda:7', which does not exist: \d+ CUDA devices are visible"):
        find_machine({"cuda:7": "4GiB"})
    with pytest.raises(ValueError, match="Pass offload_folder"):
        find_machine({"cpu": "4GiB", "disk": "4GiB"})


def test_this_machine_has_a_cpu(tmp_path):
    here = find_machine(offload_folder=tmp_path / "later")
    assert here["cpu"].memory_bytes > 0
    assert here["disk"].memory_bytes > 0


def test_workload_names_what_is_wrong():
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        Workload(max_length=0)


def test_planner_needs_no_torch():
    code = (
        "import sys, types; package = types.ModuleType('hf_specdec'); package.__path__ = ['hf_specdec']; "
        "sys.modules['hf_specdec'] = package; import hf_specdec.placement.planner, hf_specdec.placement.advice, "
        "hf_specdec.placement.table; print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_draft_that_has_no_room_is_left_out_and_the_notes_say_so():
    both = target().sizes.held_bytes + sum(target().sizes.cache_bytes(WORK)) + target().sizes.pass_bytes(WORK)
    made = plan(machine((both + 0.05 * GIB) / 0.94 / GIB), draft())
    assert is_sound(made)
    assert made.draft_device is None
    assert made.draft is not None
    assert "No draft: there is no room for it beside the target" in " ".join(made.notes)


def test_predicted_draft_length_has_room_in_verify_passes():
    work = Workload(max_length=256, draft_length=2, acceptance_rate=0.95)
    assert plan(machine(16), draft(num_layers=1), work).draft_length == 2


@pytest.mark.parametrize("text", ["24", "1000", "1e400GiB", "1e30GiB", -5, float("nan")])
def test_amounts_that_nobody_means_are_refused(text):
    with pytest.raises(ValueError, match=r"amount of memory"):
        read_bytes(text)


def test_bandwidth_is_positive():
    with pytest.raises(ValueError, match=r"bandwidth of 'cpu' must be positive, got -1"):
        make_machine({"cpu": GIB}, bandwidths={"cpu": -1.0})
