"""Do a target's own first layers draft without a second cache, without a trace in it, and only where they can?"""

import copy
import functools
import gc
import logging
import types
import weakref

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, GenerationConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec.auto_length import MeasuredLength
from hf_specdec.config import SpeculativeConfig
from hf_specdec.estimate import run_estimate
from hf_specdec.host import cache as cache_module
from hf_specdec.host import early_exit, knowledge
from hf_specdec.host.early_exit import exit_cost, exit_layer, first_layers
from hf_specdec.host.reasons import NOT_WORTH_IT
from tests.integration.pairs import assert_as_plain, llama, noisy_copy, prompts, speculates
from tests.integration.test_fallbacks import falls_back
from tests.integration.test_memory import BLOCK, peak_bytes

NEW = 16
EXIT = {"method": "early_exit", "early_exit_layer": 1}


def damped(target):
    """`target` with later layers that say less, so that its first ones are kept often, and not always."""
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.5
            layer.mlp.down_proj.weight *= 0.5
    return target


@pytest.fixture
def target():
    return damped(llama(num_hidden_layers=4))


def held_by(module):
    """What `module` holds, by identity, inside its dictionaries of hooks, parameters and children too."""
    return {
        name: [(key, id(each)) for key, each in value.items()] if isinstance(value, dict) else id(value)
        for name, value in vars(module).items()
    }


def state_of(model):
    """Everything that a call could leave behind in a model."""
    modules = {name: (id(module), held_by(module)) for name, module in model.named_modules()}
    return modules, copy.deepcopy(model.config.to_dict()), [*model.state_dict()]


# --- what it takes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_a_call_leaves_nothing_in_the_target(target, batch):
    inputs = {**prompts(batch), "max_new_tokens": NEW}
    plain = target.generate(**inputs)
    before = state_of(target)
    with hf_specdec.enable(target, **EXIT):
        report = assert_as_plain(target, plain, **inputs)
        assert 0.2 < report.acceptance_rate < 1
    assert state_of(target) == before
    assert target.generate(**inputs).tolist() == plain.tolist()


def test_no_layer_past_the_exit_runs_for_a_draft_and_nothing_is_read_twice(target):
    widths = {0: [], 1: [], 2: []}
    for index, seen in widths.items():
        target.model.layers[index].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape[1]))
    with hf_specdec.enable(target, method="early_exit", early_exit_layer=2, num_speculative_tokens=3):
        target.generate(**prompts(2), max_new_tokens=NEW)
        report = speculates(target)
    assert len(widths[2]) == report.target_passes + 1
    assert widths[0] == widths[1]
    assert len(widths[0]) == report.target_passes + 1 + sum(report.draft_lengths)
    assert widths[0].count(6) == 1  # the prompt, once
    assert widths[0].count(1) >= sum(report.draft_lengths)


def test_the_targets_cache_is_the_only_one(target, monkeypatch):
    made, enlarged = [], cache_module._enlarged
    monkeypatch.setattr(cache_module, "_enlarged", lambda states, room: made.append(room) or enlarged(states, room))
    with hf_specdec.enable(target, **EXIT):
        target.generate(**prompts(2), max_new_tokens=NEW)
        speculates(target)
    assert made == [6 + BLOCK] * 2 * 4  # keys and values of each layer


def test_peak_memory_is_plains_and_room_to_grow():
    layers, heads, width, batch, prompt, new = 4, 4, 64, 2, 600, 20
    target = llama(num_hidden_layers=layers, num_key_value_heads=heads, head_dim=width)
    inputs = {**prompts(batch, prompt), "max_new_tokens": new}
    target.generate(**inputs)  # what is made once
    plain = peak_bytes(lambda: target.generate(**inputs))
    with hf_specdec.enable(target, method="early_exit", early_exit_layer=3):
        target.generate(**inputs)
        speculative = peak_bytes(lambda: target.generate(**inputs))
    slot = layers * 2 * heads * width * 4 * batch
    one_layer_twice = (prompt + new + BLOCK) * slot / layers  # while a layer moves into its buffer
    assert speculative - plain <= BLOCK * slot + one_layer_twice + 0.15 * plain  # see test_memory.py
    assert 3 / layers * (prompt + BLOCK) * slot > 0.3 * plain  # a second cache would be seen


