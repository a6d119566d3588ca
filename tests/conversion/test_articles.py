"""State dicts of the articles' code, against plain modules by their formulas."""

import json
import os

import pytest
import torch
from article_modules import GPT, LATER, EncoderDecoder, Transformer, own_norm, sinusoid
from pairs import assert_close
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM, GPT2LMHeadModel

import blockformer
from blockformer import preset
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.families.registry import ARTICLES, FAMILIES, family_for, family_of

from .oracles import fingerprint, stored

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*(its norms divide by std|\((tie_word|share)_embeddings\)):UserWarning"  # notes of `from_official`
)

GPT_CONFIG = {
    "vocab_size": 61,
    "max_seq_length": 24,
    "embedding_dim": 32,
    "n_heads": 4,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": False,
}
PAIR_CONFIG = {
    "d_model": 32,
    "d_ff": 48,
    "h": 4,
    "N": 2,
    "dropout": 0.1,
    "src_vocab_size": 53,
    "tgt_vocab_size": 61,
    "src_seq_len": 20,
    "tgt_seq_len": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHOLE_CONFIG = {
    "vocab_size": 61,
    "block_size": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "dropout": 0.1,
    "bias": False,
    "norms": "formula",
    "pad_token_id": 0,
    "decoder_start_token_id": 3,
}
MODELS = {
    "article-gpt": (GPT, GPT_CONFIG),
    "article-encoder-decoder": (EncoderDecoder, PAIR_CONFIG),
    "article-transformer": (Transformer, WHOLE_CONFIG),
}


def write(folder, value, config, name="weights.pt"):
    """A weight file and the file of its settings."""
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / name
    save_file(value, path) if name.endswith("safetensors") else torch.save(value, path)
    (folder / "cfg.json").write_text(json.dumps(config))
    return path, folder / "cfg.json"


def load(folder, family, module, config):
    path, settings = write(folder, module.state_dict(), config)
    return from_official(path, family=family, config=settings)


def refused(folder, family, state, config, message):
    """Neither way of conversion takes it, and nothing is left behind."""
    path, settings = write(folder / "in", state, config)
    before = fingerprint(folder)
    with pytest.raises(ConversionError, match=message) as caught:
        convert(path, folder / "dst", family=family, config=settings)
    with pytest.raises(ConversionError, match=message):
        from_official(path, family=family, config=settings)
    assert fingerprint(folder) == before
    assert sorted(os.listdir(folder)) == ["in"]
    return str(caught.value)


def tokens(size, *shape):
    return torch.randint(3, size, shape, generator=torch.Generator().manual_seed(1))


def padding(*lengths):
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


@torch.no_grad()
def compare_pair(ours, module, source_size, target_size):
    """Logits with padding on both sides, and without."""
    source, target = tokens(source_size, 3, 11), tokens(target_size, 3, 9)
    mask, target_mask = padding(11, 7, 2), padding(9, 4, 8)
    assert_close(ours(source, decoder_input_ids=target).logits, module(source, target))
    got = ours(source, mask, target, target_mask).logits
    want = module(source, target, mask, target_mask)
    assert_close(got[target_mask.bool()], want[target_mask.bool()])
    assert (module(source, target) - want).abs().max() > 0.1  # the masks matter


# The same numbers.

SPELLINGS = [
    ("W_query", "W_key", "W_value", "out_proj"),
    ("W_q", "W_k", "W_v", "W_o"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "proj"),
    ("W_q", "W_k", "W_v", "output"),
    ("w_q", "w_k", "w_v", "w_o"),
    ("query", "key", "value", "output"),
]


@pytest.mark.portable
@pytest.mark.parametrize("names", SPELLINGS, ids="-".join)
@pytest.mark.parametrize(("qkv_bias", "out_bias"), [(False, True), (True, False)])
def test_the_gpt_of_the_second_article(tmp_path, names, qkv_bias, out_bias):
    config = {**GPT_CONFIG, "qkv_bias": qkv_bias}
    module = GPT(config, names, out_bias)
    ours = load(tmp_path, "article-gpt", module, config)
    assert isinstance(ours, blockformer.BlockformerDecoderForCausalLM)
    assert (ours.config.attention_bias, ours.config.attention_output_bias) == (qkv_bias, out_bias)
    with torch.no_grad():
        rows = tokens(61, 3, 24)
        assert_close(ours(rows).logits, module(rows))


@pytest.mark.parametrize("form", [*LATER, None])
@pytest.mark.parametrize("name", ["mask", "mask_matrix"])
def test_a_causal_mask_among_the_tensors_is_left_out(tmp_path, form, name):
    module = GPT(GPT_CONFIG, mask=form)
    state = {key.replace("mha.mask", f"mha.{name}"): tensor for key, tensor in module.state_dict().items()}
    assert any(key.endswith(name) for key in state) == (form is not None)
    path, settings = write(tmp_path, state, GPT_CONFIG)
    ours = from_official(path, family="article-gpt", config=settings)
    rows = tokens(61, 2, 5)
    with torch.no_grad():
        assert_close(ours(rows).logits, module(rows))


@pytest.mark.portable
@pytest.mark.parametrize("alpha", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_bias", "mlp_bias", "head_bias"), [(False, True, True), (True, False, False)])
def test_the_encoder_decoder_of_the_third_article(tmp_path, alpha, bias, out_bias, mlp_bias, head_bias):
    module = EncoderDecoder(PAIR_CONFIG, alpha, bias, out_bias, mlp_bias, head_bias)
    ours = load(tmp_path, "article-encoder-decoder", module, PAIR_CONFIG)
    assert isinstance(ours, blockformer.BlockformerEncoderDecoderForConditionalGeneration)
    compare_pair(ours, module, 53, 61)


def test_a_norm_without_bias_in_the_third_article(tmp_path):
    module = EncoderDecoder(PAIR_CONFIG, alpha=False, norm_bias=False)
    compare_pair(load(tmp_path, "article-encoder-decoder", module, PAIR_CONFIG), module, 53, 61)


def test_the_norm_of_the_third_article_becomes_a_layer_norm(tmp_path):
    """y = alpha (x - mean) / (s + eps) + bias with the unbiased s: the error of the fold, on states of all sizes."""
    module = EncoderDecoder(PAIR_CONFIG)
    ours = load(tmp_path, "article-encoder-decoder", module, PAIR_CONFIG)
    assert ours.config.norm_eps == pytest.approx(1e-12)
    norm, ours = (
        module.decoder.layers[1].residual_connections[1].norm,
        ours.model.decoder.layers[1].cross_attn_pre_norm,
    )
    assert torch.equal(ours.weight, (norm.alpha.double() * (31 / 32) ** 0.5).float())
    with torch.no_grad():
        for scale in (1000.0, 1.0, 0.3):
            states = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)) * scale
            assert_close(ours(states), norm(states))


