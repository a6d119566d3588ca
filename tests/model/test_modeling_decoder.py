"""Models and heads: parity with transformers, causality, what capture gives, save and load."""

import pytest
import torch
from pairs import FAMILIES, assert_close, left_padded, model, official_copy, official_name, pair, token_ids
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

import blockformer
from blockformer import (
    BlockformerDecoderForCausalLM,
    BlockformerDecoderForQuestionAnswering,
    BlockformerDecoderForSequenceClassification,
    BlockformerDecoderForTokenClassification,
    BlockformerDecoderModel,
)

pytestmark = pytest.mark.portable


@pytest.mark.versions
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_loss_are_those_of_transformers(family, tied):
    ours, theirs = pair(family, tie_word_embeddings=tied)
    ids = token_ids(3, 40)
    labels = ids.clone()
    labels[0, :10] = -100
    mine, official = ours(ids, labels=labels), theirs(ids, labels=labels)
    assert_close(mine.logits, official.logits)
    assert_close(mine.loss, official.loss)


@pytest.mark.versions
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_gives_the_logits_of_transformers_and_of_single_runs(family):
    """transformers is told the positions that `generate()` tells it; ours counts them by itself."""
    ours, theirs = pair(family)
    ids, mask = left_padded(4, 30)
    logits, positions = ours(ids, attention_mask=mask).logits, (mask.cumsum(-1) - 1).clamp(min=0)
    real = mask.bool()
    assert_close(logits[real], theirs(ids, attention_mask=mask, position_ids=positions).logits[real])
    for row in range(4):
        assert_close(logits[row : row + 1, real[row]], ours(ids[row : row + 1, real[row]]).logits)