def test_the_target_is_not_kept_alive():
    target = damped(llama(num_hidden_layers=4))
    with hf_specdec.enable(target, **EXIT):
        target.generate(**prompts(), max_new_tokens=NEW)
        speculates(target)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


# --- what it follows ------------------------------------------------------------------------------------------------


def test_a_view_is_the_target_cut_short(target):
    view, inputs = first_layers(target, 2), prompts(2)
    assert [id(p) for p in view.parameters()] == [
        id(p) for n, p in target.named_parameters() if not n.startswith(("model.layers.2.", "model.layers.3."))
    ]
    shorter = copy.deepcopy(target)
    shorter.model.layers, shorter.config.num_hidden_layers = shorter.model.layers[:2], 2
    with torch.no_grad():
        torch.testing.assert_close(view(**inputs).logits, shorter(**inputs).logits, rtol=0, atol=0)


def test_it_follows_modules_and_weights_that_are_replaced(target):
    other = damped(llama(seed=5, num_hidden_layers=4))
    expected = first_layers(other, 2)(**prompts(2)).logits
    with hf_specdec.enable(target, method="early_exit", early_exit_layer=2):
        target.generate(**prompts(2), max_new_tokens=NEW)
        target.model.embed_tokens, target.lm_head = other.model.embed_tokens, other.lm_head
        target.model.layers[0] = other.model.layers[0]
        target.load_state_dict(other.state_dict())
        torch.testing.assert_close(first_layers(target, 2)(**prompts(2)).logits, expected, rtol=0, atol=0)
        plain = other.generate(**prompts(2), max_new_tokens=NEW)
        assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_the_first_layers_draft_along(target):
    torch.manual_seed(0)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    adapted = get_peft_model(target, lora).eval()
    plain = adapted.generate(**prompts(3), max_new_tokens=NEW)
    seen = []
    adapted.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"].register_forward_hook(
        lambda *_: seen.append(1)
    )
    with hf_specdec.enable(adapted, **EXIT):
        report = assert_as_plain(adapted, plain, **prompts(3), max_new_tokens=NEW)
    assert len(seen) == report.target_passes + 1 + sum(report.draft_lengths)


@pytest.mark.filterwarnings("ignore")  # accelerate speaks about its own future
@pytest.mark.parametrize("place", ["everything", "the base model as one block", "disk"])
def test_weights_that_accelerate_fetches_are_fetched_for_drafts(target, place, tmp_path):
    plain, cpu = target.generate(**prompts(3), max_new_tokens=NEW), torch.device("cpu")
    if place == "everything":
        accelerate.cpu_offload(target, execution_device=cpu)
    elif place == "disk":
        accelerate.disk_offload(target, str(tmp_path / "weights"), execution_device=cpu)
    else:
        accelerate.cpu_offload_with_hook(target.model, cpu)
    with hf_specdec.enable(target, **EXIT):
        assert target.generate(**prompts(3), max_new_tokens=NEW).tolist() == plain.tolist()
        report = hf_specdec.report(target)
    assert report.reason is None
    assert report.notes == []
    assert report.accepted > 0


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
def test_quantized_layers_draft(target, tmp_path):
    target.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    eight = LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map={"": "cpu"}, dtype="float32"
    )
    plain = eight.generate(**prompts(2), max_new_tokens=NEW)
    with hf_specdec.enable(eight, **EXIT):
        report = assert_as_plain(eight, plain, **prompts(2), max_new_tokens=NEW)
    assert report.accepted > 0


def partial_forward(model):
    def forward(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    model.forward = functools.update_wrapper(functools.partial(forward, model), model.forward)


def method_forward(model):
    model.forward = types.MethodType(type(model).forward, model)


def closure_forward(model):
    original = model.forward
    model.forward = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))