@pytest.mark.parametrize("alpha", [True, False])
def test_the_small_number_of_the_norm_can_be_named(tmp_path, alpha):
    module = EncoderDecoder(PAIR_CONFIG, alpha=alpha)
    ours = load(tmp_path, "article-encoder-decoder", module, {**PAIR_CONFIG, "eps": 1e-3})
    assert ours.config.norm_eps == pytest.approx(1e-6 if alpha else 1e-3)
    ours = load(tmp_path, "article-encoder-decoder", module, PAIR_CONFIG)
    assert ours.config.norm_eps == pytest.approx(1e-12 if alpha else 1e-5)


@pytest.mark.portable
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("buffer", [False, True])
def test_the_transformer_of_the_fourth_article(tmp_path, bias, buffer):
    config = {**WHOLE_CONFIG, "bias": bias}
    module = Transformer(config, buffer)
    ours = load(tmp_path, "article-transformer", module, config)
    assert isinstance(ours, blockformer.BlockformerEncoderDecoderForConditionalGeneration)
    assert ours.model.encoder.embed_tokens.weight is ours.model.decoder.embed_tokens.weight
    compare_pair(ours, module, 61, 61)


@pytest.mark.parametrize("bias", [False, True])
def test_the_transformer_of_the_fourth_article_as_its_code_has_the_norms(tmp_path, bias):
    config = {**WHOLE_CONFIG, "bias": bias, "norms": "printed"}
    module = Transformer(config, printed=True)
    ours = load(tmp_path, "article-transformer", module, config)
    compare_pair(ours, module, 61, 61)
    ids = tokens(61, 2, 9)
    with torch.no_grad():
        by_formula = load(tmp_path, "article-transformer", module, {**config, "norms": "formula"})
        assert (by_formula(ids, decoder_input_ids=ids).logits - module(ids, ids)).abs().max() > 0.1


def learnt(printed):
    """A model that has learnt to write the next token of a text, and the text."""
    config = {name: value for name, value in WHOLE_CONFIG.items() if name != "norms"}
    module, ids = Transformer(config, printed=printed).train(), tokens(61, 1, 21)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(25):
        loss = torch.nn.functional.cross_entropy(module(ids[:, :-1], ids[:, :-1])[0], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module.eval(), config, ids[0].tolist()


@pytest.mark.parametrize("printed", [True, False])
def test_a_sample_tells_where_the_norms_stand(tmp_path, printed):
    module, config, text = learnt(printed)
    name = "printed" if printed else "formula"
    state = module.state_dict()
    refused(tmp_path / "untold", "article-transformer", state, config, 'add "norms": "printed" to the settings')
    config["sample"] = {"input": text[:-1], "targets": [-1, *text[2:]]}
    path, settings = write(tmp_path / "in", {f"module.{key}": value for key, value in state.items()}, config)
    report = convert(path, tmp_path / "dst", family="article-transformer", config=settings)
    assert any(f"taken as {name}" in note and "loss of the sample" in note for note in report.notes)
    ours = blockformer.BlockformerEncoderDecoderForConditionalGeneration.from_pretrained(tmp_path / "dst")
    assert (ours.config.norm_placement == "input_pre") == printed
    compare_pair(ours, module, 61, 61)
    # As the article feeds it: a matrix of rows.
    batch = {side: [row, row] for side, row in config["sample"].items()}
    path, settings = write(tmp_path / "rows", state, {**config, "sample": batch})
    report = convert(path, tmp_path / "again", family="article-transformer", config=settings)
    assert any(f"taken as {name}" in note for note in report.notes)


def test_a_sample_that_does_not_tell_is_refused(tmp_path):
    """Of weights that have learnt nothing, or of tokens that are none."""
    config = {name: value for name, value in WHOLE_CONFIG.items() if name != "norms"}
    state = Transformer(config).state_dict()
    state["lm_head.weight"] = torch.zeros_like(state["lm_head.weight"])
    ids = tokens(61, 21).tolist()
    nothing = {**config, "sample": {"input": ids[:-1], "targets": ids[1:]}}
    refused(tmp_path / "nothing", "article-transformer", state, nothing, 'does not show where the norms are .*"norms"')
    outside = {**config, "sample": {"input": [61], "targets": [1]}}
    refused(tmp_path / "outside", "article-transformer", state, outside, "the sample cannot be run")
    uneven = {**config, "sample": {"input": [1, 2], "targets": [1]}}
    refused(tmp_path / "uneven", "article-transformer", state, uneven, "'sample' must be")
    for rows in ([[1, 2], [3]], [[1, 2], 3], [[1, 2], [3.0, 4]], [[]], [[[1, 2]]]):
        mixed = {**config, "sample": {"input": rows, "targets": rows}}
        refused(tmp_path / f"rows {rows}", "article-transformer", state, mixed, "'sample' must be")


@pytest.mark.parametrize("names", [("query", "key", "value", "output"), ("W_q", "W_k", "W_v", "W_o")])
def test_the_third_article_with_the_spellings_of_the_others(tmp_path, names):
    module = EncoderDecoder(PAIR_CONFIG)
    state = module.state_dict()
    for old, new in zip(("w_q", "w_k", "w_v", "w_o"), names, strict=True):
        state = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in state.items()}
    path, settings = write(tmp_path, state, PAIR_CONFIG)
    compare_pair(from_official(path, family="article-encoder-decoder", config=settings), module, 53, 61)


