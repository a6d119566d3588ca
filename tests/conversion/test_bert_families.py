"""The families after BERT: every head, both ways, and every way in which their checkpoints have been written."""

import json

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.families.registry import FAMILIES, family_for
from blockformer.conversion.storage.unused_tensors import UNUSED_FILE
from blockformer.summary import summarize

from .oracles import (
    BERT_SIZES,
    SMALL,
    assert_loads_as,
    assert_verified,
    edit_config,
    edit_tensors,
    entries_of,
    official_folder,
    stored,
    there_and_back,
    under_another_head,
)
from .outputs import assert_same_outputs

LENGTH = 20
BERTS = ("bert", "roberta", "xlm-roberta", "distilbert")
FIRST = FAMILIES["xlm-roberta"].heads[0]
HEADS = [(family, head) for family in BERTS for head in FAMILIES[family].heads if not head.is_decoder]
# The classes of XLM-RoBERTa are those of RoBERTa; its first head is asked for its names alone.
USUALLY = [
    pytest.param(*each, marks=[pytest.mark.exhaustive] if each[0] == "xlm-roberta" and each[1] is not FIRST else [])
    for each in HEADS
]
DECODERS = [
    (family, head, cross)
    for family in BERTS
    for head in FAMILIES[family].heads
    if head.is_decoder
    for cross in (False, True)
]


def name_of(value):
    return getattr(value, "ours", str(value)) if not isinstance(value, bool) else "cross" if value else "alone"


def renamed(*pairs):
    def change(tensors):
        for old, new in pairs:
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        return tensors

    return change


