"""The yardstick itself: `assert_close` lets rounding pass and sees small faults that are put into a model by hand."""

import copy

import pytest
import torch
import transformers
from pairs import assert_as_exact, assert_close, assert_gradients_close, in_float64, largest, left_padded, margins, pair
from torch import nn

from blockformer.conversion import from_official

pytestmark = pytest.mark.portable

VOCAB = 97
DECODER = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TARGET = {**DECODER, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
SIZES_BY_FAMILY = {
    "bert": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, **DECODER},
    "t5": {"d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "bart": {"d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "scale_embedding": True, "init_std": 0.2, **TARGET},
}
CLASSES = {
    "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
    "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
}
FAMILIES = ("qwen3", "mistral", *CLASSES)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """family -> ours, and the logits of transformers' model with the same weights, in float32 and in float64."""

    def make(family):
        if family not in CLASSES:
            return pair(family)
        config_class, model_class = CLASSES[family]
        torch.manual_seed(0)
        theirs = model_class(config_class(vocab_size=VOCAB, **SIZES_BY_FAMILY[family])).eval()
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif family in ("bert", "gpt2"):
                    parameter.normal_(std=0.3)
                elif "relative" in name:
                    parameter.normal_()
        folder = tmp_path_factory.mktemp(family)
        theirs.save_pretrained(folder)
        return from_official(folder).eval(), theirs

    found = {}
    for family in FAMILIES:
        ours, theirs = make(family)
        with in_float64(theirs) as wide:
            exact = logits(wide, given(family))
        found[family] = ours, logits(theirs, given(family)), exact
    return found


def given(family):
    """Inputs of two rows, the second padded on the left in a decoder and on the right elsewhere."""
    ids, mask = left_padded(2, 24)
    ids = torch.where(mask.bool(), ids % (VOCAB - 3) + 3, ids)
    if family in ("t5", "bart"):
        target = ids[[0, 0]].flip(0)
        return {"input_ids": ids.flip(1), "attention_mask": mask.flip(1), "decoder_input_ids": target}
    if family == "bert":
        return {"input_ids": ids.flip(1), "attention_mask": mask.flip(1), "token_type_ids": (ids.flip(1) % 2)}
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@torch.no_grad()
def logits(model, inputs, mask=None):
    """At the real tokens, those of a mask [B, T] where the input's own may hold a fault."""
    mask = inputs["attention_mask"] if mask is None else mask
    found = model(**inputs).logits
    return found.flatten(0, 1) if "decoder_input_ids" in inputs else found[mask.bool()]


def each(model, attribute):
    return [module for module in model.modules() if getattr(module, attribute, None) is not None]


def replace(model, attribute, change):
    """Change a number of every module that has it."""
    found = each(model, attribute)
    assert found
    for module in found:
        setattr(module, attribute, change(getattr(module, attribute)))


def attention_scale(model, inputs):
    replace(model, "scaling", lambda scale: scale * (1 + 1e-4))


def epsilon_of_the_norms(model, inputs):
    replace(model, "eps", lambda eps: 1e-6 if eps == 1e-5 else 1e-5)


def a_matrix_in_float16(model, inputs):
    weight = each(model, "down_proj")[-1].down_proj.weight
    weight.data = weight.data.half().float()


def a_padded_token_is_seen(model, inputs):
    place = inputs["attention_mask"][1].eq(0).nonzero().flatten()
    inputs["attention_mask"][1, place[-1 if place[0] == 0 else 0]] = 1


def a_real_token_is_hidden(model, inputs):
    inputs["attention_mask"][0, 11] = 0


def rotary_frequencies_in_bfloat16(model, inputs):
    replace(model, "inv_freq", lambda frequencies: frequencies.bfloat16().float())


def rotary_base(model, inputs):
    replace(model, "inv_freq", lambda frequencies: frequencies ** (1 + 1e-4))


def positions_of_the_last_tokens(model, inputs):
    inputs["position_ids"][:, -2:] += 1


def learned_positions(model, inputs):
    replace(model, "offset", lambda offset: offset + 1)


def sliding_window(model, inputs):
    model.config.sliding_window += 1
    replace(model, "sliding_window", lambda window: window + 1)


def distance_of_the_bias(model, inputs):
    for bias in each(model, "bucket"):
        bias.bucket = lambda distance, bucket=bias.bucket: bucket(distance - 1)


def bias_in_bfloat16(model, inputs):
    for bias in each(model, "bucket"):
        bias.embedding.weight.data = bias.embedding.weight.data.bfloat16().float()


def tanh_in_the_gelu(model, inputs):
    replace(model, "act_fn", lambda gelu: nn.GELU(approximate="tanh"))