SIZE_FIELDS = "vocab_size decoder_vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
SIZE_FIELDS += "max_position_embeddings pad_token_id bos_token_id eos_token_id decoder_start_token_id norm_eps"


@pytest.mark.parametrize("family", MODELS)
def test_a_preset_is_the_config_of_a_converted_model_of_its_sizes(tmp_path, family):
    make, config = MODELS[family]
    ours = load(tmp_path, family, make(config), config).config
    made = preset(family, **{name: getattr(ours, name) for name in SIZE_FIELDS.split() if hasattr(ours, name)})
    meant = {**ours.to_dict(), "architectures": None, "dtype": None, "_name_or_path": ""}
    assert {name: value for name, value in made.to_dict().items() if meant[name] != value} == {}


# Greedy text.


@torch.no_grad()
def test_generate_continues_as_a_plain_loop_does(tmp_path):
    config = {**GPT_CONFIG, "qkv_bias": True}
    module = GPT(config)
    text = rows = tokens(61, 3, 6)
    for _ in range(18):
        text = torch.cat([text, module(text)[:, -1:].argmax(-1)], dim=1)
    ours = load(tmp_path, "article-gpt", module, config)
    assert torch.equal(ours.generate(rows, max_new_tokens=18, do_sample=False), text)
    assert len({tuple(row[6:].tolist()) for row in text}) == 3


@pytest.mark.parametrize("family", ["article-encoder-decoder", "article-transformer"])
@torch.no_grad()
def test_generate_translates_as_a_plain_loop_does(tmp_path, family):
    """From the start token that the config names, to the end token where it names one."""
    make, config = MODELS[family]
    module = make(config)
    source, mask = tokens(53, 3, 11), padding(11, 7, 2)
    start, end = config.get("bos_token_id", 3), config.get("eos_token_id")
    text = torch.full((3, 1), start)
    for _ in range(12):
        text = torch.cat([text, module(source, text, mask)[:, -1:].argmax(-1)], dim=1)
    if end is not None:  # a token that the model does write becomes the end
        end = int(text[0, 5])
        config = {**config, "eos_token_id": end}
        ended = (text == end).cumsum(-1) - (text == end).long() > 0
        text = text.masked_fill(ended, config["pad_token_id"])
        text = text[:, : int((text != config["pad_token_id"]).any(0).sum())]
        assert ended.any()
    path, settings = write(tmp_path, module.state_dict(), config)
    convert(path, tmp_path / "dst", family=family, config=settings)
    ours = blockformer.BlockformerEncoderDecoderForConditionalGeneration.from_pretrained(tmp_path / "dst")
    got = ours.generate(source, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, text)


def written_by_the_article(module, text, steps, temperature=1.0, top_k=None, greedy=False):
    """Its loop by its facts: both sides read the last `block_size` tokens, one token is drawn from the last logits."""
    for _ in range(steps):
        seen = text[:, -WHOLE_CONFIG["block_size"] :]
        logits = module(seen, seen)[:, -1] / temperature
        if top_k is not None:
            logits[logits < logits.sort(descending=True).values[:, [top_k - 1]]] = -torch.inf
        probabilities = logits.softmax(-1)
        token = probabilities.argmax(-1, keepdim=True) if greedy else torch.multinomial(probabilities, 1)
        text = torch.cat((text, token), dim=1)
    return text


@pytest.mark.versions
@pytest.mark.parametrize("printed", [True, False])
@torch.no_grad()
def test_the_fourth_articles_generate_writes_its_text(tmp_path, printed):
    """From the repo alone or with the package, for the same seed, longer than the context too."""
    config = {**WHOLE_CONFIG, "norms": "printed" if printed else "formula"}
    module, ids, repo = Transformer(config, printed=printed), tokens(61, 2, 15), tmp_path / "dst"
    path, settings = write(tmp_path, module.state_dict(), config)
    convert(path, repo, family="article-transformer", config=settings)
    ways = {"plain": {}, "cooler": {"temperature": 0.7}, "of three": {"top_k": 3, "temperature": 1.3}}
    packaged = blockformer.BlockformerEncoderDecoderForConditionalGeneration.from_pretrained(repo)
    alone = AutoModelForSeq2SeqLM.from_pretrained(repo, trust_remote_code=True)
    for way in ways.values():
        torch.manual_seed(5)
        want = written_by_the_article(module, ids, 14, **way)
        torch.manual_seed(5)
        own = {"custom_generate": str(repo), "trust_remote_code": True}
        assert torch.equal(packaged.generate(ids, max_new_tokens=14, **own, **way), want)
        for named in ({}, own):  # it has this loop already; naming it once more changes nothing
            torch.manual_seed(5)
            assert torch.equal(alone.generate(ids, max_new_tokens=14, **named, **way), want)
    want = written_by_the_article(module, ids, 14, greedy=True)
    assert torch.equal(alone.generate(input_ids=ids, max_new_tokens=14, do_sample=False), want)
    with pytest.raises(ValueError, match="does not take num_beams"):
        alone.generate(ids, num_beams=2)


@torch.no_grad()
def test_a_padded_batch_is_learnt_and_written_as_the_third_articles_loop_does(tmp_path):
    """Its loss counts real targets alone; its loop ends when all rows write the end token in one step."""
    module, pad, start = EncoderDecoder(PAIR_CONFIG), 0, 1
    source, target = tokens(53, 3, 11), tokens(61, 3, 9)
    mask, target_mask = padding(11, 7, 2), padding(9, 4, 8)
    source, target = source.masked_fill(mask == 0, pad), target.masked_fill(target_mask == 0, pad)
    shifted = torch.cat((torch.full((3, 1), start), target[:, :-1]), dim=1)
    shown = torch.cat((torch.ones(3, 1, dtype=torch.long), target_mask[:, :-1]), dim=1)
    logits = module(source, shifted, mask, shown)
    want = torch.nn.functional.cross_entropy(logits[target_mask.bool()], target[target_mask.bool()])
    text = torch.full((3, 1), start)
    for _ in range(12):
        text = torch.cat([text, module(source, text, mask)[:, -1:].argmax(-1)], dim=1)
    end = int(text[1, 4])
    path, settings = write(tmp_path, module.state_dict(), {**PAIR_CONFIG, "eos_token_id": end})
    ours = from_official(path, family="article-encoder-decoder", config=settings)
    labels = target.masked_fill(target == pad, -100)
    assert_close(ours(source, attention_mask=(source != pad).long(), labels=labels).loss, want)
    got = ours.generate(source, attention_mask=(source != pad).long(), max_new_tokens=12, do_sample=False)
    for row, whole in zip(got.tolist(), text.tolist(), strict=True):
        stop = whole.index(end) + 1 if end in whole else len(whole)
        assert row[:stop] == whole[:stop]
        assert not any(row[stop:])