def inputs(model, side):
    """Two rows, one of them padded on a side; positions counted from 0 at the first real token."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 97, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    gap = slice(0, 7) if side == "left" else slice(LENGTH - 7, LENGTH)
    mask[1, gap] = 0
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    if getattr(model.config, "type_vocab_size", 0):
        tensors["token_type_ids"] = torch.randint(model.config.type_vocab_size, ids.shape, generator=generator)
    return tensors


def assert_same_padded(ours, theirs, side, shift=0):
    """The same outputs with padding on a side, where the official positions begin at `shift`."""
    given = inputs(theirs, side)
    if "MultipleChoice" in type(ours).__name__:
        given = {name: tensor[None] for name, tensor in given.items()}
    official = {**given, "position_ids": given["position_ids"] + shift}
    if "DistilBertForMultipleChoice" in type(theirs).__name__:  # it takes none in this shape
        del official["position_ids"]
    # Of a choice there is one number only, a sum of terms of about 1.
    assert_same_outputs(ours, theirs, given, official, spread=0.3, row_terms=1.0)


@pytest.mark.portable
@pytest.mark.versions
@pytest.mark.parametrize(("family", "head"), USUALLY, ids=name_of)
def test_every_head_there_and_back(tmp_path, family, head):
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    model = official_folder(src, family, head.official)
    if head.pooler == "needed" and not any("pooler" in name for name in model.state_dict()):
        pytest.skip("this release's class reads a pooler that it does not make")
    report = there_and_back(tmp_path, verify_back="quick" if family == "bert" else False)
    assert report.parity.measured[0].same_text is None
    assert not (dst / UNUSED_FILE).exists()

    ours = getattr(blockformer, head.ours).from_pretrained(dst)
    shift = ours.config.position_offset
    assert shift == (2 if "roberta" in family else 0)
    for side in ("left", "right"):
        assert_same_padded(ours, model, side, shift)
    assert_loads_as(back, model)

    (dst / "conversion.json").unlink()
    convert(dst, tmp_path / "fresh", to_official=True, family=family, verify=False)
    assert stored(tmp_path / "fresh") == stored(src)
    config_class = FAMILIES[family].settings.official_class
    configs = [config_class.from_pretrained(folder).to_dict() for folder in (tmp_path / "fresh", src)]
    assert configs[0] == configs[1]


@pytest.mark.portable
@pytest.mark.versions
@pytest.mark.parametrize(("family", "head", "cross"), DECODERS, ids=name_of)
def test_as_a_decoder(tmp_path, family, head, cross):
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    arguments = {"is_decoder": True, "add_cross_attention": cross}
    model = official_folder(src, family, head.official, **arguments)
    report = convert(src, dst)
    assert_verified(report)
    writes_text = head.ours.endswith("CausalLM") and not cross and family == "bert"
    assert report.parity.measured[0].same_text is (True if writes_text else None)
    convert(dst, back, to_official=True, verify=family != "xlm-roberta")
    assert stored(back) == stored(src)
    assert (dst / UNUSED_FILE).exists() == head.bare  # its official class has a pooler, which says nothing in a decoder
    ours = getattr(blockformer, head.ours).from_pretrained(dst)
    assert ours.config.add_cross_attention == cross
    ids, states = torch.arange(20).view(2, 10) + 5, torch.randn(2, 6, 48)
    positions = torch.arange(10)[None].expand(2, 10)
    more = {"encoder_hidden_states": states} if cross else {}
    with torch.no_grad():
        found = ours(ids, position_ids=positions, **more)[0]
        expected = model(ids, position_ids=positions + ours.config.position_offset, **more)[0]
    assert_close(found, expected)
    (dst / "conversion.json").unlink()
    convert(dst, tmp_path / "fresh", to_official=True, family=family, verify=False)
    bare = {name: value for name, value in stored(src).items() if "pooler" not in name}
    assert stored(tmp_path / "fresh") == (bare if head.bare else stored(src))


def test_a_language_model_that_reads_both_ways_is_refused(tmp_path):
    official_folder(tmp_path / "src", "bert", "BertLMHeadModel", is_decoder=True)
    edit_config(tmp_path / "src", is_decoder=False)
    with pytest.raises(ConversionError, match=r"BertLMHeadModel.*with is_decoder false there are BertModel"):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_config(tmp_path / "src", architectures=["BertForMaskedLM"], add_cross_attention=True)
    with pytest.raises(ConversionError, match="add_cross_attention is true but is_decoder is not"):
        convert(tmp_path / "src", tmp_path / "dst")


# The ways in which checkpoints have been written.


OLD_NAMES = renamed(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))


@pytest.mark.parametrize(
    ("family", "root"), [("bert", "bert."), ("roberta", "roberta."), ("distilbert", "distilbert.")]
)
@pytest.mark.parametrize("old", [False, True], ids=["weight", "gamma"])
def test_names_with_a_prefix_where_the_class_has_none(tmp_path, family, root, old):
    name = FAMILIES[family].heads[0].official
    model = official_folder(tmp_path / "src", family, name)
    edit_tensors(tmp_path / "src", lambda tensors: {root + name: tensor for name, tensor in tensors.items()})
    if old:
        edit_tensors(tmp_path / "src", OLD_NAMES)
    assert_verified(convert(tmp_path / "src", tmp_path / "dst"))
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert_same_padded(from_official(tmp_path / "src"), model, "right", 2 if family == "roberta" else 0)
    (tmp_path / "dst/conversion.json").unlink()
    convert(tmp_path / "dst", tmp_path / "modern", to_official=True, family=family)
    assert set(stored(tmp_path / "modern")) == set(model.state_dict())


def test_names_without_the_prefix_that_the_class_has(tmp_path):
    official_folder(tmp_path / "src", "bert", "BertForTokenClassification")
    edit_tensors(tmp_path / "src", renamed(("bert.", "")))
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")


@pytest.mark.parametrize("name", ["embeddings.position_ids", "pooler.dense.weight"])
def test_one_tensor_without_a_prefix_is_named_and_not_all_others(tmp_path, name):
    official_folder(tmp_path / "src", "bert", "BertForMaskedLM")
    edit_tensors(tmp_path / "src", **{name: torch.zeros(1, 8)})
    with pytest.raises(ConversionError, match=rf"no rule takes \(1\):\n  '{name}'\n"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_old_names_of_norms(tmp_path):
    model = official_folder(tmp_path / "src", "bert", "BertForPreTraining")
    edit_tensors(tmp_path / "src", OLD_NAMES)
    convert(tmp_path / "src", tmp_path / "dst")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert "cls.predictions.transform.LayerNorm.gamma" in stored(tmp_path / "back")
    assert_same_padded(from_official(tmp_path / "src"), model, "right")
    edit_tensors(tmp_path / "src", renamed(("embeddings.LayerNorm.gamma", "embeddings.LayerNorm.weight")))
    with pytest.raises(ConversionError, match=r"two ways to name[\s\S]*bert\.embeddings\.LayerNorm\.weight"):
        convert(tmp_path / "src", tmp_path / "dst2")


def test_what_a_checkpoint_holds_beyond_its_class_is_taken_too(tmp_path):
    """As `bert-base-uncased`: it says BertForMaskedLM and holds the pooler and the next-sentence head."""
    model = official_folder(tmp_path / "src", "bert", "BertForPreTraining")
    edit_config(tmp_path / "src", architectures=["BertForMaskedLM"])
    convert(tmp_path / "src", tmp_path / "dst")
    ours = blockformer.BlockformerEncoderForPreTraining.from_pretrained(tmp_path / "dst")
    assert_same_padded(ours, model, "right")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert entries_of(tmp_path / "back")["architectures"] == ["BertForMaskedLM"]


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM", "BertForTokenClassification"])
def test_a_pooler_that_the_class_does_not_use_is_kept(tmp_path, name):
    family, root = ("bert", "bert.") if name.startswith("Bert") else ("roberta", "roberta.")
    model = official_folder(tmp_path / "src", family, name)
    pooler = {f"{root}pooler.dense.weight": torch.randn(48, 48), f"{root}pooler.dense.bias": torch.randn(48)}
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, **pooler})
    assert_verified(convert(tmp_path / "src", tmp_path / "dst"))
    in_memory = from_official(tmp_path / "src")
    loaded, info = type(in_memory).from_pretrained(tmp_path / "dst", output_loading_info=True)
    assert not any(info.values())
    for ours in (in_memory, loaded):
        assert ours.model.pooler is None
        assert_same_padded(ours, model, "left", 2 if family == "roberta" else 0)
    body = blockformer.BlockformerEncoderModel.from_pretrained(tmp_path / "dst")
    assert torch.equal(body.pooler.dense.bias, pooler[f"{root}pooler.dense.bias"])
    export_folder(tmp_path / "dst", tmp_path / "copy")
    for repo in ("dst", "copy"):
        convert(tmp_path / repo, tmp_path / f"{repo}-back", to_official=True, verify=False)
        assert stored(tmp_path / f"{repo}-back") == stored(tmp_path / "src")
    loaded.save_pretrained(tmp_path / "dst")  # as training does: the pooler is gone
    assert_verified(convert(tmp_path / "dst", tmp_path / "trained", to_official=True))
    left = {name: tensor for name, tensor in stored(tmp_path / "src").items() if name not in pooler}
    assert stored(tmp_path / "trained") == left


def test_a_model_without_a_pooler(tmp_path):
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**BERT_SIZES), add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    ours = from_official(tmp_path / "src")
    assert ours.pooler is None
    assert_same_padded(ours, model, "left")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")


def test_tensors_that_nothing_uses_come_back_exactly(tmp_path):
    """As `roberta-large-mnli`: position ids, and a pooler beside the head's own dense layer."""
    model = official_folder(tmp_path / "src", "roberta", "RobertaForSequenceClassification")
    unused = {
        "roberta.embeddings.position_ids": torch.arange(66)[None],
        "roberta.pooler.dense.weight": torch.randn(48, 48),
        "roberta.pooler.dense.bias": torch.randn(48),
    }
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, **unused})
    assert_verified(convert(tmp_path / "src", tmp_path / "dst"))
    assert set(load_file(tmp_path / "dst" / UNUSED_FILE)) == set(unused)
    assert_same_padded(from_official(tmp_path / "src"), model, "right", 2)
    export_folder(tmp_path / "dst", tmp_path / "copy")
    convert(tmp_path / "copy", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    again = transformers.RobertaForSequenceClassification.from_pretrained(tmp_path / "back")
    assert torch.equal(again.classifier.dense.weight, model.classifier.dense.weight)
    (tmp_path / "copy" / UNUSED_FILE).unlink()
    with pytest.raises(ConversionError, match=r"unused\.safetensors: 'roberta\.embeddings\.position_ids' is missing"):
        convert(tmp_path / "copy", tmp_path / "back2", to_official=True)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("embeddings.position_ids", torch.arange(64).flip(0)[None]),
        ("embeddings.position_ids", torch.zeros(1, 64, dtype=torch.long)),
        ("embeddings.token_type_ids", torch.ones(1, 64, dtype=torch.long)),
    ],
)
def test_stored_buffers_must_be_what_the_class_computes(tmp_path, name, tensor):
    official_folder(tmp_path / "src", "bert", "BertModel")
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, name: tensor})
    with pytest.raises(ConversionError, match=rf"cannot be left out[\s\S]*{name}"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    with pytest.raises(ConversionError, match=name):
        from_official(tmp_path / "src")


@pytest.mark.parametrize(("family", "name"), [("bert", "BertForMaskedLM"), ("roberta", "RobertaForMaskedLM")])
@pytest.mark.parametrize("both", [False, True], ids=["second", "both"])
def test_copies_of_the_head_s_bias_and_weight(tmp_path, family, name, both):
    names = FAMILIES[family].names.language_model
    model = official_folder(tmp_path / "src", family, name)
    state = model.state_dict()

    def change(tensors):
        tensors |= {extra: state[extra].clone() for extra in (names.copy, names.weight)}
        return tensors if both else {name: tensor for name, tensor in tensors.items() if name != names.bias}

    edit_tensors(tmp_path / "src", change)
    convert(tmp_path / "src", tmp_path / "dst")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert_same_padded(from_official(tmp_path / "src"), model, "right", 2 if family == "roberta" else 0)
    if both:
        edit_tensors(tmp_path / "src", lambda tensors: {**tensors, names.copy: tensors[names.copy] + 1})
        with pytest.raises(ConversionError, match="must be copies of each other differ"):
            convert(tmp_path / "src", tmp_path / "dst2")
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, names.weight: tensors[names.weight] + 1})
    with pytest.raises(ConversionError, match=r"ties these tensors|must be copies"):
        convert(tmp_path / "src", tmp_path / "dst2")