@pytest.mark.parametrize("biases", ["attention_bias", "mlp_bias"])
def test_llama_biases(biases):
    names = ["attention_bias", "attention_output_bias"] if biases == "attention_bias" else [biases]
    ours = model("llama", **dict.fromkeys(names, True))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    ids = token_ids(2, 20)
    assert_close(ours(ids).logits, official_copy("llama", ours)(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_save_and_load_keep_every_bit_and_the_dtype(dtype, tmp_path):
    ours = model("qwen3", tie_word_embeddings=True).to(dtype)
    ours.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == dtype
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.lm_head.weight is again.model.embed_tokens.weight


@torch.no_grad()
def test_bfloat16_loses_no_more_than_it_does_in_transformers():
    """On random weights rounding alone moves some tokens: both lose the same few of a hundred."""
    ours, theirs = pair("qwen3", initializer_range=0.2)
    ids = token_ids(16, 64)
    exact = ours(ids).logits.argmax(-1)
    kept = [(one.to(torch.bfloat16)(ids).logits.argmax(-1) == exact).float().mean() for one in (ours, theirs)]
    assert kept[0] > kept[1] - 0.01
    assert kept[0] > 0.95


@pytest.mark.parametrize(
    ("auto_class", "ours"),
    [
        (AutoModel, BlockformerDecoderModel),
        (AutoModelForCausalLM, BlockformerDecoderForCausalLM),
        (AutoModelForPreTraining, BlockformerDecoderForCausalLM),
        (AutoModelForSequenceClassification, BlockformerDecoderForSequenceClassification),
        (AutoModelForTokenClassification, BlockformerDecoderForTokenClassification),
        (AutoModelForQuestionAnswering, BlockformerDecoderForQuestionAnswering),
    ],
)
def test_auto_classes(auto_class, ours, tmp_path):
    config = blockformer.preset("qwen3", vocab_size=50, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    assert type(auto_class.from_config(config)) is ours
    ours(config).save_pretrained(tmp_path)
    assert type(auto_class.from_pretrained(tmp_path)) is ours


def with_head(ours_class, theirs_class, prefix="model", **settings):
    ours = model("qwen3", cls=ours_class, **settings)
    theirs = official_copy("qwen3", model("qwen3"), cls=None)
    config = theirs.config
    config.num_labels = ours.config.num_labels
    theirs = theirs_class(config).eval()
    weights = {
        official_name(name).replace("model.", f"{prefix}.", 1): tensor for name, tensor in ours.state_dict().items()
    }
    theirs.load_state_dict(weights)
    return ours, theirs


@pytest.mark.parametrize("padding", ["left", "right"])
def test_sequence_classification(padding):
    ours, theirs = with_head(BlockformerDecoderForSequenceClassification, Qwen3ForSequenceClassification, num_labels=3)
    ids, mask = left_padded(4, 12)
    if padding == "right":
        ids, mask = ids.flip(-1), mask.flip(-1)
    labels = torch.tensor([0, 2, 1, 1])
    mine, official = ours(ids, mask, labels=labels), theirs(ids, mask, labels=labels)
    assert_close(mine.logits, official.logits)
    assert_close(mine.loss, official.loss)
    assert_close(ours(ids, labels=labels).logits, theirs(ids, labels=labels).logits)


def test_sequence_classification_needs_to_know_where_rows_end():
    ours = model("qwen3", cls=BlockformerDecoderForSequenceClassification, pad_token_id=None)
    with pytest.raises(ValueError, match="pass attention_mask or set pad_token_id"):
        ours(token_ids(2, 5))
    assert ours(token_ids(1, 5)).logits.shape == (1, 2)


def test_sequence_regression_and_several_labels():
    ids = token_ids(3, 6)
    ours, theirs = with_head(BlockformerDecoderForSequenceClassification, Qwen3ForSequenceClassification, num_labels=1)
    scores = torch.randn(3)
    assert_close(ours(ids, labels=scores).loss, theirs(ids, labels=scores).loss)
    ours, theirs = with_head(BlockformerDecoderForSequenceClassification, Qwen3ForSequenceClassification, num_labels=4)
    several = torch.randint(0, 2, (3, 4)).float()
    assert_close(ours(ids, labels=several).loss, theirs(ids, labels=several).loss)
    with pytest.raises(ValueError, match=r"pass labels of \[3, 4\], or one int64 class a row, not \[3\]\."):
        ours(ids, labels=scores)


def test_token_classification():
    ours, theirs = with_head(BlockformerDecoderForTokenClassification, Qwen3ForTokenClassification, num_labels=5)
    ids, labels = token_ids(2, 9), torch.randint(0, 5, (2, 9))
    labels[1, 4:] = -100
    assert_close(ours(ids, labels=labels).logits, theirs(ids, labels=labels).logits)
    assert_close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss)


def test_question_answering():
    ours, theirs = with_head(BlockformerDecoderForQuestionAnswering, Qwen3ForQuestionAnswering, prefix="transformer")
    ids = token_ids(3, 9)
    spans = {"start_positions": torch.tensor([1, 4, 99]), "end_positions": torch.tensor([3, 4, 99])}
    mine, official = ours(ids, **spans), theirs(ids, **spans)
    assert_close(mine.start_logits, official.start_logits)
    assert_close(mine.end_logits, official.end_logits)
    assert_close(mine.loss, official.loss)


def test_return_dict_false_gives_a_tuple():
    ours = model("qwen3")
    outputs = ours(token_ids(1, 4), return_dict=False)
    assert isinstance(outputs, tuple)
    assert outputs[0].shape == (1, 4, ours.config.vocab_size)


def test_logits_to_keep():
    ours, ids = model("qwen3"), token_ids(2, 9)
    whole = ours(ids).logits
    assert_close(ours(ids, logits_to_keep=1).logits, whole[:, -1:])
    assert_close(ours(ids, logits_to_keep=torch.tensor([0, 5])).logits, whole[:, [0, 5]])


def test_parallel_plans_name_modules_that_exist():
    ours = model("qwen3")
    names = {name for name, _ in ours.model.named_modules()}
    for pattern in ours.config.base_model_tp_plan:
        assert pattern.replace("*", "0") in names
    for name in ours.config.base_model_pp_plan:
        assert name in names


class _BatchedProducts(TorchDispatchMode):
    """Notes how many numbers each factor of a batched product has."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bmm.default:
            self.sizes += [each.numel() for each in args]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_the_last_logits_of_a_frozen_model_are_no_batched_product():
    """For one, PyTorch copies the weight in bfloat16."""
    ours = model("qwen3").requires_grad_(False)
    with _BatchedProducts() as products:
        ours(token_ids(1, 5), logits_to_keep=1)
    assert ours.lm_head.weight.numel() not in products.sizes
