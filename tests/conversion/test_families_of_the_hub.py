"""What checkpoints of the Hub hold and say beyond what today's official classes write."""

import json

import pytest
import torch
import transformers
from sizes import TINY

from blockformer import BlockformerDecoderConfig
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.doctor import diagnose
from blockformer.doctor.finding import ERROR

from .oracles import edit_config, edit_tensors, entries_of, official_folder, there_and_back

SIZES = {
    **TINY,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART = {
    "d_model": 32,
    "init_std": 0.4,
    **{
        f"{stack}_{name}": size
        for stack in ("encoder", "decoder")
        for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
    },
}


def save_official(folder, name, **settings):
    """A random model of transformers with random biases and norms, saved; gives the model."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**{**SIZES, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("head", ["DebertaV2ForMaskedLM", "DebertaV2ForSequenceClassification", "DebertaV2Model"])
def test_deberta_may_hold_embeddings_that_the_official_class_does_not_read(tmp_path, head):
    settings = {
        "relative_attention": True,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
    }
    save_official(tmp_path / "src", head, **settings)
    root = "" if head == "DebertaV2Model" else "deberta."
    unread = {f"{root}embeddings.position_embeddings.weight": 64, f"{root}embeddings.word_embeddings._weight": 97}
    edit_tensors(tmp_path / "src", **{name: torch.randn(rows, 32) for name, rows in unread.items()})
    there_and_back(tmp_path, verify_back=True)


def test_pythia_may_hold_masks_and_frequencies(tmp_path):
    save_official(tmp_path / "src", "GPTNeoXForCausalLM")
    buffers = {
        "bias": torch.ones(64, 64).tril().view(1, 1, 64, 64).to(torch.uint8),
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.rand(1),
    }
    extra = {f"gpt_neox.layers.{i}.attention.{name}": tensor for i in range(2) for name, tensor in buffers.items()}
    edit_tensors(tmp_path / "src", **extra)
    there_and_back(tmp_path)


@pytest.mark.parametrize(
    ("name", "dropouts"),
    [
        ("PhiForCausalLM", {"resid_pdrop": 0.1, "embd_pdrop": 0.0}),  # phi-2
        ("GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.1}),
        ("Phi3ForCausalLM", {"resid_pdrop": 0.2, "embd_pdrop": 0.1}),  # whose class never reads the second
        ("OPTForCausalLM", {"dropout": 0.1, "layerdrop": 0.1}),
    ],
)
def test_dropouts_may_differ_since_they_do_nothing_in_evaluation(tmp_path, name, dropouts):
    save_official(tmp_path / "src", name, pad_token_id=0, **dropouts)
    report = there_and_back(tmp_path)
    kept, other = dropouts
    assert any(f"'{other}'" in note for note in report.notes) == (name != "Phi3ForCausalLM")
    (tmp_path / "dst" / "conversion.json").unlink()
    convert(tmp_path / "dst", tmp_path / "fresh", to_official=True)
    assert entries_of(tmp_path / "fresh")[kept] == dropouts[kept]


HAVE_ENDS = {
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "OlmoForCausalLM": {},
    "Starcoder2ForCausalLM": {},
}
"""Classes that have a beginning or end of large vocabularies by default -> settings of a small model."""


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("name", HAVE_ENDS)
def test_a_small_vocabulary_may_lack_the_ends_that_the_class_has(tmp_path, name, is_named):
    """As in models of molecules, proteins or music, whose `config.json` has them too, since the class wrote it."""
    config = getattr(transformers, name).config_class()
    ends = {each: getattr(config, each) for each in ("bos_token_id", "eos_token_id")}
    save_official(tmp_path / "src", name, pad_token_id=0, **HAVE_ENDS[name])
    edit_config(tmp_path / "src", **(ends if is_named else dict.fromkeys(ends, ...)))
    (tmp_path / "src/generation_config.json").unlink()
    assert max(filter(None, ends.values())) >= entries_of(tmp_path / "src")["vocab_size"]
    there_and_back(tmp_path)
    with torch.no_grad():
        theirs = getattr(transformers, name).from_pretrained(tmp_path / "src").eval()
        ours = from_official(tmp_path / "src")
        ids = torch.arange(3, 9)[None]
        assert torch.equal(ours.generate(ids, max_new_tokens=4), theirs.generate(ids, max_new_tokens=4))
    edit_config(tmp_path / "src", bos_token_id=9_999)
    with pytest.raises(ConversionError, match="bos_token_id must be a token from 0"):
        from_official(tmp_path / "src")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "SmolLM3ForCausalLM", "BloomForCausalLM"])
def test_products_may_have_been_cut_in_training(tmp_path, name):
    save_official(tmp_path / "src", name, pad_token_id=0, pretraining_tp=2)
    assert not any("pretraining_tp" in note for note in there_and_back(tmp_path).notes)


def test_a_bloom_whose_slices_lose_their_biases_is_refused(tmp_path):
    save_official(tmp_path / "src", "BloomForCausalLM", pad_token_id=0, pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(ConversionError, match=r"config\.json.*\n.*slow_but_exact is 'True'"):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_config(tmp_path / "src", slow_but_exact=False)
    there_and_back(tmp_path)


@pytest.mark.parametrize(
    ("name", "former"),
    [
        ("MptForCausalLM", "MPTForCausalLM"),
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        ("FalconForCausalLM", "RWForCausalLM"),
    ],
)
def test_a_class_may_have_the_name_of_its_former_code(tmp_path, name, former):
    save_official(tmp_path / "src", name, pad_token_id=0)
    edit_config(tmp_path / "src", architectures=[former])
    there_and_back(tmp_path)


def logits_of(folder, name, cached=False):
    """Logits of an official model as its folder says it; of eight steps with the cache if wanted."""
    model = getattr(transformers, name).from_pretrained(folder).eval()
    ids = torch.arange(3, 19)[None]
    if cached:
        made = model.generate(ids, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
        return torch.stack(made.logits)
    both = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **both).logits


@pytest.mark.parametrize(
    ("name", "value", "settings"),
    [
        ("BertLMHeadModel", False, {"is_decoder": True}),
        ("BertForMaskedLM", True, {}),
        ("BartForConditionalGeneration", True, BART),
        ("BartForConditionalGeneration", False, BART),
        ("BartForCausalLM", False, BART),
    ],
)
def test_a_model_that_looks_the_other_way_is_refused(tmp_path, name, value, settings):
    src = tmp_path / "src"
    save_official(src, name, pad_token_id=0, **settings)
    usual = logits_of(src, name)
    edit_config(src, is_causal=value)
    assert not torch.allclose(logits_of(src, name), usual, atol=1e-3)
    with pytest.raises(ConversionError, match=rf"config\.json.*\n.*is_causal is '{value}': .*remove it"):
        convert(src, tmp_path / "dst")
    edit_config(src, is_causal=...)
    there_and_back(tmp_path)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_decoder_that_sees_all_of_a_text_stays_one(tmp_path, name):
    src = tmp_path / "src"
    save_official(src, name, pad_token_id=0)
    edit_config(src, is_causal=False)
    there_and_back(tmp_path, verify="full")
    assert BlockformerDecoderConfig.from_pretrained(tmp_path / "dst").bidirectional
    assert json.loads((tmp_path / "back" / "config.json").read_text())["is_causal"] is False


@pytest.mark.parametrize(("name", "value"), [("LlamaForCausalLM", True), ("BertForMaskedLM", False)])
def test_a_model_may_say_that_it_looks_the_usual_way(tmp_path, name, value):
    save_official(tmp_path / "src", name, pad_token_id=0)
    edit_config(tmp_path / "src", is_causal=value)
    there_and_back(tmp_path)


@pytest.mark.parametrize("entry", ["sliding_window", "attention_chunk_size"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertLMHeadModel"])
def test_a_window_that_only_the_cache_has_is_refused(tmp_path, name, entry):
    src = tmp_path / "src"
    save_official(src, name, pad_token_id=0, is_decoder=True)
    usual = logits_of(src, name, cached=True)
    edit_config(src, **{entry: 4})
    assert not torch.allclose(logits_of(src, name, cached=True), usual, atol=1e-3)
    with pytest.raises(ConversionError, match=rf"config\.json.*\n.*{entry} is '4': .*set it to null"):
        convert(src, tmp_path / "dst")
    edit_config(src, **{entry: None})
    there_and_back(tmp_path)


@pytest.mark.parametrize("name", ["ModernBertDecoderForCausalLM", "ModernBertForMaskedLM"])
def test_a_modernbert_may_say_half_its_window(tmp_path, name):
    settings = {"local_attention": 32, "layer_types": ["sliding_attention", "full_attention"]}
    save_official(tmp_path / "src", name, pad_token_id=0, cls_token_id=1, sep_token_id=2, **settings)
    edit_config(tmp_path / "src", sliding_window=3)
    there_and_back(tmp_path)
    assert entries_of(tmp_path / "dst")["sliding_window"] == 3


def test_a_falcon_may_have_plain_heads_and_biases_but_no_alibi(tmp_path):
    falcon_rw = {"bias": True, "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False}
    save_official(tmp_path / "src", "FalconForCausalLM", pad_token_id=0, alibi=False, **falcon_rw)
    there_and_back(tmp_path)
    edit_config(tmp_path / "src", alibi=True)
    with pytest.raises(ConversionError, match=r"config\.json: alibi is true.*run this one with transformers"):
        convert(tmp_path / "src", tmp_path / "other")


def test_an_opt_may_have_norms_after_its_sublayers(tmp_path):
    settings = {"ffn_dim": 48, "do_layer_norm_before": False, "pad_token_id": 0}
    save_official(tmp_path / "src", "OPTForCausalLM", word_embed_proj_dim=32, **settings)
    there_and_back(tmp_path)
    assert "token_embedding_size" not in entries_of(tmp_path / "dst")


@pytest.mark.parametrize("family", ["Bart", "MBart", "PLBart", "Pegasus", "Blenderbot", "M2M100"])
def test_the_two_stacks_may_have_inner_widths_of_their_own(tmp_path, family):
    settings = {**BART, "decoder_ffn_dim": 64}
    save_official(tmp_path / "src", f"{family}ForConditionalGeneration", pad_token_id=0, **settings)
    there_and_back(tmp_path)
    widths = {entries_of(tmp_path / "dst")[name] for name in ("intermediate_size", "decoder_intermediate_size")}
    assert widths == {48, 64}


def test_an_encoder_decoder_that_generates_like_a_decoder_is_refused(tmp_path):
    src = tmp_path / "src"
    save_official(src, "BartForConditionalGeneration", pad_token_id=0, **BART)
    edit_config(src, is_encoder_decoder=False)
    assert not transformers.BartForConditionalGeneration.from_pretrained(src).config.is_encoder_decoder
    with pytest.raises(ConversionError, match=r"is_encoder_decoder is 'False': generate follows it"):
        convert(src, tmp_path / "dst")


def test_a_decoder_of_t5gemma_that_looks_both_ways_is_refused(tmp_path):
    src, name = tmp_path / "src", "T5GemmaForConditionalGeneration"
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    save_official(src, name, encoder=dict(sizes), decoder=dict(sizes), vocab_size=97)
    usual, settings = logits_of(src, name), entries_of(src)["decoder"]
    edit_config(src, decoder={**settings, "is_causal": False})
    assert not torch.allclose(logits_of(src, name), usual, atol=1e-3)
    with pytest.raises(ConversionError, match=r"config\.json.*\n.*is_causal is false in the decoder; remove it"):
        convert(src, tmp_path / "dst")
    edit_config(src, decoder=settings)
    there_and_back(tmp_path)


def test_weights_with_adapters_inside_are_refused_by_name(tmp_path):
    official_folder(tmp_path / "src", "llama")
    name = "model.layers.0.mlp.up_proj.parametrizations.weight.0.lora_A"
    edit_tensors(tmp_path / "src", **{name: torch.ones(5, 4, 64)})
    with pytest.raises(ConversionError, match=r"lora_A' is part of a weight .* merge them into plain weights"):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_config(tmp_path / "src", position_embedding_type="rotary")  # as jina-embeddings-v3, whose numbers say nothing
    assert [each.kind for each in diagnose(tmp_path / "src").findings if each.severity == ERROR] == ["adapter"]