@pytest.mark.parametrize(("family", "name"), [("bert", "BertForMaskedLM"), ("distilbert", "DistilBertForMaskedLM")])
def test_an_untied_head(tmp_path, family, name):
    model = official_folder(tmp_path / "src", family, name, tie_word_embeddings=False)
    convert(tmp_path / "src", tmp_path / "dst")
    assert_same_padded(from_official(tmp_path / "src"), model, "right")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    (tmp_path / "dst/conversion.json").unlink()
    convert(tmp_path / "dst", tmp_path / "fresh", to_official=True)
    assert stored(tmp_path / "fresh").keys() == stored(tmp_path / "src").keys()


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
@pytest.mark.parametrize(("family", "name"), [("bert", "BertForMaskedLM"), ("roberta", "RobertaModel")])
def test_relative_keys_which_transformers_has_dropped(tmp_path, family, name, kind):
    official_folder(tmp_path / "src", family, name)
    root = "" if name.endswith("Model") else f"{family}."
    rows = 2 * SMALL[family].settings["max_position_embeddings"] - 1
    tables = {
        f"{root}encoder.layer.{layer}.attention.self.distance_embedding.weight": torch.randn(rows, 12)
        for layer in range(2)
    }
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, **tables})
    edit_config(tmp_path / "src", position_embedding_type=kind)
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.notes[-1] == (
        f"not verified: not compared with the official model: transformers has dropped position_embedding_type '{kind}'"
    )
    assert "**Not verified:** not compared with the official model" in (tmp_path / "dst/README.md").read_text()
    ours = from_official(tmp_path / "src")
    assert ours.config.position_type == kind
    layers = getattr(ours, "model", ours).layers
    assert torch.equal(layers[1].self_attn.relative_keys.embedding.weight, list(tables.values())[1])
    assert torch.isfinite(ours(torch.arange(10)[None])[0]).all()
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert entries_of(tmp_path / "back")["position_embedding_type"] == kind
    (tmp_path / "dst/conversion.json").unlink()
    convert(tmp_path / "dst", tmp_path / "fresh", to_official=True, family=family)
    without = {name: value for name, value in stored(tmp_path / "src").items() if "position_embeddings" not in name}
    assert stored(tmp_path / "fresh") == without


