"""Ours against the official implementation, over random configs of fifteen families and all their heads.

A model of transformers is converted and back: the same numbers, and files of the same bits.
"""

import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import strategies as st
from pairs import assert_close, largest
from safetensors.torch import load_file
from strategies import VOCAB, property_test

from blockformer.conversion import convert, from_official
from blockformer.conversion.families.registry import FAMILIES

pytestmark = pytest.mark.portable

LENGTH, REAL = 16, 11


OFFICIAL = {
    "llama": {"attention_bias": st.booleans(), "mlp_bias": st.booleans(), "head_dim": st.sampled_from([8, 16])},
    "qwen3": {"head_dim": st.sampled_from([8, 16]), "attention_bias": st.booleans()},
    "qwen2": {},
    "mistral": {"sliding_window": st.sampled_from([None, 5, 64]), "head_dim": st.sampled_from([8, 16])},
    "gpt2": {"activation_function": st.sampled_from(["gelu_new", "relu"]), "n_inner": st.sampled_from([None, 48])},
    "bert": {"hidden_act": st.sampled_from(["gelu", "relu"]), "type_vocab_size": st.sampled_from([1, 2])},
    "roberta": {"hidden_act": st.sampled_from(["gelu", "silu"])},
    "xlm-roberta": {},
    "distilbert": {"activation": st.sampled_from(["gelu", "relu"]), "sinusoidal_pos_embds": st.just(False)},
    "t5": {"feed_forward_proj": st.sampled_from(["relu", "gated-gelu", "gated-silu"])},
    "mt5": {"feed_forward_proj": st.sampled_from(["gated-gelu"])},
    "umt5": {"feed_forward_proj": st.sampled_from(["gated-gelu", "relu"])},
    "bart": {"activation_function": st.sampled_from(["gelu", "relu"]), "scale_embedding": st.booleans()},
    "mbart": {"scale_embedding": st.booleans()},
    "marian": {"activation_function": st.sampled_from(["swish", "gelu"]), "scale_embedding": st.booleans()},
}
ROTARY = ("llama", "qwen3", "qwen2", "mistral")
T5 = ("t5", "mt5", "umt5")
BART = ("bart", "mbart", "marian")