def test_the_loss_of_the_fourth_article_leaves_out_targets_of_minus_1(tmp_path):
    module, ids, targets = Transformer(WHOLE_CONFIG), tokens(61, 2, 9), tokens(61, 2, 9).roll(1, 0)
    targets[0, 3:] = -1
    ours = load(tmp_path, "article-transformer", module, WHOLE_CONFIG)
    want = torch.nn.functional.cross_entropy(module(ids, ids).flatten(0, 1), targets.flatten(), ignore_index=-1)
    labels = targets.masked_fill(targets == -1, -100)
    assert_close(ours(ids, decoder_input_ids=ids, labels=labels).loss, want)
    with pytest.raises(ValueError, match=r"labels holds -1: .* or -100"):
        ours(ids, decoder_input_ids=ids, labels=targets)


def test_conversion_is_there_as_the_page_writes_it(tmp_path, processes):
    path, settings = write(tmp_path, GPT(GPT_CONFIG).state_dict(), GPT_CONFIG)
    call = "blockformer.conversion.convert(*sys.argv[1:3], family='article-gpt', config=sys.argv[3])"
    done = processes.run(
        f"import blockformer; {call}", path, tmp_path / "dst", settings, folder=tmp_path, elsewhere=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dst/config.json").exists()


# The settings beyond what logits show.


def test_the_settings_say_what_the_articles_say(tmp_path):
    gpt, pair, whole = (
        load(tmp_path / name, name, make(config), config).config for name, (make, config) in MODELS.items()
    )
    assert (gpt.hidden_act, gpt.intermediate_size, gpt.max_position_embeddings) == ("gelu_new", 128, 24)
    assert (gpt.hidden_dropout, gpt.attention_dropout, gpt.activation_dropout) == (0.1, 0.1, 0.0)
    assert (pair.hidden_dropout, pair.attention_dropout, pair.activation_dropout) == (0.1, 0.1, 0.1)
    assert (whole.hidden_dropout, whole.attention_dropout, whole.activation_dropout) == (0.1, 0.1, 0.0)
    assert (pair.pad_token_id, pair.bos_token_id, pair.eos_token_id, pair.decoder_start_token_id) == (0, 1, 2, 1)
    assert (whole.pad_token_id, whole.bos_token_id, whole.decoder_start_token_id) == (0, None, 3)
    assert (pair.max_position_embeddings, whole.max_position_embeddings) == (24, 24)
    assert (pair.vocab_size, pair.decoder_vocab_size) == (53, 61)
    for config in (gpt, pair, whole):
        assert not config.tie_word_embeddings
    both = {**PAIR_CONFIG, "decoder_start_token_id": 5}
    assert (
        load(tmp_path / "both", "article-encoder-decoder", EncoderDecoder(both), both).config.decoder_start_token_id
        == 5
    )


# The repo, the card, the report.


@pytest.mark.parametrize("family", MODELS)
def test_a_converted_article_is_a_repo_like_any_other(tmp_path, family):
    make, config = MODELS[family]
    module = make(config)
    path, settings = write(tmp_path / "in", module.state_dict(), config)
    before = fingerprint(tmp_path / "in")
    report = convert(path, tmp_path / "dst", family=family, config=settings)
    assert fingerprint(tmp_path / "in") == before
    assert report.source == str(path)
    assert report.family == family
    why = "not compared with the official model: "
    assert any(note.startswith(f"not verified: {why}") for note in report.notes)
    card = (tmp_path / "dst/README.md").read_text()
    assert f"**Not verified:** {why}" in card
    assert "the file `weights.pt`" in card
    assert (tmp_path / "dst/configuration_blockformer.py").exists()
    assert not (tmp_path / "dst/conversion.json").exists()
    assert not (tmp_path / "dst/conversion").exists()
    loaded = from_official(path, family=family, config=settings)
    again = type(loaded).from_pretrained(tmp_path / "dst")
    assert again.state_dict().keys() == loaded.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), loaded.state_dict().values(), strict=True)
    )


@torch.no_grad()
def test_a_gpt_with_all_its_biases_goes_on_to_the_layout_of_gpt2(tmp_path):
    config = {**GPT_CONFIG, "qkv_bias": True}
    module = GPT(config)
    path, settings = write(tmp_path, module.state_dict(), config)
    convert(path, tmp_path / "ours", family="article-gpt", config=settings)
    report = convert(tmp_path / "ours", tmp_path / "official", to_official=True)
    assert report.family == "gpt2"
    rows = tokens(61, 2, 9)
    assert_close(GPT2LMHeadModel.from_pretrained(tmp_path / "official")(rows).logits, module(rows))


@pytest.mark.parametrize("out_bias", [True, False])
@torch.no_grad()
def test_a_gpt_without_biases_goes_on_to_gpt2_with_zeros_which_is_said(tmp_path, out_bias):
    module = GPT(GPT_CONFIG, out_bias=out_bias)
    path, settings = write(tmp_path, module.state_dict(), GPT_CONFIG)
    convert(path, tmp_path / "ours", family="article-gpt", config=settings)
    report = convert(tmp_path / "ours", tmp_path / "official", to_official=True, family="gpt2")
    absent = "attention_bias" if out_bias else "attention_bias, attention_output_bias"
    assert f"biases of zero are written where the model has none ({absent})" in report.notes
    official = GPT2LMHeadModel.from_pretrained(tmp_path / "official")
    assert not official.transformer.h[1].attn.c_attn.bias.any()
    rows = tokens(61, 2, 9)
    assert_close(official(rows).logits, module(rows))
    assert convert(tmp_path / "ours", tmp_path / "again", to_official=True).family == "gpt2"


