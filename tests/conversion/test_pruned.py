"""Official checkpoints whose heads were pruned by transformers 4: in and out, and the same as heads of zeros."""

import json

import pytest
import torch
import transformers
from pairs import assert_close
from sizes import THREE_LAYERS, TOKENS

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.families.registry import FAMILIES
from blockformer.summary import summarize

from .oracles import edit_config, edit_tensors, entries_of, stored

PRUNED = {0: [1, 2], 1: [3]}
WITH_POSITIONS_OF_ROBERTA = {**THREE_LAYERS, **TOKENS, "max_position_embeddings": 66, "initializer_range": 0.3}
# Family -> a class of its own, and the names of queries, keys, values and the output in a layer.
BERT = "encoder.layer.{}.attention."
NAMES = [f"{BERT}self.{name}" for name in ("query", "key", "value")] + [f"{BERT}output.dense"]
DISTILBERT = [f"transformer.layer.{{}}.attention.{name}_lin" for name in ("q", "k", "v", "out")]
GPT2 = ["h.{}.attn.c_attn", "h.{}.attn.c_proj"]
CASES = {
    "bert": ("BertForMaskedLM", "bert.", NAMES),
    "roberta": ("RobertaForSequenceClassification", "roberta.", NAMES),
    "electra": ("ElectraForPreTraining", "electra.", NAMES),
    "distilbert": ("DistilBertForMaskedLM", "distilbert.", DISTILBERT),
    "gpt2": ("GPT2LMHeadModel", "transformer.", GPT2),
}
IDS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))


def kept(heads, size=12):
    """The rows of the heads that stay."""
    return torch.cat([torch.arange(head * size, (head + 1) * size) for head in range(4) if head not in heads])


def narrower(family, tensors):
    """A state dict as transformers 4 leaves it after `prune_heads`."""
    _, root, names = CASES[family]
    tensors = dict(tensors)
    for layer, heads in PRUNED.items():
        rows = kept(heads)
        *inner, output = (root + name.format(layer) for name in names)
        for name in inner:
            if family == "gpt2":
                columns = torch.cat([rows + 48 * part for part in range(3)])
                tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:, columns].contiguous()
                tensors[f"{name}.bias"] = tensors[f"{name}.bias"][columns].clone()
            else:
                for kind in ("weight", "bias"):
                    tensors[f"{name}.{kind}"] = tensors[f"{name}.{kind}"][rows].clone()
        weight = tensors[f"{output}.weight"]
        tensors[f"{output}.weight"] = (weight[rows] if family == "gpt2" else weight[:, rows]).contiguous()
    return tensors