def test_a_pickled_checkpoint(tmp_path):
    model = official_folder(tmp_path / "src", "bert", "BertForQuestionAnswering")
    torch.save(load_file(tmp_path / "src/model.safetensors"), tmp_path / "src/pytorch_model.bin")
    want = stored(tmp_path / "src")
    (tmp_path / "src/model.safetensors").unlink()
    convert(tmp_path / "src", tmp_path / "dst")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == want
    assert_same_padded(from_official(tmp_path / "src"), model, "left")


# Settings.


@pytest.mark.parametrize("family", BERTS)
def test_settings_there_and_back(family):
    chosen = FAMILIES[family]
    distil = family == "distilbert"
    changes = {
        ("dropout" if distil else "hidden_dropout_prob"): 0.2,
        ("attention_dropout" if distil else "attention_probs_dropout_prob"): 0.3,
        ("seq_classif_dropout" if distil else "classifier_dropout"): 0.4,
        ("activation" if distil else "hidden_act"): "relu",
        "id2label": {0: "no", 1: "yes"},
        "label2id": {"no": 0, "yes": 1},
        "problem_type": "single_label_classification",
        "dtype": "bfloat16",
        "pad_token_id": 3,
    }
    name = next(head.official for head in chosen.heads if head.official.endswith("ForSequenceClassification"))
    entries = {"model_type": family, "architectures": [name], **SMALL[family].settings, **changes}
    config = chosen.settings.our_config(chosen.config_from(entries))
    assert (config.hidden_dropout, config.attention_dropout, config.classifier_dropout) == (0.2, 0.3, 0.4)
    assert config.hidden_act == "relu"
    assert config.max_position_embeddings + config.position_offset == SMALL[family].settings["max_position_embeddings"]
    assert config.position_offset == (4 if "roberta" in family else 0)
    before, after = (chosen.settings.official_config(one).to_dict() for one in (entries, chosen.config_to(config)))
    assert after == before


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        (
            "bert",
            {"position_embedding_type": "mystery"},
            "position_embedding_type must be one of absolute, relative_key",
        ),
        ("distilbert", {"position_embedding_type": "relative_key"}, "position_embedding_type must be one of absolute"),
        ("roberta", {"pad_token_id": None}, "pad_token_id must be set"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("roberta", {"architectures": ["RobertaForMaskedLM"], "hidden_act": "relu"}, "hidden_act must be 'gelu'"),
        ("bert", {"architectures": ["BertForMystery"]}, "BertForMystery.*there are BertModel, BertForMaskedLM"),
        ("distilbert", {"is_decoder": True}, "is_decoder true there are none|is_decoder"),
        ("bert", {"hidden_act": "mystery"}, "hidden_act"),
        ("bert", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_settings_that_ours_cannot_express_are_named(family, changes, named):
    name = FAMILIES[family].heads[0].official
    with pytest.raises(ConversionError, match=named):
        FAMILIES[family].config_from(
            {"model_type": family, "architectures": [name], **SMALL[family].settings, **changes}
        )


@pytest.mark.parametrize(
    ("name", "architecture", "family"),
    [
        ("bert", "BlockformerEncoderForMaskedLM", "bert"),
        ("bert-decoder", "BlockformerDecoderForCausalLM", "bert"),
        ("roberta", "BlockformerEncoderForTokenClassification", "roberta"),
        ("distilbert", "BlockformerEncoderForSequenceClassification", "distilbert"),
    ],
)
def test_a_preset_of_ours_finds_its_family(name, architecture, family):
    config = blockformer.preset(name, architectures=[architecture])
    assert family_for(config) is FAMILIES[family]
    variant = FAMILIES[family].names.variant_for(config)
    # None means the dropout of everything else, which DistilBERT cannot say
    wanted = {**config.to_dict(), **({"classifier_dropout": 0.2} if family == "distilbert" else {})}
    official = FAMILIES[family].config_to(config)
    assert FAMILIES[family].settings.our_config(FAMILIES[family].config_from(official, variant)).to_dict() == wanted


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_placement": "output"}, "norm_placement must be 'post'"),
        ({"position_type": "sinusoidal"}, "position_type must be 'learned'"),
        ({"pooler_act": "silu"}, "pooler_act must be 'tanh'"),
        ({"pooler_act": None, "architectures": ["BlockformerEncoderForSequenceClassification"]}, "pooler_act must be"),
        ({"position_offset": 3}, "position_offset must be"),
        ({"lm_head_transform": False, "architectures": ["BlockformerEncoderForMaskedLM"]}, "lm_head_transform must be"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must be 12"),
    ],
)
def test_a_config_that_no_family_expresses_is_refused(changes, named):
    with pytest.raises(ConversionError, match=named):
        family_for(blockformer.preset("bert", **changes))


def test_a_checkpoint_of_ours_with_another_head_goes_out_under_that_head(tmp_path):
    official_folder(tmp_path / "src", "bert", "BertModel")
    ours, theirs = blockformer.BlockformerEncoderForSequenceClassification, transformers.BertForSequenceClassification
    tuned, official = under_another_head(tmp_path, ours, theirs)
    assert torch.equal(official.classifier.weight, tuned.score.weight)


@pytest.mark.parametrize(("family", "act"), [("bert", "tanh"), ("distilbert", "relu"), ("roberta", "tanh")])
def test_a_classifier_on_weights_without_a_pooler_needs_a_new_one_to_go_out(tmp_path, family, act):
    official_folder(tmp_path / "src", family, "ForMaskedLM")
    convert(tmp_path / "src", tmp_path / "repo", verify=False)
    ours = blockformer.BlockformerEncoderForSequenceClassification
    for settings, folder in (({}, "without"), ({"pooler_act": act}, "with")):
        tuned = ours.from_pretrained(tmp_path / "repo", num_labels=4, **settings)
        blockformer.export_model(tuned, tmp_path / folder)
    with pytest.raises(ConversionError, match=rf"pooler_act must be '{act}' \(.*load the repo with pooler_act='{act}'"):
        convert(tmp_path / "without", tmp_path / "out", to_official=True)
    assert_verified(convert(tmp_path / "with", tmp_path / "out", to_official=True))
    assert entries_of(tmp_path / "out")["architectures"][0].endswith("ForSequenceClassification")


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_a_head_for_answers_has_two_rows_whatever_labels_there_were(tmp_path, family):
    """Of a classifier with three labels, say, which the config still names."""
    official_folder(tmp_path / "src", family, "ForSequenceClassification")
    convert(tmp_path / "src", tmp_path / "repo", verify=False)
    tuned = blockformer.BlockformerEncoderForQuestionAnswering.from_pretrained(tmp_path / "repo")
    assert tuned.config.num_labels == 3
    blockformer.export_model(tuned, tmp_path / "tuned")
    assert_verified(convert(tmp_path / "tuned", tmp_path / "out", to_official=True))
    cls = getattr(transformers, entries_of(tmp_path / "out")["architectures"][0])
    official, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert official.config.num_labels == 2


# Strictness.


@pytest.mark.parametrize(("family", "head"), HEADS[:3] + HEADS[-3:], ids=name_of)
def test_missing_and_unexpected_tensors_are_listed(tmp_path, family, head):
    official_folder(tmp_path / "src", family, head.official)
    whole = load_file(tmp_path / "src/model.safetensors")
    lost = next(name for name in whole if name.endswith(("k_lin.weight", "key.weight")))
    edit_tensors(tmp_path / "src", lambda tensors: {name: t for name, t in tensors.items() if name != lost})
    with pytest.raises(ConversionError, match=r"nothing fills[\s\S]*self_attn\.k_proj\.weight"):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_tensors(tmp_path / "src", lambda _: {**whole, "mystery.weight": torch.zeros(2)})
    with pytest.raises(ConversionError, match=r"no rule takes[\s\S]*mystery\.weight"):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_tensors(tmp_path / "src", lambda _: {f"module.{name}": tensor for name, tensor in whole.items()})
    with pytest.raises(ConversionError, match=r"no tensor name matches[\s\S]*without the prefix 'module\.'"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"])
def test_a_head_that_is_promised_and_lost_is_not_there(tmp_path, name):
    model = official_folder(tmp_path / "src", "bert", name)
    edit_tensors(tmp_path / "src", lambda tensors: {n: t for n, t in tensors.items() if n.startswith("bert.")})
    report = there_and_back(tmp_path)
    assert any(f"'{name}', and the weights have no such head: converted as BertModel" in note for note in report.notes)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        ours = blockformer.BlockformerEncoderModel.from_pretrained(tmp_path / "dst")
        assert_close(ours(ids).last_hidden_state, model.base_model(ids).last_hidden_state)


def test_without_architectures_the_tensors_tell_where_they_can(tmp_path):
    official_folder(tmp_path / "lm", "bert", "BertForMaskedLM")
    edit_config(tmp_path / "lm", architectures=...)
    assert type(from_official(tmp_path / "lm")) is blockformer.BlockformerEncoderForMaskedLM
    official_folder(tmp_path / "cls", "bert", "BertForTokenClassification")
    edit_config(tmp_path / "cls", architectures=...)
    with pytest.raises(ConversionError, match="architectures is missing"):
        from_official(tmp_path / "cls")


@pytest.mark.parametrize("text", ['{"head": "LlamaModel", "traits": []}', '{"head": 1}', '{"head": "BertModel"}', "[]"])
def test_a_damaged_memory_is_named(tmp_path, text):
    official_folder(tmp_path / "src", "bert", "BertModel")
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    path = tmp_path / "dst/conversion.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "form": json.loads(text)}))
    with pytest.raises(ConversionError, match="damaged; delete it"):
        convert(tmp_path / "dst", tmp_path / "back", to_official=True)


@pytest.mark.parametrize("preset", ["bert", "bert-decoder", "roberta", "distilbert"])
def test_a_preset_is_summarised(preset):
    summary = summarize(preset)
    assert summary.parameters > 50_000_000
    assert summary.settings["head"]["lm_head_transform"]
    assert bool(summary.cache) == (preset == "bert-decoder")


def test_vectors_in_float32_next_to_half_matrices_are_compared_as_they_are(tmp_path):
    """The bias of the head has two names in the official class."""
    official_folder(tmp_path / "src", "bert", "BertForMaskedLM")
    edit_tensors(
        tmp_path / "src", lambda tensors: {name: x.half() if x.dim() > 1 else x for name, x in tensors.items()}
    )
    assert_verified(convert(tmp_path / "src", tmp_path / "dst"))
    assert_verified(convert(tmp_path / "dst", tmp_path / "back", to_official=True))
    assert stored(tmp_path / "back") == stored(tmp_path / "src")


def test_a_body_with_the_pooler_of_a_classifier_goes_to_a_class_without_one(tmp_path):
    """The pooler is the first layer of the official classifier, and its body has none."""
    theirs = official_folder(tmp_path / "src", "distilbert", "DistilBertForSequenceClassification")
    convert(tmp_path / "src", tmp_path / "dst")
    body = blockformer.BlockformerEncoderModel.from_pretrained(tmp_path / "dst")
    body.save_pretrained(tmp_path / "body")
    report = convert(tmp_path / "body", tmp_path / "back", to_official=True)
    assert_verified(report)
    assert any("DistilBertModel has no pooler" in note for note in report.notes)
    again = transformers.DistilBertModel.from_pretrained(tmp_path / "back").eval()
    ids = torch.arange(5, 15)[None]
    assert_close(again(ids).last_hidden_state, theirs.distilbert(ids).last_hidden_state)
    assert_close(from_official(tmp_path / "back")(ids).pooler_output, body.eval()(ids).pooler_output)