def test_the_weights_are_those_of_the_file_bit_for_bit(tmp_path):
    module = GPT(GPT_CONFIG).bfloat16()
    path, settings = write(tmp_path, module.state_dict(), GPT_CONFIG)
    convert(path, tmp_path / "dst", family="article-gpt", config=settings)
    found = stored(tmp_path / "dst")
    assert {dtype for dtype, _, _ in found.values()} == {"BF16"}
    ours = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst", dtype="auto")
    assert torch.equal(ours.model.layers[1].self_attn.v_proj.weight, module.transformer_blocks[1].mha.W_value.weight)
    assert torch.equal(ours.lm_head.weight, module.out_head.weight)


def test_a_cast_rounds_the_folded_norm_once(tmp_path):
    module = EncoderDecoder(PAIR_CONFIG)
    path, settings = write(tmp_path, module.state_dict(), PAIR_CONFIG)
    ours = from_official(path, "bfloat16", "article-encoder-decoder", settings)
    wanted = module.encoder.norm.alpha.double() * (31 / 32) ** 0.5
    assert torch.equal(ours.model.encoder.norm.weight, wanted.bfloat16())


# Files and wrappers.

WRAPPED = {
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model": lambda state: {
        "model": state,
        "optimizer": {"state": {0: {"step": torch.ones(1)}}},
        "loss": torch.ones(1),
    },
    "model_state_dict": lambda state: {"epoch": 1, "model_state_dict": state, "optimizer_state_dict": {}},
    "module.": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "_orig_mod.": lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
    "both": lambda state: {"model": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}},
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("family", MODELS)
def test_wrappers_are_taken_off(tmp_path, wrapper, family):
    make, config = MODELS[family]
    state = make(config).state_dict()
    plain = load(tmp_path, family, make(config), config).state_dict()
    path, settings = write(tmp_path, WRAPPED[wrapper](state), config)
    unwrapped = from_official(path, family=family, config=settings).state_dict()
    assert all(torch.equal(unwrapped[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin", "w.safetensors"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_kinds_of_files(tmp_path, name, prefix):
    state = {prefix + key: tensor for key, tensor in GPT(GPT_CONFIG).state_dict().items()}
    path, settings = write(tmp_path, state, GPT_CONFIG, name)
    convert(path, tmp_path / "dst", family="article-gpt", config=settings)
    assert len(stored(tmp_path / "dst")) == 4 + 1 + 2 * (3 + 2 + 4 + 4)


def test_what_is_ambiguous_is_refused_by_name(tmp_path):
    state = GPT(GPT_CONFIG).state_dict()
    name = "out_head.weight"
    both = {"state_dict": state, "model": state}
    refused(tmp_path, "article-gpt", both, GPT_CONFIG, "'state_dict' and also 'model': which is the model?")
    beside = {"model": state, name: state[name]}
    refused(tmp_path, "article-gpt", beside, GPT_CONFIG, f"'model' and also '{name}': which is the model?")
    some = {f"module.{key}" if key != name else key: tensor for key, tensor in state.items()}
    refused(tmp_path, "article-gpt", some, GPT_CONFIG, rf"begin with 'module.' and these do not[\s\S]*'{name}'")
    refused(tmp_path, "article-gpt", {"net": state}, GPT_CONFIG, "'net': is a dict")


def test_a_folder_unwraps_state_dict_alone(tmp_path):
    write(tmp_path / "src", {"model": {"a": torch.zeros(1)}}, {}, "pytorch_model.bin")
    (tmp_path / "src/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConversionError, match="'model': is a dict"):
        convert(tmp_path / "src", tmp_path / "dst")


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("run-by-a-pickle",))


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.bin"])
def test_a_pickle_runs_nothing(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, settings = write(tmp_path / "in", {**GPT(GPT_CONFIG).state_dict(), "x": Payload()}, GPT_CONFIG, name)
    with pytest.raises(ConversionError, match="nothing of it was run"):
        convert(path, tmp_path / "dst", family="article-gpt", config=settings)
    assert os.listdir(tmp_path) == ["in"]


# Which source, which options.


def test_options_that_do_not_belong_together(tmp_path):
    path, settings = write(tmp_path / "in", GPT(GPT_CONFIG).state_dict(), GPT_CONFIG)
    dst = tmp_path / "dst"

    def message(source, **options):
        with pytest.raises(ConversionError) as caught:
            convert(source, dst, **options)
        assert not dst.exists()
        return str(caught.value)

    assert "'article-gpt' needs config (--config)" in message(path, family="article-gpt")
    assert "give config (--config) and family (--family), one of article-gpt, " in message(path)
    assert "config (--config) is only for an article's weight file, with family (--family) article-gpt" in message(
        path, config=settings
    )
    assert "config (--config) is only for an article's weight file" in message(
        path.parent, family="gpt2", config=settings
    )
    assert "not a folder" in message(path, family="gpt2")
    assert "a folder; for this family name the weight file" in message(
        path.parent, family="article-gpt", config=settings
    )
    assert "no such file" in message(tmp_path / "nowhere.pt", family="article-gpt", config=settings)
    assert "end in .bin, .pt, .pth, .ckpt, .safetensors" in message(settings, family="article-gpt", config=settings)
    assert "cannot be opened: No such file" in message(path, family="article-gpt", config=tmp_path / "no.json")
    assert "read but not written" in message(path, family="article-gpt", config=settings, to_official=True)
    assert "no family is called 'article-gtp'" in message(path, family="article-gtp", config=settings)
    with pytest.raises(ConversionError, match=r"needs config \(--config\)"):
        from_official(path, family="article-gpt")


def test_a_target_that_holds_a_source_is_refused(tmp_path):
    path, settings = write(tmp_path / "in", GPT(GPT_CONFIG).state_dict(), GPT_CONFIG)
    (tmp_path / "settings").mkdir()
    settings.rename(tmp_path / "settings/config.json")
    for target in ("in", "settings"):
        before = fingerprint(tmp_path)
        with pytest.raises(ConversionError, match="holds the source"):
            convert(path, tmp_path / target, family="article-gpt", config=tmp_path / "settings/config.json", force=True)
        assert fingerprint(tmp_path) == before


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path):
    for index in (0, 1):
        files = write(tmp_path / "in", GPT(GPT_CONFIG).state_dict(), GPT_CONFIG)

        def touch(step, done, total, file=files[index]):
            if done == total > 0:
                os.utime(file, (1, 1))

        with pytest.raises(ConversionError, match=f"{files[index].name}: changed while it was read"):
            convert(files[0], tmp_path / "dst", family="article-gpt", config=files[1], progress=touch)
        assert not (tmp_path / "dst").exists()


def test_articles_are_taken_by_name_alone(tmp_path):
    assert not set(ARTICLES) & set(FAMILIES)
    with pytest.raises(ConversionError, match="not supported"):
        family_of({"model_type": "article-gpt"})
    for name, (make, config) in MODELS.items():
        ours = load(tmp_path / name, name, make(config), config).config
        assert ARTICLES[name].differences(ours)
        with pytest.raises(ConversionError, match="read but not written"):
            ARTICLES[name].config_to(ours)
        if name != "article-gpt":  # sinusoids without Marian's order: no official family has them
            with pytest.raises(ConversionError, match=r"the nearest, '(?!article)"):
                family_for(ours)


# Wrong settings.


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("article-gpt", {"dropout": 0.1}, "'dropout' is not known"),
        ("article-gpt", {"n_layers": ...}, "'n_layers' is missing: a positive integer"),
        ("article-gpt", {"n_layers": True}, "'n_layers' must be a positive integer, not 'True'"),
        ("article-gpt", {"n_layers": 0}, "'n_layers' must be a positive integer, not '0'"),
        ("article-gpt", {"n_layers": "2"}, "'n_layers' must be a positive integer, not '2'"),
        ("article-gpt", {"n_layers": 2.0}, "'n_layers' must be a positive integer"),
        ("article-gpt", {"drop_rate": 1.5}, "'drop_rate' must be a number from 0 to 1"),
        ("article-gpt", {"drop_rate": False}, "'drop_rate' must be a number from 0 to 1"),
        ("article-gpt", {"qkv_bias": 0}, "'qkv_bias' must be true or false"),
        ("article-gpt", {"n_heads": 5}, r"embedding_dim \(32\) is not a multiple of n_heads \(5\)"),
        ("article-gpt", {"eos_token_id": -1}, "'eos_token_id' must be a token, 0 or more"),
        (
            "article-gpt",
            {"eos_token_id": 61},
            "the config of 'article-gpt': eos_token_id must be a token from 0 to 60, not 61",
        ),
        ("article-gpt", {"n_layers": 2**62}, "must be at most"),
        ("article-gpt", {"decoder_start_token_id": 1}, "'decoder_start_token_id' is not known"),
        ("article-encoder-decoder", {"eps": 0}, "'eps' must be a number above 0"),
        ("article-encoder-decoder", {"h": 3}, r"d_model \(32\) is not a multiple of h \(3\)"),
        ("article-encoder-decoder", {"decoder_start_token_id": 61}, "must be a token from 0 to 60, not 61"),
        ("article-encoder-decoder", {"auto_map": {}}, "'auto_map' is not known"),
        ("article-transformer", {"bias": "no"}, "'bias' must be true or false"),
        ("article-transformer", {"n_head": 3}, r"n_embd \(32\) is not a multiple of n_head \(3\)"),
    ],
)
def test_wrong_settings_are_named(tmp_path, family, change, message):
    make, config = MODELS[family]
    wrong = {name: value for name, value in {**config, **change}.items() if value is not ...}
    refused(tmp_path, family, make(config).state_dict(), wrong, message)


def test_all_that_is_wrong_with_the_settings_is_listed(tmp_path):
    wrong = {**GPT_CONFIG, "n_layers": 0, "dropout": 0.1}
    del wrong["n_heads"]
    text = refused(tmp_path, "article-gpt", GPT(GPT_CONFIG).state_dict(), wrong, "the config of 'article-gpt' has")
    assert all(f"'{name}'" in text for name in ("n_layers", "dropout", "n_heads"))


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', "[]", "", '{"a": '])
def test_settings_that_are_no_strict_json(tmp_path, text):
    path, settings = write(tmp_path, GPT(GPT_CONFIG).state_dict(), GPT_CONFIG)
    settings.write_text(text)
    with pytest.raises(ConversionError, match=r"cfg\.json: (not valid JSON|holds a list)"):
        from_official(path, family="article-gpt", config=settings)


# Settings and tensors that contradict each other.


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("article-gpt", {"n_layers": 3}, r"that nothing fills[\s\S]*layers\.2\."),
        ("article-gpt", {"n_layers": 1}, r"no place for[\s\S]*layers\.1\."),
        (
            "article-gpt",
            {"vocab_size": 60},
            r"token_embedding|embed_tokens.weight' is \[61, 32\], the model's is \[60, 32\]",
        ),
        ("article-gpt", {"qkv_bias": True}, r"that nothing fills[\s\S]*q_proj\.bias"),
        ("article-gpt", {"max_seq_length": 30}, r"mha\.mask' is \[24, 24\], but by the config it must be \[30, 30\]"),
        ("article-gpt", {"embedding_dim": 64}, "wrong shapes"),
        ("article-encoder-decoder", {"N": 1}, r"no place for[\s\S]*layers\.1\."),
        ("article-encoder-decoder", {"d_ff": 64}, r"wrong shapes[\s\S]*up_proj"),
        ("article-encoder-decoder", {"tgt_vocab_size": 53}, r"wrong shapes[\s\S]*decoder\.embed_tokens"),
        (
            "article-encoder-decoder",
            {"src_seq_len": 24},
            r"src_pos\.pe' is \[1, 20, 32\], but by the config it must be \[1, 24, 32\]",
        ),
        ("article-encoder-decoder", {"tgt_seq_len": 20}, r"tgt_pos\.pe' is \[1, 24, 32\]"),
        ("article-transformer", {"block_size": 20}, r"wpe\.pe' is \[1, 24, 32\], but by the config it must be"),
        ("article-transformer", {"bias": True}, r"that nothing fills[\s\S]*norm\.bias"),
        ("article-transformer", {"n_layer": 3}, r"that nothing fills[\s\S]*layers\.2\."),
    ],
)
def test_settings_that_contradict_the_tensors(tmp_path, family, change, message):
    make, config = MODELS[family]
    refused(tmp_path, family, make(config).state_dict(), {**config, **change}, message)