@st.composite
def official_models(draw):
    """A family, the name of one of its classes, the fields of its config, a dtype, and the seed of the weights."""
    family = draw(st.sampled_from(sorted(OFFICIAL)))
    names = [head.official for head in FAMILIES[family].heads if not getattr(head, "is_decoder", False)]
    fields = {name: draw(values) for name, values in OFFICIAL[family].items()}
    layers, others = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    if family in ROTARY:
        fields |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
        fields |= {"num_key_value_heads": draw(st.sampled_from([1, 2, 4])), "max_position_embeddings": 64}
        fields |= {"tie_word_embeddings": draw(st.booleans())}
        fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e2, 1e4, 1e6]))}}
    elif family == "gpt2":
        fields |= {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64}
    elif family == "distilbert":
        fields |= {"dim": 32, "hidden_dim": 48, "n_layers": layers, "n_heads": 4, "max_position_embeddings": 64}
    elif family in T5:
        fields |= {
            "d_model": 32,
            "d_kv": draw(st.sampled_from([6, 8])),
            "d_ff": 48,
            "num_layers": layers,
            "num_heads": 4,
        }
        fields |= {"num_decoder_layers": others, "relative_attention_num_buckets": draw(st.sampled_from([8, 32]))}
        fields |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        fields |= {"tie_word_embeddings": family == "t5" and draw(st.booleans())}
    elif family in BART:
        fields |= {"d_model": 32, "encoder_layers": layers, "decoder_layers": others, "encoder_ffn_dim": 48}
        fields |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        fields |= {"max_position_embeddings": 64, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        fields |= {"forced_eos_token_id": 2}
    else:
        fields |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
        fields |= {"max_position_embeddings": 66, "pad_token_id": 1 if "roberta" in family else 0}
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    return family, draw(st.sampled_from(names)), {"vocab_size": VOCAB, **fields}, dtype, draw(st.integers(0, 9999))


@torch.no_grad()
def random_model(family, name, fields, dtype=torch.float32, seed=0):
    """transformers' own model, every weight random."""
    model = getattr(transformers, name)(FAMILIES[family].settings.official_class(**fields)).eval()
    generator, embeddings = torch.Generator().manual_seed(seed), model.get_input_embeddings().weight
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
        parameter.normal_(generator=generator)
        if parameter.dim() == 1:
            parameter.mul_(0.3).add_(float(is_norm))
        else:
            parameter.mul_(0.5 if parameter is embeddings else fields_width(fields) ** -0.5)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.normal_(std=0.3, generator=generator)
    return model.to(dtype)


def fields_width(fields):
    return next(fields[name] for name in ("hidden_size", "d_model", "dim", "n_embd") if name in fields)


def stored(folder):
    """name -> (dtype, shape, bytes) of what a folder holds."""
    tensors = load_file(folder / "model.safetensors").items()
    return {name: (one.dtype, one.shape, one.contiguous().view(torch.uint8).numpy().tobytes()) for name, one in tensors}


def batch(theirs):
    """Two rows, the second padded on the right, and what a decoder reads of them."""
    config, kind = theirs.config, type(theirs).__name__
    generator = torch.Generator().manual_seed(5)
    ids, target = (torch.randint(5, VOCAB, (2, length), generator=generator) for length in (LENGTH, 9))
    mask = torch.ones_like(ids)
    if kind.endswith("ForSequenceClassification") and not (config.is_encoder_decoder or "Bert" in kind):
        return {"input_ids": ids[:1]}  # official decoders find the last token by its number
    ids[1, REAL:], mask[1, REAL:] = getattr(config, "pad_token_id", None) or 0, 0
    if config.is_encoder_decoder and isinstance(config.eos_token_id, int):  # which a row ends with, and has once
        ids[0, -1] = ids[1, REAL - 1] = config.eos_token_id
    given = {"input_ids": ids, "attention_mask": mask}
    if kind.endswith("MultipleChoice"):
        return {name: tensor[None] for name, tensor in given.items()}
    if config.is_encoder_decoder and not kind.endswith(("EncoderModel", "Classification", "QuestionAnswering")):
        given["decoder_input_ids"] = target
    return given


@torch.no_grad()
def assert_same_numbers(ours, theirs):
    """All outputs that both have at real tokens, and greedy text."""
    given = batch(theirs)
    found, expected = ours(**given, use_cache=False), theirs(**given, use_cache=False)
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    kinds = "last_hidden_state logits start_logits end_logits prediction_logits seq_relationship_logits pooler_output"
    names = [name for name in kinds.split() if name in expected]
    assert names
    assert [name for name in kinds.split() if name in found] == names
    for name in names:
        pair = (found[name], expected[name])
        if pair[0].shape[:2] == real.shape:
            pair = (pair[0][real], pair[1][real])
        assert_close(*pair, name=f"{name} ")
        assert largest(pair[1]) > 0, name
    if theirs.can_generate():
        ways = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        source = {name: tensor[:1] for name, tensor in given.items() if name != "decoder_input_ids"}
        assert torch.equal(ours.generate(**source, **ways), theirs.generate(**source, **ways, **without_cache(theirs)))


def without_cache(theirs):
    """Settings for `generate`: the cache that it makes for a T5 has only as many layers as the encoder."""
    config = theirs.config
    return {"use_cache": False} if getattr(config, "num_decoder_layers", 0) > config.num_hidden_layers else {}


@torch.no_grad()
def in_float32(cls, folder):
    """The official model of a folder without the rounding of its dtype in what is computed, not learnt.

    A cast model has rounded frequencies, so it is loaded. Marian's body stores its positions, and the table is rounded.
    """
    theirs = cls.from_pretrained(folder, dtype=torch.float32).eval()
    for module in theirs.modules():
        if hasattr(module, "create_weight"):
            module.weight.copy_(module.create_weight())
    return theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_that_are_stored_in_half_precision_are_computed(tmp_path, dtype):
    sizes = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    special = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    theirs = random_model("marian", "MarianModel", sizes | heads | special, dtype)
    theirs.save_pretrained(tmp_path)
    positions = "encoder.embed_positions.weight"
    stored, exact = load_file(tmp_path / "model.safetensors")[positions], in_float32(type(theirs), tmp_path)
    assert stored.dtype == dtype
    assert not torch.equal(exact.state_dict()[positions], stored.float())
    assert_same_numbers(from_official(tmp_path, dtype=torch.float32), exact)


@pytest.mark.parametrize("family", T5)
def test_a_decoder_that_is_deeper_than_its_encoder(tmp_path, family):
    fields = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "tie_word_embeddings": False}
    fields |= {"num_layers": 1, "num_decoder_layers": 3, "decoder_start_token_id": 0}
    [name] = [head.official for head in FAMILIES[family].heads if head.official.endswith("ConditionalGeneration")]
    theirs = random_model(family, name, fields)
    theirs.save_pretrained(tmp_path)
    assert_same_numbers(from_official(tmp_path), theirs)


@property_test(8, 150, case=official_models())
def test_ours_is_the_official_implementation_and_converts_there_and_back_exactly(case):
    """Logits and greedy text in float32, whatever dtype the weights are stored in; bytes, dtypes and keys."""
    family = case[0]
    with tempfile.TemporaryDirectory() as folder:
        src, dst, back, again = (Path(folder) / part for part in ("src", "dst", "back", "again"))
        theirs = random_model(*case)
        theirs.save_pretrained(src)
        exact = in_float32(type(theirs), src)
        report = convert(src, dst)
        assert report.parity.passed
        assert report.parity.measured
        assert_same_numbers(from_official(src, dtype=torch.float32), exact)
        convert(dst, back, to_official=True, verify=False)
        assert stored(back) == stored(src)
        if family == "marian":  # its stored positions are computed: only what ours remembers says that they were there
            return
        (dst / "conversion.json").unlink()
        convert(dst, again, to_official=True, family=family, verify=False)
        assert stored(again) == stored(src)
        convert(again, Path(folder) / "ours", verify=False)
        assert stored(Path(folder) / "ours") == stored(dst)