@pytest.mark.parametrize("wrap", [partial_forward, method_forward, closure_forward])
def test_a_forward_replaced_on_the_instance_is_not_the_drafts(target, wrap):
    plain = target.generate(**prompts(2), max_new_tokens=NEW)
    for module in (target, target.model):
        wrap(module)
    passes = []
    target.model.layers[3].register_forward_pre_hook(lambda *_: passes.append(1))
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with hf_specdec.enable(target, **EXIT):
        report = assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW)
    assert len(passes) == 2 * (report.target_passes + 1)


def test_outputs_that_the_config_asks_for_are_not_collected_from_drafts(target):
    plain = target.generate(**prompts(), max_new_tokens=NEW)
    target.config.output_hidden_states = True
    with hf_specdec.enable(target, **EXIT):
        assert_as_plain(target, plain, **prompts(), max_new_tokens=NEW)
    hooks = [len(layer._forward_hooks) for layer in target.model.layers]
    assert hooks == [max(hooks)] * 4  # what transformers itself installs, once
    assert max(hooks) <= 1
    assert target.config.output_hidden_states is True
    assert first_layers(target, 1)(**prompts()).hidden_states is None


# --- what it is told ------------------------------------------------------------------------------------------------


def test_default_is_a_quarter_of_the_layers():
    for number, expected in ((2, 1), (3, 1), (8, 2)):
        assert exit_layer(llama(num_hidden_layers=number), None) == expected


@pytest.mark.parametrize("asked", [4, 9])
def test_a_layer_that_the_target_does_not_have_is_an_error_where_it_is_named(target, asked):
    text = rf"^early_exit_layer must be below the number of layers, which is 4 in LlamaForCausalLM, got {asked}\."
    with pytest.raises(ValueError, match=text):
        hf_specdec.enable(target, method="early_exit", early_exit_layer=asked)
    with hf_specdec.enable(target, **EXIT), pytest.raises(ValueError, match=text):
        target.generate(**prompts(), speculative_config={"early_exit_layer": asked})
    with hf_specdec.enable(target, method="ngram", early_exit_layer=asked):  # another method's key
        target.generate(**prompts(), max_new_tokens=4)


def test_the_flag_is_saved_and_dropped_with_its_method(target, tmp_path):
    with hf_specdec.enable(target, **EXIT, num_speculative_tokens=2):
        target.save_pretrained(tmp_path)
        plain = target.generate(**prompts(2), max_new_tokens=NEW, speculative_config=False)
        target.generate(**prompts(2), max_new_tokens=NEW, speculative_config="ngram")
        assert hf_specdec.report(target).method == "ngram"
    with hf_specdec.register():
        again = LlamaForCausalLM.from_pretrained(tmp_path)
        report = assert_as_plain(again, plain, **prompts(2), max_new_tokens=NEW)
    assert report.method == "early_exit"
    assert max(report.draft_lengths) == 2
    assert SpeculativeConfig(**EXIT).to_dict() == EXIT


@pytest.mark.parametrize("place", ["keyword", "call config", "model config"])
def test_transformers_own_option_names_the_method_where_nothing_else_does(target, place, caplog):
    if not hasattr(GenerationConfig(), "assistant_early_exit"):
        pytest.skip("this transformers has no assistant_early_exit")
    plain, options = target.generate(**prompts(2), max_new_tokens=NEW), {"max_new_tokens": NEW}
    if place == "keyword":
        options["assistant_early_exit"] = 3
    elif place == "call config":
        options = {"generation_config": GenerationConfig(max_new_tokens=NEW, assistant_early_exit=3)}
    else:
        target.generation_config.assistant_early_exit = 3
    calls = []
    target.model.layers[2].register_forward_pre_hook(lambda *_: calls.append(1))
    with caplog.at_level(logging.WARNING), hf_specdec.register():
        report = assert_as_plain(target, plain, **prompts(2), **options, speculative_config=True)
        assert report.method == "early_exit"
        assert len(calls) == report.target_passes + 1 + sum(report.draft_lengths)
        flag = {"num_speculative_tokens": 2}
        report = assert_as_plain(target, plain, **prompts(2), **options, speculative_config=flag)
        assert (report.method, max(report.draft_lengths)) == ("early_exit", 2)
        assert caplog.records == []
        # A draft that is named wins.
        target.generate(**prompts(2), **options, speculative_config="ngram")
        assert hf_specdec.report(target).method == "ngram"
        target.generate(**prompts(2), **options, speculative_config=True, assistant_model=noisy_copy(target))
        assert hf_specdec.report(target).method == "auto"
    assert [r.getMessage() for r in caplog.records] == [
        "assistant_early_exit set aside: speculative_config is on for this call."
    ] * 2


