"""The decoders of BART, mBART and Marian alone, both ways."""

import pytest
import torch
from pairs import assert_close

import blockformer
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.families.registry import FAMILIES, family_for
from blockformer.conversion.storage.unused_tensors import UNUSED_FILE

from .oracles import assert_verified, edit_config, edit_tensors, official_folder, stored, there_and_back
from .outputs import assert_same_outputs
from .test_bart_families import BARTS, VOCAB

TABLE = "model.decoder.embed_positions.weight"


def decoder_folder(folder, family, **settings):
    own = {"decoder_layers": 2, "decoder_ffn_dim": 64, "init_std": 0.15}
    return official_folder(folder, family, "ForCausalLM", **own, **settings)


def assert_same_with_and_without_an_encoder(ours, theirs):
    """With an encoder's states and without, the second row padded on the right.

    Without a cache: the official one has as many layers as the encoder that is not there.
    """
    ids, mask = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(3)), torch.ones(2, 20).long()
    mask[1, 14:] = 0
    states = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(4))
    for more in ({}, {"encoder_hidden_states": states}):
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False, **more}
        assert_same_outputs(ours, theirs, given, spread=0.3)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, marks=[] if (family == "bart") == tied else pytest.mark.exhaustive)
        for family in BARTS
        for tied in (True, False)
    ],
)
def test_there_and_back(tmp_path, family, tied):
    src, dst, fresh = (tmp_path / name for name in ("src", "dst", "fresh"))
    model = decoder_folder(src, family, tie_word_embeddings=tied)
    report = there_and_back(tmp_path)
    assert report.family == f"{family}-decoder"
    ours = blockformer.BlockformerDecoderForCausalLM.from_pretrained(dst)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert_same_with_and_without_an_encoder(ours, model)
    prompt = {"inputs": torch.arange(5, 9)[None], "max_new_tokens": 8, "do_sample": False}
    texts = [ours.generate(**prompt), model.generate(**prompt, use_cache=False)]
    assert torch.equal(*texts)

    (dst / "conversion.json").unlink()
    assert family_for(ours.config).name == f"{family}-decoder"
    assert_verified(convert(dst, fresh, to_official=True, verify="quick"))
    computed = {TABLE} if family == "marian" else set()
    assert (dst / UNUSED_FILE).exists() == bool(computed)
    assert stored(fresh) == {name: tensor for name, tensor in stored(src).items() if name not in computed}
    again = type(model).from_pretrained(fresh)
    assert_same_with_and_without_an_encoder(ours, again)


@pytest.mark.parametrize("family", BARTS)
def test_a_decoder_in_memory_learns_as_the_official_one(tmp_path, family):
    model = decoder_folder(tmp_path, family)
    ours = from_official(tmp_path, family=f"{family}-decoder")
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(3))
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)  # the official class does not shift
    losses = ours(ids, labels=ids).loss, model(ids, labels=shifted, use_cache=False).loss
    assert_close(*losses)


def test_what_does_not_fit_is_named(tmp_path):
    decoder_folder(tmp_path / "src", "bart")
    edit_tensors(tmp_path / "src", **{"lm_head.weight": torch.randn(VOCAB, 48)})
    with pytest.raises(ConversionError, match="ties these tensors"):
        from_official(tmp_path / "src")
    edit_tensors(tmp_path / "src", **{"lm_head.weight": None})
    edit_config(tmp_path / "src", num_hidden_layers=..., decoder_layers=1)
    with pytest.raises(ConversionError, match=r"layers\.1"):
        from_official(tmp_path / "src")
    decoder_folder(tmp_path / "own", "marian")
    edit_config(tmp_path / "own", decoder_vocab_size=71)
    with pytest.raises(ConversionError, match="decoder_vocab_size is 71 and vocab_size is 97"):
        from_official(tmp_path / "own")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"add_cross_attention": False}, "add_cross_attention must be True"),
        ({"position_offset": 0}, "position_offset must be 2"),
        ({"lm_head_bias": True}, "lm_head_bias must be False"),
        ({"embedding_scale": 3.0}, "embedding_scale must be 6.9"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
    ],
)
def test_a_config_that_it_cannot_express_is_named(tmp_path, changes, named):
    decoder_folder(tmp_path, "bart")
    settings = from_official(tmp_path).config.to_dict()
    config = blockformer.BlockformerDecoderConfig(**{**settings, **changes})
    with pytest.raises(ConversionError, match=named):
        FAMILIES["bart-decoder"].config_to(config)
