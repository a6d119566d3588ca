"""Token vectors that the embedding scales itself: the same function, for all who call, change or replace it."""

import copy

import pytest
import torch
from pairs import assert_close
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from sizes import TINY

import blockformer
from blockformer.model.scaled_embedding import ScaledEmbedding
from blockformer.publishing.repo_code import left_out

CLASSES = {
    "decoder": blockformer.BlockformerDecoderForCausalLM,
    "encoder": blockformer.BlockformerEncoderForMaskedLM,
    "encoder_decoder": blockformer.BlockformerEncoderDecoderForConditionalGeneration,
}
IDS = torch.arange(3, 15).view(2, 6)


def model_of(topology="decoder", scales=True, **settings):
    cls, settings = CLASSES[topology], {"tie_word_embeddings": True, **settings}
    config = cls.config_class(**TINY, vocab_size=97, embedding_scale=3.3, scales_in_embedding=scales, **settings)
    torch.manual_seed(0)
    return cls(config).eval()


def inputs_of(topology):
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS} if topology == "encoder_decoder" else {})


@torch.no_grad()
@pytest.mark.parametrize("scales", [True, "rounded"])
@pytest.mark.parametrize("topology", CLASSES)
def test_tokens_have_the_same_logits_and_the_module_scales(topology, scales):
    plain, ours = model_of(topology, False), model_of(topology, scales)
    ours.load_state_dict(plain.state_dict())
    assert_close(ours(**inputs_of(topology)).logits, plain(**inputs_of(topology)).logits)
    embeddings = [model.get_input_embeddings() for model in (ours, plain)]
    assert torch.equal(embeddings[0](IDS), embeddings[1](IDS) * 3.3)
    factor = torch.tensor(3.3).bfloat16().item() if scales == "rounded" else 3.3
    assert torch.equal(embeddings[0].bfloat16()(IDS), embeddings[1].bfloat16()(IDS) * factor)


def test_a_fresh_model_is_drawn_as_without():
    plain, ours = (model_of(scales=scales, initializer_range=None).state_dict() for scales in (False, True))
    assert_close(ours, plain)


@pytest.mark.parametrize("topology", CLASSES)
def test_resizing_and_loading_keep_the_scale(topology, tmp_path):
    ours = model_of(topology)
    ours.resize_token_embeddings(ours.config.vocab_size + 3, mean_resizing=False)
    ours.save_pretrained(tmp_path)
    for model in (ours, type(ours).from_pretrained(tmp_path)):
        found = [module for module in model.modules() if isinstance(module, ScaledEmbedding)]
        assert {module.embed_scale for module in found} == {3.3}
        assert {module.weight.data_ptr() for module in found} == {model.get_output_embeddings().weight.data_ptr()}
    assert_close(model(**inputs_of(topology)).logits, ours(**inputs_of(topology)).logits)


@torch.no_grad()
@pytest.mark.parametrize(
    "adapter", [TrainableTokensConfig(token_indices=[4, 7]), LoraConfig(target_modules=["embed_tokens"], r=2)]
)
def test_what_peft_trains_of_it_is_scaled_too(adapter):
    trained = get_peft_model(model_of(tie_word_embeddings=False), copy.deepcopy(adapter)).eval()
    for name, parameter in trained.named_parameters():
        if "lora" in name or "trainable_tokens" in name:
            parameter.copy_(torch.randn_like(parameter))
    expected = trained(IDS).logits
    assert_close(trained.merge_and_unload()(IDS).logits, expected)


def test_a_writer_writes_the_same_prepared():
    ours, settings = model_of(scales="rounded"), {"max_new_tokens": 6, "do_sample": False}
    expected = ours.generate(IDS, **settings)
    assert torch.equal(ours.prepare_for_inference().generate(IDS, **settings), expected)


def test_only_a_repo_that_needs_it_has_its_code():
    assert "scaled_embedding" not in left_out(model_of().config)
    assert "scaled_embedding" in left_out(model_of(scales=False).config)


def test_without_a_scale_it_is_a_plain_embedding():
    config = blockformer.BlockformerDecoderConfig(**TINY, scales_in_embedding=True)
    assert type(blockformer.BlockformerDecoderModel(config).embed_tokens) is torch.nn.Embedding