def test_a_bias_that_the_settings_deny(tmp_path):
    state = GPT({**GPT_CONFIG, "qkv_bias": True}).state_dict()
    refused(tmp_path, "article-gpt", state, GPT_CONFIG, r"no place for[\s\S]*mha\.W_query\.bias")


@pytest.mark.parametrize("family", MODELS)
def test_missing_surplus_and_misshapen_tensors_are_listed(tmp_path, family):
    make, config = MODELS[family]
    state = make(config).state_dict()
    gone, *_, bent = (name for name in state if name.endswith("weight") and "layers" in name)
    del state[gone]
    state[bent] = torch.zeros(3, 5)
    state["surprise.weight"] = torch.zeros(2)
    text = refused(tmp_path, family, state, config, "do not fit the model")
    assert "that no rule takes (1):\n  'surprise.weight'" in text
    assert "[3, 5]" in text
    assert "that nothing fills (1):" in text


def test_a_state_dict_of_another_model(tmp_path):
    state = Transformer(WHOLE_CONFIG).state_dict()
    for family in ("article-gpt", "article-encoder-decoder"):
        refused(
            tmp_path / family, family, state, MODELS[family][1], "the norms: found|no tensor name matches|do not fit"
        )


# Buffers that are not what they must be.


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(24, 24),
        torch.zeros(24, 24),
        torch.ones(24, 24).triu(),
        torch.ones(24, 24).tril(-1),
        torch.ones(24, 24).triu(2),
        torch.ones(24, 24).triu(1) * torch.nan,
        torch.ones(24, 24).triu(1)[:, :20],
        torch.ones(2, 24, 24).triu(1),
    ],
    ids=["ones", "zeros", "hides itself", "sees not itself", "next is seen", "nan", "not square", "two"],
)
def test_a_mask_that_is_not_causal(tmp_path, mask):
    state = {**GPT(GPT_CONFIG).state_dict(), "transformer_blocks.1.mha.mask": mask}
    text = refused(tmp_path, "article-gpt", state, GPT_CONFIG, "buffers that are not what 'article-gpt' computes with")
    assert "'transformer_blocks.1.mha.mask' is " in text


