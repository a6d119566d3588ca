"""Classes and configs that do not fit each other are refused, in the constructor and where a folder is loaded."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import blockformer
from blockformer import BlockformerDecoderForCausalLM

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
OFFICIAL = {**SMALL, "max_position_embeddings": 32}

TOPOLOGIES = {
    "encoder": blockformer.BlockformerEncoderConfig,
    "decoder": blockformer.BlockformerDecoderConfig,
    "encoder-decoder": blockformer.BlockformerEncoderDecoderConfig,
}


def models_of(config_class):
    models = (getattr(blockformer, name) for name in blockformer.__all__ if name.startswith("Blockformer"))
    return [cls for cls in models if getattr(cls, "config_class", None) is config_class]


@pytest.mark.parametrize("kind", TOPOLOGIES)
@pytest.mark.parametrize("other", [*TOPOLOGIES, "official"])
def test_a_model_refuses_a_config_of_another_topology(kind, other):
    """It would train, and be saved, and nothing could load it again."""
    models = models_of(TOPOLOGIES[kind])
    assert len(models) >= 4
    config = BertConfig(**OFFICIAL) if other == "official" else TOPOLOGIES[other](**SMALL)
    for cls in models:
        if kind == other:
            assert cls(config).config is config
            continue
        with pytest.raises(ValueError, match=f"{cls.__name__} needs a {cls.config_class.__name__}, not a") as error:
            cls(config)
        if other == "official":
            assert "not a BertConfig: blockformer.preset makes one, and blockformer.from_official" in str(error.value)
        else:
            right = models_of(TOPOLOGIES[other])[0].__name__
            assert right in str(error.value) or "Model" in right
            assert "blockformer.reshape" in str(error.value)
            named = str(error.value).partition(": use ")[2].partition(",")[0].split(" or ")
            assert len(named) == len({*named})  # some serve two Auto classes


def test_a_field_that_was_set_by_hand_is_checked_when_the_model_is_built():
    """Else it would train and save, and nothing could load it again."""
    config = blockformer.BlockformerDecoderConfig(**SMALL)
    config.position_type = "rotery"
    with pytest.raises(ValueError, match=r"position_type must be one of .*, not 'rotery'\. Did you mean 'rotary'\?"):
        blockformer.BlockformerDecoderForCausalLM(config)
    config.position_type, config.use_cache = "rotary", False
    assert not blockformer.BlockformerDecoderForCausalLM(config).config.use_cache


def test_a_folder_of_another_layout_or_topology_says_how_to_load_it(tmp_path):
    BertModel(BertConfig(**OFFICIAL)).save_pretrained(tmp_path / "official")
    blockformer.BlockformerEncoderModel(blockformer.BlockformerEncoderConfig(**SMALL)).save_pretrained(
        tmp_path / "ours"
    )
    for cls in (
        BlockformerDecoderForCausalLM,
        blockformer.BlockformerEncoderModel,
        blockformer.BlockformerEncoderConfig,
    ):
        with pytest.raises(ValueError, match=r"model_type is 'bert'.*official layout: use blockformer\.from_official"):
            cls.from_pretrained(tmp_path / "official")
    for cls in (BlockformerDecoderForCausalLM, blockformer.BlockformerDecoderConfig):
        with pytest.raises(
            ValueError, match=r"model_type is .blockformer_encoder.*another topology: use the Auto classes"
        ):
            cls.from_pretrained(tmp_path / "ours")


@pytest.mark.filterwarnings("ignore:.*torch_dtype")
def test_torch_dtype_is_dtype_wherever_a_dtype_is_taken(tmp_path):
    """Its name before transformers 5, which says that it is deprecated."""
    config = blockformer.BlockformerDecoderConfig(**SMALL, torch_dtype="bfloat16")
    assert config.dtype is torch.bfloat16
    assert AutoModelForCausalLM.from_config(config).dtype is torch.bfloat16
    assert AutoModelForCausalLM.from_config(config, torch_dtype=torch.float16).dtype is torch.float16
    BlockformerDecoderForCausalLM(config).save_pretrained(tmp_path)
    for cls in (AutoModelForCausalLM, BlockformerDecoderForCausalLM):
        assert cls.from_pretrained(tmp_path, torch_dtype="float16").dtype is torch.float16
    assert (
        blockformer.preset("qwen3", **SMALL, head_dim=8, num_key_value_heads=2, torch_dtype=torch.float16).dtype
        is torch.float16
    )