def no_tanh_in_the_gelu(model, inputs):
    replace(model, "act_fn", lambda gelu: nn.GELU())


def a_token_of_the_other_segment(model, inputs):
    inputs["token_type_ids"][0, 3] ^= 1


def a_bias_left_out(model, inputs):
    each(model, "q_proj")[-1].q_proj.bias.data[0] = 0


def embedding_scale_in_bfloat16(model, inputs):
    replace(model, "embed_scale", lambda scale: torch.tensor(scale).bfloat16().item())


EVERYWHERE = (
    attention_scale,
    epsilon_of_the_norms,
    a_matrix_in_float16,
    a_padded_token_is_seen,
    a_real_token_is_hidden,
)
ROTARY = (rotary_frequencies_in_bfloat16, rotary_base, positions_of_the_last_tokens)
OWN = {
    "qwen3": ROTARY,
    "mistral": (*ROTARY, sliding_window),
    "bert": (learned_positions, tanh_in_the_gelu, a_token_of_the_other_segment, a_bias_left_out),
    "gpt2": (learned_positions, no_tanh_in_the_gelu, a_bias_left_out),
    "t5": (distance_of_the_bias, bias_in_bfloat16),
    "bart": (learned_positions, tanh_in_the_gelu, a_bias_left_out, embedding_scale_in_bfloat16),
}


# The norms of these read states of variance 1 and more, of which an epsilon is a share of a few 1e-6.
TOO_SMALL = {("t5", epsilon_of_the_norms), ("bart", epsilon_of_the_norms)}


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_passes(family, compared):
    ours, expected, exact = compared[family]
    assert expected.std() > 1
    found = logits(ours, given(family))
    assert_close(found, expected)
    assert_as_exact(found, expected, exact)


@pytest.mark.parametrize(
    ("family", "fault"),
    [(family, fault) for family in FAMILIES for fault in (*EVERYWHERE, *OWN[family])],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_does_not_pass(family, fault, compared):
    """Not at twice the bound either: what one processor sees, the next one must see too."""
    ours, expected, exact = compared[family]
    ours, inputs = copy.deepcopy(ours), given(family)
    fault(ours, inputs)
    found = logits(ours, inputs, given(family)["attention_mask"])
    share = largest(found - expected) / (1e-5 * largest(expected))
    print(f"{share:.1f} times the bound, {largest(found - exact) / largest(expected - exact):.0f} times the rounding")
    with pytest.raises(AssertionError, match="from the exact result"):
        assert_as_exact(found, expected, exact)
    if (family, fault) not in TOO_SMALL:
        with pytest.raises(AssertionError, match="not close"):
            assert_close(found, expected, 2e-5)


def test_a_zero_is_held_to_the_values_beside_it():
    expected = torch.tensor([0.0, 0.1, -40.0])
    assert_close(expected + 3.9e-4, expected)
    for place in range(3):
        with pytest.raises(AssertionError, match="not close"):
            assert_close(expected + 4.1e-4 * torch.eye(3)[place], expected)
    assert_close({"loss": [1e-9, 2.0]}, {"loss": [1e-9 * (1 + 1e-6), 2.0]})
    with pytest.raises(AssertionError, match="loss 0 Scalars are not close"):
        assert_close({"loss": [1e-9, 2.0]}, {"loss": [1.1e-9, 2.0]})
    margins.clear()  # near on purpose


@pytest.mark.parametrize(
    "found",
    [
        torch.tensor([1.0, torch.nan]),
        torch.tensor([1.0, torch.inf]),
        torch.tensor([1.0]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([1, 2]),
        torch.tensor([True, True]),
    ],
)
def test_what_is_no_number_of_the_right_kind_does_not_pass(found):
    expected = torch.tensor([1.0, 2.0])
    for pair_of in ((found, expected), (expected, found)):
        with pytest.raises(AssertionError):
            assert_close(*pair_of)
    with pytest.raises(AssertionError):
        assert_close([expected], [expected, expected])
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([10**6]), torch.tensor([10**6 + 1]))
    with pytest.raises(AssertionError):
        assert_close({"a": expected}, {"a": expected, "b": expected})


def test_a_gradient_that_vanishes_is_held_to_the_largest_of_all():
    expected = {"weight": torch.tensor([2.0, -1.0]), "bias": torch.tensor([1e-9, 0.0])}
    assert_gradients_close({**expected, "bias": torch.tensor([-1e-9, 1.9e-6])}, expected)
    with pytest.raises(AssertionError, match="bias"):
        assert_gradients_close({**expected, "bias": torch.tensor([0.0, 2.1e-6])}, expected)
    margins.clear()  # near on purpose
