"""OpenAI's Privacy Filter: a decoder that looks both ways and names the kind of each token."""

import pytest
import torch
import transformers
from pairs import assert_close

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.families.registry import FAMILIES

from .oracles import edit_config, randomize_biases_and_norms
from .outputs import assert_same_outputs
from .rows import Row, assert_there_and_back, family_of

SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
ROW = Row("openai_privacy_filter")


def filter_model(kind="ForTokenClassification", **settings):
    """A small official model with random weights, biases and sinks."""
    family_of(ROW)
    torch.manual_seed(0)
    config = transformers.OpenAIPrivacyFilterConfig(**{**SIZES, **settings})
    model = getattr(transformers, f"OpenAIPrivacyFilter{kind}")(config).eval()
    randomize_biases_and_norms(model, spread=0.2)
    return model


def padded(length=20):
    """Two rows, the second padded on the left."""
    ids = torch.randint(5, 131, (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("kind", "settings", "shards"),
    [
        ("ForTokenClassification", {}, False),
        ("ForTokenClassification", {"num_labels": 5, "attention_bias": False, "swiglu_limit": 2.0}, True),
        ("Model", {"sliding_window": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, False),
    ],
)
def test_there_and_back_with_the_same_numbers(tmp_path, kind, settings, shards):
    theirs = filter_model(kind, **settings)
    assert_there_and_back(tmp_path, ROW._replace(shards=shards), theirs)
    ours = blockformer.from_official(tmp_path / "src")
    assert type(ours).__name__ == f"BlockformerDecoder{kind}"
    assert ours.config.id2label == theirs.config.id2label
    assert_same_outputs(ours, theirs, padded(), spread=0.3)
    given = padded()
    given["input_ids"][0, 12] += 1
    with torch.no_grad():  # it looks both ways
        assert not torch.equal(ours(**given)[0][0, 10], ours(**padded())[0][0, 10])


def test_labels_and_their_loss(tmp_path):
    theirs = filter_model()
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    labels = torch.randint(0, 33, (2, 20), generator=torch.Generator().manual_seed(4))
    labels[1, :7] = -100
    assert_close(ours(**padded(), labels=labels).loss, theirs(**padded(), labels=labels).loss)


def test_what_it_cannot_be_is_refused(tmp_path):
    filter_model().save_pretrained(tmp_path / "src")
    edit_config(tmp_path / "src", swiglu_alpha=1.5)
    with pytest.raises(ConversionError, match=r"swiglu_alpha is '1\.5'"):
        convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ours = blockformer.BlockformerDecoderConfig(architectures=["BlockformerDecoderModel"], bidirectional=False)
    assert any(
        line.startswith("bidirectional must be True") for line in FAMILIES["openai_privacy_filter"].differences(ours)
    )
