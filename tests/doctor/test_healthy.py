"""No false alarms: what transformers has just saved is healthy, of every family, in every usual way of saving.

`make test` takes eleven families, `make exhaustive` all.
"""

import pytest
import torch

from blockformer.conversion.families import index
from blockformer.conversion.families.registry import FAMILIES
from blockformer.doctor import diagnose
from blockformer.doctor.finding import NOTE

from ..conversion import test_decoder_families, test_encoder_decoder_families, test_encoder_families
from ..conversion.oracles import SMALL, edit_config, edit_tensors, official_model
from ..conversion.rows import Row, model_of
from ..conversion.test_t5gemma2 import whole_model

USUAL = {
    "decoder": (test_decoder_families.ROWS, test_decoder_families.SIZES),
    "encoder": (test_encoder_families.ROWS, test_encoder_families.SIZES),
    "encoder_decoder": (test_encoder_decoder_families.ROWS, test_encoder_decoder_families.LIKE_BART),
}
WAYS = ("plain", "bfloat16", "float16", "shards")
USUALLY = ("llama", "gpt2", "bert", "t5", "bart", "mixtral", "hy_v3", "flint", "pegasus", "marian-decoder", "lfm2_moe")
CASES = [
    pytest.param(name, way, marks=[] if name in USUALLY and way in ("plain", "float16") else pytest.mark.exhaustive)
    for name in FAMILIES
    for way in WAYS
]


def small_model(name):
    """A small model of a family, whose matrices do not look like a fresh draw."""
    if name in SMALL:
        return trained(official_model(name))
    if name == "t5gemma2":
        return trained(whole_model())
    family = FAMILIES[name]
    model_type = index.MODEL_TYPES.get(name, name)
    found = ((row, sizes) for rows, sizes in USUAL.values() for row in rows if row.family in (name, model_type))
    row, sizes = next(found, (None, None))
    head = next((head for head in family.heads if head.writes_text), family.heads[0])
    if row is None:
        row, sizes = (
            (Row(name), USUAL["decoder"][1]) if model_type == name else (Row(name), USUAL["encoder_decoder"][1])
        )
    is_decoder = name in index.MODEL_TYPES or getattr(head, "is_decoder", False)
    more = {"is_decoder": True} if is_decoder else {}
    more |= {"max_length": sizes["max_position_embeddings"]} if name == "fsmt" else {}  # which is 200 otherwise
    return trained(model_of(row._replace(family=name), sizes, head, **more))


@torch.no_grad()
def trained(model):
    """The model, some rows of whose matrices are larger than others, except of tables that are computed."""
    for module in model.modules():
        is_computed = "Sinusoidal" in type(module).__name__
        for parameter in () if is_computed else module.parameters(recurse=False):
            if parameter.dim() >= 2:
                parameter.mul_(torch.linspace(0.5, 1.5, parameter.shape[-2])[:, None])
    return model


def saved(model, folder, way):
    """Save a model in one of `WAYS`; in 16 bits as a class is that was loaded so, some of whose weights stay wide."""
    model.save_pretrained(folder / "plain", max_shard_size="20KB" if way == "shards" else "5GB")
    if way in ("plain", "shards"):
        return folder / "plain"
    config = type(model.config).from_pretrained(folder / "plain")  # some families have the classes of others
    again = type(model).from_pretrained(folder / "plain", config=config, dtype=getattr(torch, way))
    again.save_pretrained(folder / way)
    return folder / way


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_saved_model_is_healthy(tmp_path, name, way):
    found = diagnose(saved(small_model(name), tmp_path, way))
    assert [f"{each.severity} {each.sentence}" for each in found.findings if each.severity != NOTE] == []
    assert found.status == 0


def test_a_pooler_that_the_model_does_without_and_an_entry_of_2020_are_no_warnings(tmp_path):
    model = trained(official_model("bert", "ForMaskedLM", hidden_size=64, intermediate_size=128))
    model.save_pretrained(tmp_path)
    pooler = {"bert.pooler.dense.weight": torch.randn(64, 64) * 0.02, "bert.pooler.dense.bias": torch.zeros(64)}
    edit_tensors(tmp_path, **pooler)
    edit_config(tmp_path, eos_token_ids=0)
    found = diagnose(tmp_path)
    assert (found.status, [each.names for each in found.findings if each.kind == "fresh"]) == (0, [tuple(pooler)[:1]])