def test_a_wrong_value_of_transformers_own_option_is_an_error(target):
    with hf_specdec.register():
        with pytest.raises(ValueError, match="early_exit_layer must be at least 1, got 0") as caught:
            target.generate(**prompts(), speculative_config=True, assistant_early_exit=0)
        assert caught.value.__notes__ == ["early_exit_layer was read from: assistant_early_exit"]
        with pytest.raises(ValueError, match="early_exit_layer must be below the number of layers"):
            target.generate(**prompts(), speculative_config=True, assistant_early_exit=4)


def test_inside_transformers_own_assisted_decoding_there_are_no_keys_to_draft_on(target):
    with pytest.raises(ValueError, match=r"method='early_exit' drafts on the target's own keys, which transformers'"):
        hf_specdec.SpeculativeCandidateGenerator(target, method="early_exit")


# --- where it cannot draft ------------------------------------------------------------------------------------------


def test_one_layer_is_too_few(caplog):
    reason = "no draft: method 'early_exit' needs a target of at least two layers"
    falls_back(caplog, llama(num_hidden_layers=1), None, reason, flag={"method": "early_exit"})


def test_layers_that_are_not_found(caplog, target):
    target.model.more_layers = copy.deepcopy(target.model.layers)
    reason = "no draft: method 'early_exit' finds no list of decoder layers in LlamaForCausalLM"
    falls_back(caplog, target, None, reason, flag=EXIT)


class Unknown(LlamaForCausalLM):
    """A class that the suites do not cover."""


class NeedsAll(LlamaForCausalLM):
    """Looks at its last layer by number."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        self.model.layers[self.config.num_hidden_layers - 1]
        return super().forward(*args, **kwargs)


class LooksAtDepth(LlamaForCausalLM):
    """Adds the number of its layers to its embeddings."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids, **kwargs):
        embeds = self.get_input_embeddings()(input_ids) + len(self.model.layers)
        return super().forward(inputs_embeds=embeds, **kwargs)