@pytest.mark.parametrize("place", ["encoder.layers.0.attn", "decoder.layers.1.m_attn", "decoder.layers.1.attn"])
def test_a_mask_of_the_fourth_article_that_is_not_causal(tmp_path, place):
    state = Transformer(WHOLE_CONFIG, buffer=True).state_dict()
    name = f"transformer.{place}.bias"
    state[name] = torch.ones_like(state[name])
    refused(tmp_path, "article-transformer", state, WHOLE_CONFIG, f"'module.{name}'|'{name}' is not a causal mask")


@pytest.mark.parametrize(
    "change",
    [
        lambda table: torch.cat([table[..., 0::2], table[..., 1::2]], dim=-1),
        lambda table: table + 0.01,
        torch.zeros_like,
        lambda table: table * torch.nan,
        lambda table: table.roll(1, dims=1),
        lambda table: (table * 0).long(),
    ],
    ids=["halves", "shifted", "zeros", "nan", "from 1", "integers"],
)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("article-encoder-decoder", "src_pos.pe"),
        ("article-encoder-decoder", "tgt_pos.pe"),
        ("article-transformer", "transformer.wpe.pe"),
    ],
)
def test_positions_that_are_not_the_sinusoid(tmp_path, change, family, name):
    make, config = MODELS[family]
    state = make(config).state_dict()
    state[name] = change(state[name])
    refused(tmp_path, family, state, config, f"'{name}' is not the table of sines and cosines")


def test_a_long_table_of_float32_is_a_sinusoid_and_none_is_fine(tmp_path):
    config = {**PAIR_CONFIG, "src_seq_len": 5000}
    exponent = torch.arange(0, 32, 2).float() * (-torch.log(torch.tensor(10000.0)) / 32)
    angles = torch.arange(5000).float()[:, None] * torch.exp(exponent)
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[None]
    state = EncoderDecoder(PAIR_CONFIG).state_dict()
    state["src_pos.pe"] = table
    path, settings = write(tmp_path, state, config)
    from_official(path, family="article-encoder-decoder", config=settings)
    half = {**state, "src_pos.pe": table.bfloat16(), "tgt_pos.pe": sinusoid(24, 32)[0].bfloat16()}
    from_official(*write(tmp_path, half, config)[:1], family="article-encoder-decoder", config=settings)
    del state["src_pos.pe"], state["tgt_pos.pe"]
    from_official(*write(tmp_path, state, config)[:1], family="article-encoder-decoder", config=settings)


# Spellings that are not known.


@pytest.mark.parametrize(
    "rename",
    [
        {"W_query": "to_q"},
        {"W_query": "q_proj"},
        {"out_proj": "final"},
        {"W_key": "W_query"},
    ],
    ids=str,
)
def test_an_unknown_spelling_lists_what_is_found_and_what_is_understood(tmp_path, rename):
    ((old, new),) = rename.items()
    state = {name.replace(old, new): tensor for name, tensor in GPT(GPT_CONFIG).state_dict().items()}
    text = refused(tmp_path, "article-gpt", state, GPT_CONFIG, "the projections of transformer_blocks.N.mha: found ")
    assert f"'{new}'" in text
    assert "W_query W_key W_value and an output" in text
    assert "out_proj o_proj W_o w_o proj c_proj output" in text