def pruned_folder(folder, family):
    """A pruned checkpoint, and the whole official model with zeros where it has no heads."""
    torch.manual_seed(0)
    model_class, root, names = CASES[family]
    config_class = FAMILIES[family].settings.official_class
    own = {"embedding_size": 24} if family == "electra" else {}
    model = getattr(transformers, model_class)(config_class(**WITH_POSITIONS_OF_ROBERTA, **own)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    edit_tensors(folder, lambda tensors: narrower(family, tensors))
    edit_config(folder, pruned_heads={str(layer): heads for layer, heads in PRUNED.items()})
    tensors = model.state_dict()
    for layer, heads in PRUNED.items():
        weight = tensors[f"{root}{names[-1].format(layer)}.weight"]
        weight = weight if family == "gpt2" else weight.t()
        gone = torch.ones(48, dtype=torch.bool).index_fill(0, kept(heads), False)
        weight[gone] = 0  # in place
    return model


@pytest.mark.parametrize("family", CASES)
def test_a_pruned_checkpoint_comes_in_and_goes_back(tmp_path, family):
    whole = pruned_folder(tmp_path / "official", family)
    report = convert(tmp_path / "official", tmp_path / "ours")
    assert any(
        "transformers has no layers of fewer heads (pruned_heads) since version 5" in note for note in report.notes
    )
    model = getattr(blockformer, json.loads((tmp_path / "ours/config.json").read_text())["architectures"][0])
    ours = model.from_pretrained(tmp_path / "ours")
    assert ours.config.pruned_heads == PRUNED
    shift = {"position_ids": torch.arange(12)[None]} if family == "roberta" else {}
    with torch.no_grad():
        wanted = whole(IDS).logits
        assert wanted.std() > 0.3
        assert_close(ours(IDS, **shift).logits, wanted)
        assert_close(from_official(tmp_path / "official")(IDS, **shift).logits, wanted)
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    before, after = stored(tmp_path / "official"), stored(tmp_path / "back")
    assert before == after
    assert entries_of(tmp_path / "back") == entries_of(tmp_path / "official")
    # Without what the conversion remembers, too, and from weights that were pruned here.
    export_folder(tmp_path / "ours", tmp_path / "plain")
    (tmp_path / "plain/conversion.json").unlink()
    convert(tmp_path / "plain", tmp_path / "again", to_official=True)
    assert stored(tmp_path / "again") == before
    assert entries_of(tmp_path / "again")["pruned_heads"] == {"0": [1, 2], "1": [3]}


def test_all_heads_again_are_what_every_official_class_reads(tmp_path):
    whole = pruned_folder(tmp_path / "official", "bert")
    ours = blockformer.restore_heads(from_official(tmp_path / "official"))
    blockformer.export_model(ours, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to_official=True, family="bert")
    back = transformers.BertForMaskedLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert_close(back(IDS).logits, whole(IDS).logits)


def test_a_family_without_pruned_heads_says_what_to_do(tmp_path):
    config = blockformer.preset("llama", **WITH_POSITIONS_OF_ROBERTA, head_dim=12)
    model = blockformer.prune_heads(blockformer.BlockformerDecoderForCausalLM(config), {0: [1]})
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ConversionError, match=r"pruned_heads must be None \(blockformer.restore_heads has zeros"):
        convert(tmp_path / "ours", tmp_path / "back", to_official=True, family="llama")
    blockformer.restore_heads(model).save_pretrained(tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "back", to_official=True, family="llama")
    with torch.no_grad():
        back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back").eval()
        assert_close(back(IDS).logits, model(IDS).logits)
    edit_config(tmp_path / "back", pruned_heads={"0": [1]})
    with pytest.raises(ConversionError, match="pruned_heads is "):
        convert(tmp_path / "back", tmp_path / "in")


def test_tensors_that_are_not_those_of_the_pruned_heads(tmp_path):
    pruned_folder(tmp_path / "official", "gpt2")
    edit_config(tmp_path / "official", pruned_heads={"0": [1, 2]})
    with pytest.raises(ConversionError, match="wrong shapes"):
        convert(tmp_path / "official", tmp_path / "ours")
    edit_config(tmp_path / "official", pruned_heads={"0": "1"})
    with pytest.raises(ConversionError, match="pruned_heads must be a dict, layer -> list of heads"):
        convert(tmp_path / "official", tmp_path / "ours")
    edit_config(tmp_path / "official", pruned_heads={})
    with pytest.raises(ConversionError, match="wrong shapes"):
        convert(tmp_path / "official", tmp_path / "ours")


def test_the_cache_of_fewer_heads_is_counted(tmp_path):
    config = blockformer.preset("qwen3", **WITH_POSITIONS_OF_ROBERTA, num_key_value_heads=2, head_dim=12)
    model = blockformer.BlockformerDecoderForCausalLM(config)
    sizes = []
    for name, one in (("whole", model), ("pruned", blockformer.prune_heads(model, {0: [0, 1]}))):
        one.save_pretrained(tmp_path / name)
        sizes.append(summarize(tmp_path / name).cache["float32"])
    assert sizes == [2 * 4 * 12 * 6, 2 * 4 * 12 * 5]