class RunsOthers(LlamaForCausalLM):
    """Keeps its layers in another place too, and runs them all."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        self.model.layers = self.all_layers[0]
        return super().forward(*args, **kwargs)


def of_class(cls, target):
    made = cls(copy.deepcopy(target.config)).eval()
    made.load_state_dict(target.state_dict())
    made.all_layers = [made.model.layers]
    return made


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (NeedsAll, "no draft: the first layers of NeedsAll do not run alone: IndexError: "),
        (RunsOthers, "no draft: the first layers of RunsOthers do not run alone: ValueError: other layers ran too"),
        (LooksAtDepth, "no draft: the first layers of LooksAtDepth alone give other keys, by "),
    ],
)
def test_a_model_that_does_not_run_cut_short_decodes_plainly(target, cls, reason):
    odd = of_class(cls, target)
    plain = odd.generate(**prompts(2), max_new_tokens=NEW)
    with hf_specdec.enable(odd, **EXIT):
        for _ in range(2):
            assert odd.generate(**prompts(2), max_new_tokens=NEW).tolist() == plain.tolist()
            assert hf_specdec.report(odd).reason.startswith(reason), hf_specdec.report(odd).reason


def test_a_model_that_the_suites_do_not_cover_is_tried_once(target, monkeypatch):
    tried, largest_error = [], early_exit._largest_error
    monkeypatch.setattr(early_exit, "_largest_error", lambda *args: tried.append(1) or largest_error(*args))
    unknown = of_class(Unknown, target)
    plain = unknown.generate(**prompts(2), max_new_tokens=NEW)
    with hf_specdec.enable(unknown, **EXIT):
        for _ in range(2):
            assert_as_plain(unknown, plain, **prompts(2), max_new_tokens=NEW)
    assert len(tried) == 1
    with hf_specdec.enable(target, **EXIT):
        assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW)
    assert len(tried) == 1


def test_a_draft_that_fails_in_the_middle_is_dropped_and_the_text_is_plains(target):
    plain, calls = target.generate(**prompts(2), max_new_tokens=NEW), []

    def fail(module, args):
        if args[0].shape[1] == 1:
            calls.append(1)
            if len(calls) == 6:
                raise RuntimeError("out of memory")

    hook = target.model.layers[0].register_forward_pre_hook(fail)
    with hf_specdec.enable(target, **EXIT):
        assert_as_plain(target, plain, **prompts(2), max_new_tokens=NEW)
        [note] = hf_specdec.report(target).notes
    hook.remove()
    assert note == "Decoded plainly from the point where the draft failed (RuntimeError: out of memory)."


# --- what it costs --------------------------------------------------------------------------------------------------


def test_the_guess_of_its_cost_is_its_share_of_the_bytes(target):
    layer = sum(p.nbytes for p in target.model.layers[0].parameters())
    rest = target.lm_head.weight.nbytes + target.model.norm.weight.nbytes
    for number in (1, 3):
        assert exit_cost(target, number) == pytest.approx((number * layer + rest) / (4 * layer + rest))


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("batch", [1, 3])
def test_under_auto_its_own_costs_are_measured_apart_by_depth(target, batch):
    options = {**prompts(batch), "max_new_tokens": 40}
    plain = target.generate(**options)
    for layer in (1, 3):
        with hf_specdec.enable(target, method="early_exit", early_exit_layer=layer):
            for _ in range(3):
                assert target.generate(**options).tolist() == plain.tolist()
                report = hf_specdec.report(target)
                assert report.reason in (None, NOT_WORTH_IT)
            if report.reason is None:
                assert "of a target pass" in report.decision
    known = {key[0][0]: of for key, of in knowledge._KNOWN[target][target].items()}
    assert {"early_exit layer 1", "early_exit layer 3"} <= known.keys()
    for name in ("early_exit layer 1", "early_exit layer 3"):
        assert known[name].costs.read.is_empty  # it never has to read


def test_an_estimate_measures_it(target):
    texts = {"code": [prompts()["input_ids"][0]] * 2}
    estimate = run_estimate(target, None, texts, budget_seconds=30.0, max_new_tokens=40, **EXIT)
    assert estimate.costs["cost_coefficient"] > 0
    assert estimate.kinds[0].draft is not None
    assert "the draft's prefill" not in estimate.not_measured


@pytest.mark.usefixtures("measured")
def test_where_it_does_not_pay_calls_are_plain(target, monkeypatch):
    """Drafting takes ten target passes a token here."""
    learn = MeasuredLength.learn

    def slow(self, state, plan, outcome):
        outcome = type(outcome)(outcome.survivals, outcome.emitted, 0.0, 10.0 * plan.length, 1.0)
        learn(self, state, plan, outcome)

    monkeypatch.setattr(MeasuredLength, "learn", slow)
    options = {**prompts(), "max_new_tokens": 40}
    plain, reasons, drafted = target.generate(**options), [], []
    with hf_specdec.enable(target, method="early_exit", early_exit_layer=2):
        for _ in range(4):
            assert target.generate(**options).tolist() == plain.tolist()
            reasons.append(hf_specdec.report(target).reason)
            drafted.append(hf_specdec.report(target).drafted)
    assert reasons[-1] == NOT_WORTH_IT
    assert sum(drafted) < 12