def test_two_spellings_in_one_file(tmp_path):
    state = {
        name.replace("1.mha.W_query", "1.mha.q_proj"): tensor for name, tensor in GPT(GPT_CONFIG).state_dict().items()
    }
    refused(tmp_path, "article-gpt", state, GPT_CONFIG, "found 'W_key', 'W_query', 'W_value', 'out_proj', 'q_proj'")


def test_two_kinds_of_norm_in_one_file(tmp_path):
    state = {
        name.replace("encoder.norm.alpha", "encoder.norm.weight"): tensor
        for name, tensor in EncoderDecoder(PAIR_CONFIG).state_dict().items()
    }
    refused(tmp_path, "article-encoder-decoder", state, PAIR_CONFIG, "the norms: found 'alpha', 'weight'")


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize(
    ("gain", "shift", "unbiased"),
    [
        ("alpha", "bias", True),
        ("alpha", "beta", True),
        ("a_2", "b_2", True),
        ("gamma", "beta", False),
        ("scale", "shift", False),
        ("weight", "bias", False),
        ("alpha", "beta", False),
        ("gamma", "beta", True),
    ],
)
def test_norms_of_every_spelling_with_a_number_for_each_feature_or_one_for_all(tmp_path, gain, shift, unbiased, size):
    module = EncoderDecoder(PAIR_CONFIG, norm=own_norm(gain, shift, size, unbiased))
    by_name = unbiased == (gain in ("alpha", "a_2"))
    config = PAIR_CONFIG if by_name else {**PAIR_CONFIG, "norm": "unbiased_std" if unbiased else "layer_norm"}
    ours = load(tmp_path, "article-encoder-decoder", module, config)
    assert ours.model.encoder.norm.weight.shape == (32,)
    compare_pair(ours, module, 53, 61)


def test_a_norm_whose_formula_is_taken_by_its_name_is_told_of(tmp_path):
    path, settings = write(tmp_path, EncoderDecoder(PAIR_CONFIG).state_dict(), PAIR_CONFIG)
    report = convert(path, tmp_path / "dst", family="article-encoder-decoder", config=settings)
    assert any('if yours do not, set "norm": "layer_norm"' in note for note in report.notes)


def test_a_norm_of_another_width_is_refused(tmp_path):
    state = EncoderDecoder(PAIR_CONFIG).state_dict()
    state["encoder.norm.alpha"] = torch.ones(2)
    refused(tmp_path, "article-encoder-decoder", state, PAIR_CONFIG, "neither one number for each feature nor one")


# Tensors that are one.

SAME = {
    "article-gpt": ("token_embedding.weight", "out_head.weight"),
    "article-encoder-decoder": ("tgt_embed.embedding.weight", "projection_layer.proj.weight"),
    "article-transformer": ("transformer.wte.weight", "lm_head.weight"),
}


@pytest.mark.parametrize("left_out", [None, 0, 1])
@pytest.mark.parametrize("family", SAME)
def test_tied_weights_stay_tied_also_where_only_one_of_them_is_stored(tmp_path, family, left_out):
    """`safetensors.torch.save_model` stores only one of two names of a tensor."""
    make, config = MODELS[family]
    module = make(config)
    parts = dict(module.named_parameters())
    with torch.no_grad():
        parts[SAME[family][1]].copy_(parts[SAME[family][0]])
    state = module.state_dict()
    if left_out is not None:
        missing = SAME[family][left_out]
        del state[missing]
        refused(tmp_path / "untold", family, state, config, rf"'{missing}' is missing; where your model shares it")
        config = {**config, "tie_word_embeddings": True}
    path, settings = write(tmp_path / "in", state, config)
    report = convert(path, tmp_path / "dst", family=family, config=settings)
    assert any("(tie_word_embeddings)" in note for note in report.notes)
    ours = from_official(path, family=family, config=settings)
    assert ours.config.tie_word_embeddings
    assert ours.lm_head.weight is ours.get_decoder().embed_tokens.weight
    ids = tokens(53, 2, 9)
    with torch.no_grad():
        want = module(ids) if family == "article-gpt" else module(ids, ids)
        assert_close((ours(ids) if family == "article-gpt" else ours(ids, decoder_input_ids=ids)).logits, want)


def test_one_vocabulary_for_both_sides_of_the_third_article(tmp_path):
    config = {**PAIR_CONFIG, "src_vocab_size": 61}
    module = EncoderDecoder(config, head_bias=False)
    with torch.no_grad():
        for part in (module.tgt_embed.embedding, module.projection_layer.proj):
            part.weight.copy_(module.src_embed.embedding.weight)
    state = module.state_dict()
    ours = load(tmp_path, "article-encoder-decoder", module, config)
    assert (ours.config.share_embeddings, ours.config.tie_word_embeddings) == (True, True)
    compare_pair(ours, module, 61, 61)
    del state["tgt_embed.embedding.weight"], state["src_embed.embedding.weight"]
    told = {**config, "share_embeddings": True, "tie_word_embeddings": True}
    path, settings = write(tmp_path / "one", state, told)
    compare_pair(from_official(path, family="article-encoder-decoder", config=settings), module, 61, 61)


def test_the_settings_may_deny_that_equal_weights_are_one_and_must_not_tie_unequal_ones(tmp_path):
    module, tied = GPT(GPT_CONFIG), {**GPT_CONFIG, "tie_word_embeddings": True}
    refused(tmp_path / "other", "article-gpt", module.state_dict(), tied, "set it to false, or fix one")
    with torch.no_grad():
        module.out_head.weight.copy_(module.token_embedding.weight)
    ours = load(tmp_path / "equal", "article-gpt", module, {**GPT_CONFIG, "tie_word_embeddings": False})
    assert ours.lm_head.weight is not ours.model.embed_tokens.weight
