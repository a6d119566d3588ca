"""The decoders after Llama with every head, both ways, and the ways in which their checkpoints are written."""

import pytest
import torch
import transformers

import blockformer
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.families.registry import FAMILIES

from .oracles import (
    SIZES,
    SPECIAL,
    assert_loads_as,
    assert_verified,
    edit_config,
    edit_tensors,
    name_of,
    official_folder,
    stored,
    there_and_back,
    under_another_head,
)
from .outputs import assert_same_outputs, padded

HEADS = [(family, head) for family in SPECIAL for head in FAMILIES[family].heads]
QWEN3 = [head for family, head in HEADS if family == "qwen3"]
VOCAB = SIZES["vocab_size"]


def padded_folder(folder, family, name, **settings):
    """A small official model that knows its padding, which a head of rows needs."""
    return official_folder(folder, family, name, pad_token_id=0, **settings)


@pytest.mark.versions
@pytest.mark.parametrize(("family", "head"), HEADS, ids=name_of)
def test_every_head_there_and_back(tmp_path, family, head):
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    model = padded_folder(src, family, head.official)
    there_and_back(tmp_path, verify_back="quick" if family == "qwen3" else False)
    ours = getattr(blockformer, head.ours).from_pretrained(dst)
    for side in ("left", "right"):
        assert_same_outputs(ours, model, padded(2, side, VOCAB), spread=0.3)
    assert_loads_as(back, model)

    (dst / "conversion.json").unlink()
    convert(dst, tmp_path / "fresh", to_official=True, family=family, verify=False)
    assert stored(tmp_path / "fresh") == stored(src)
    config_class = FAMILIES[family].settings.official_class
    before, after = (config_class.from_pretrained(tmp_path / name).to_dict() for name in ("src", "fresh"))
    before.pop("max_window_layers", None), after.pop("max_window_layers", None)
    assert after == before


@pytest.mark.parametrize("labels", [1, 2])
def test_a_reward_model_in_memory(tmp_path, labels):
    model = padded_folder(tmp_path, "qwen3", "Qwen3ForSequenceClassification", num_labels=labels)
    ours = from_official(tmp_path)
    assert type(ours) is blockformer.BlockformerDecoderForSequenceClassification
    assert ours.config.num_labels == labels
    assert ours.score.bias is None
    assert_same_outputs(ours, model, padded(2, "left", VOCAB), spread=0.3)


@pytest.mark.parametrize("head", QWEN3, ids=name_of)
def test_the_other_spelling_of_every_head(tmp_path, head):
    """As `Qwen3-Embedding`: a head whose stack has no prefix; and the stack alone with one."""
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    model = padded_folder(src, "qwen3", head.official, tie_word_embeddings=True)
    inner = FAMILIES["qwen3"].names.inner

    def change(tensors):
        if head.bare:
            return {f"model.{name}": tensor for name, tensor in tensors.items()}
        return {name.removeprefix(head.root): tensor for name, tensor in tensors.items()}

    edit_tensors(src, change)
    assert any(name.startswith(inner) for name in stored(src)) != head.bare
    assert_verified(convert(src, dst))
    convert(dst, back, to_official=True, verify=False)
    assert stored(back) == stored(src)
    assert_same_outputs(from_official(src), model, padded(2, "right", VOCAB), spread=0.3)


@pytest.mark.parametrize("head", QWEN3, ids=name_of)
def test_without_architectures_the_tensors_tell(tmp_path, head):
    padded_folder(tmp_path, "qwen3", head.official)
    edit_config(tmp_path, architectures=...)
    assert type(from_official(tmp_path)).__name__ == head.ours


def test_a_checkpoint_of_ours_with_another_head_goes_out_under_that_head(tmp_path):
    padded_folder(tmp_path / "src", "qwen3", "Qwen3ForCausalLM")
    ours, theirs = blockformer.BlockformerDecoderForSequenceClassification, transformers.Qwen3ForSequenceClassification
    tuned, official = under_another_head(tmp_path, ours, theirs)
    assert torch.equal(official.score.weight, tuned.score.weight)


def test_a_head_of_tokens_without_a_bias_is_refused(tmp_path):
    padded_folder(tmp_path, "llama", "LlamaForTokenClassification")
    edit_config(tmp_path, token_classification_bias=False)
    with pytest.raises(ConversionError, match="token_classification_bias is 'False'"):
        from_official(tmp_path)
