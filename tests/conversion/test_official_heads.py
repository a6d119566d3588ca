"""Every class that transformers has for a family converts, or is refused by name with a reason."""

import importlib.util

import pytest
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from blockformer.conversion import ConversionError, from_official
from blockformer.conversion.families.registry import FAMILIES, family_of

from .oracles import edit_config

TYPES = sorted({family.model_type for family in FAMILIES.values()})


def official_classes(model_type):
    """Names of the model classes in the module of a `model_type`, those of its Auto classes among them.

    A `model_type` without a module of models has the classes of another, which its Auto classes name.
    """
    name = model_type_to_module_name(model_type)
    mapped = [names for table, names in vars(modeling_auto).items() if table.endswith("_MAPPING_NAMES")]
    classes = {names[model_type] for names in mapped if isinstance(names.get(model_type), str)}
    part = "data2vec_text" if model_type == "data2vec-text" else name  # one folder of several models
    file = f"transformers.models.{name}.modeling_{part}"
    if importlib.util.find_spec(file) is None:
        return {name for name in classes if not name.endswith("Config")}
    module = importlib.import_module(file)
    found = {name for name in module.__all__ if issubclass(getattr(module, name), PreTrainedModel)}
    found = {name for name in found if "pretrained" not in name.lower()}
    own = {family.settings.config_class for family in FAMILIES.values() if family.model_type == model_type}
    found = {name for name in found if getattr(module, name).config_class.__name__ in own}
    return found | {name for name in classes if issubclass(getattr(module, name, object), PreTrainedModel)}


def heads_of(model_type):
    return {head.official for family in FAMILIES.values() if family.model_type == model_type for head in family.heads}


def refusals_of(model_type):
    return {name for family in FAMILIES.values() if family.model_type == model_type for name in family.names.refused}


@pytest.mark.parametrize("model_type", TYPES)
def test_every_official_class_is_a_head_or_refused_by_name(model_type):
    """What the heads give there and back is the business of each family's own tests, which take all of them."""
    known, refused = heads_of(model_type), refusals_of(model_type)
    assert not known & refused
    assert official_classes(model_type) == known | refused


def test_each_class_finds_the_family_that_has_it():
    for model_type in TYPES:
        for name in heads_of(model_type):
            family = family_of({"model_type": model_type, "architectures": [name]})
            assert family.model_type == model_type
            assert name in {head.official for head in family.heads}


def test_a_refusal_says_why_and_what_to_do(tmp_path):
    config = transformers.GPT2Config(vocab_size=97, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    transformers.GPT2DoubleHeadsModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match=r"GPT2DoubleHeadsModel.*two heads at once.*load it as GPT2LMHeadModel"):
        from_official(tmp_path)
    edit_config(tmp_path, architectures=["GPT2ForMystery"])
    with pytest.raises(ConversionError, match=r"GPT2ForMystery.*there are GPT2LMHeadModel, GPT2Model"):
        from_official(tmp_path)
