import builtins

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_specdec.host import linears
from hf_specdec.host.linears import Int8Linear, check_kernels, converted, is_linear, why_slow

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def layer(bias=True, dtype=torch.float32, kind=nn.Linear):
    torch.manual_seed(0)
    made = Conv1D(48, 64) if kind is Conv1D else nn.Linear(64, 48, bias=bias)
    nn.init.normal_(made.weight)
    if made.bias is not None:
        nn.init.normal_(made.bias)
    return made.to(dtype).eval()


def relative_error(got, expected):
    got, expected = got.detach().float(), expected.detach().float()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [(1,), (2, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_compute_nearly_the_same_in_float32(rows, bias, dtype):
    linear, inputs = layer(bias, dtype), torch.randn(*rows, 64).to(dtype)
    output = converted(linear, "int8")(inputs)
    assert (output.dtype, output.shape) == (torch.float32, (*rows, 48))
    assert relative_error(output, linear(inputs)) < 0.03  # weights to 1/254 and inputs to 1/128 of the largest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits_compute_roughly_the_same_in_the_weights_dtype(bias, dtype):
    pytest.importorskip("bitsandbytes")
    linear, inputs = layer(bias, dtype), torch.randn(5, 64).to(dtype)
    with torch.no_grad():
        output = converted(linear, "nf4")(inputs)
    assert output.dtype == dtype
    assert relative_error(output, linear(inputs)) < 0.15  # nf4 rounds normal weights by about a tenth


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_transposed_layers_are_converted_too(quantization):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    conv, inputs = layer(kind=Conv1D), torch.randn(3, 64)
    with torch.no_grad():
        assert relative_error(converted(conv, quantization)(inputs), conv(inputs)) < 0.15


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_the_layer_converted_is_left_as_it_was(quantization):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    linear = layer(dtype=torch.bfloat16)
    weight, bias = linear.weight, linear.bias
    values = weight.clone(), bias.clone(), weight.data_ptr()
    made = converted(linear, quantization)
    with torch.no_grad():
        made.bias += 1
    assert linear.weight is weight
    assert linear.bias is bias
    assert torch.equal(weight, values[0])
    assert torch.equal(bias, values[1])
    assert weight.data_ptr() == values[2]


def test_a_row_with_outliers_does_not_blank_the_others():
    """One scale for a whole tensor once cost a real draft much of its acceptance: a text's first token is large."""
    linear, inputs = layer(), torch.randn(4, 64)
    made, expected = converted(linear, "int8"), linear(inputs)
    inputs[0] *= 1000
    assert relative_error(made(inputs)[1:], expected[1:]) < 0.03


def test_rows_of_zeros_give_the_bias():
    linear = layer()
    assert torch.equal(converted(linear, "int8")(torch.zeros(3, 64)), linear.bias.detach().expand(3, 48))
    dead = nn.Linear(64, 48, bias=False)
    nn.init.zeros_(dead.weight)
    assert torch.equal(Int8Linear(dead.weight.detach(), None)(torch.randn(2, 64)), torch.zeros(2, 48))


def test_only_plain_layers_are_linear():
    class Other(nn.Linear):
        pass

    assert [is_linear(each) for each in (layer(), layer(kind=Conv1D), Other(2, 2), nn.Embedding(2, 2))] == [
        True,
        True,
        False,
        False,
    ]


def test_eight_bits_off_the_cpu_are_refused():
    with pytest.raises(
        ValueError, match=r'has kernels for CPUs, and the draft is on cuda:0\. Pass "nf4" or leave it out'
    ):
        check_kernels("int8", CUDA)
    check_kernels("int8", CPU)


def test_a_torch_without_the_kernels_is_named(monkeypatch):
    monkeypatch.delattr(torch, "_make_per_channel_quantized_tensor")
    with pytest.raises(ValueError, match=r"needs 8-bit kernels, which torch .* has not\. Leave it out\."):
        check_kernels("int8", CPU)


def test_four_bits_without_bitsandbytes_are_refused(monkeypatch):
    found = builtins.__import__
    monkeypatch.setattr(linears.importlib, "import_module", lambda name: found("no module of this name"))
    with pytest.raises(ImportError) as caught:
        check_kernels("nf4", CPU)
    assert str(caught.value) == (
        "draft_quantization=\"nf4\" needs bitsandbytes, which is not installed: pip install 'hf_specdec[bitsandbytes]'."
    )


@pytest.mark.parametrize("has_kernels", [True, False])
def test_four_bits_on_a_cpu_that_cannot_multiply_them_are_slow(has_kernels, monkeypatch):
    monkeypatch.setattr(linears, "_has_avx512bf16", lambda: has_kernels)
    assert (why_slow("nf4", CPU) is None) == has_kernels
    assert why_slow("nf4", CUDA) is None
    assert why_slow("int8", CPU) is None
    if not has_kernels:
        fact = why_slow("nf4", CPU)
        assert fact.startswith(
            "bitsandbytes multiplies 4-bit weights on CPUs with AVX512-BF16 only and unpacks them at"
        )
        assert fact.endswith('every pass on this one: draft_quantization="int8" is faster here.')
