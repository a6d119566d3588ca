"""The files around the weights: a tokenizer, a template or generation settings of another model."""

import json

import pytest

from blockformer.doctor import diagnose

from ..conversion.oracles import edit_config, edit_tensors, entries_of, official_folder

SIZES = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1, "tie_word_embeddings": True}


@pytest.fixture
def source(tmp_path, tiny_tokenizer):
    official_folder(tmp_path / "source", "qwen3", tokenizer=tiny_tokenizer, **SIZES)
    return tmp_path / "source"


def sentences(source, *kinds, **options):
    chosen = [each for each in diagnose(source, quick=True, **options).findings if not kinds or each.kind in kinds]
    return " ".join(" ".join(f"{each.severity} {each.sentence} | {each.remedy}" for each in chosen).split())


def change(source, name, edit):
    path = source / name
    entries = json.loads(path.read_text()) if path.exists() else {}
    edit(entries)
    path.write_text(json.dumps(entries))


def test_a_folder_that_is_right(source):
    assert sentences(source) == ""


def test_ids_beyond_the_table(source):
    edit_config(source, vocab_size=500)
    name = "model.embed_tokens.weight"
    edit_tensors(source, lambda all_: {**all_, name: all_[name][:500]})
    said = sentences(source, "tokenizer")
    assert "error the tokenizer has ids up to 511, and the embeddings have 500 rows (12 tokens beyond" in said
    assert "resize_token_embeddings before training" in said


def test_another_models_tokenizer(source):
    def keep_few(entries):
        entries["model"]["vocab"] = {token: each for token, each in entries["model"]["vocab"].items() if each < 200}
        entries["model"]["merges"] = []

    change(source, "tokenizer.json", keep_few)
    assert "it looks like another model's tokenizer: copy the right one" in sentences(source, "tokenizer")


def test_special_tokens_that_are_others(tmp_path, source):
    edit_config(source, eos_token_id=7)
    change(source, "generation_config.json", lambda entries: entries.update(eos_token_id=7))
    said = sentences(source, "special-tokens")
    assert "warning the tokenizer's eos token is '<|end|>', id 0, and the config's eos_token_id is 7" in said
    assert 'write "eos_token_id": 0' in said


def test_tokens_that_moved(tmp_path, source, tiny_tokenizer):
    official_folder(tmp_path / "official", "qwen3", tokenizer=tiny_tokenizer, **SIZES)

    def move(entries):
        vocabulary = entries["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    change(source, "tokenizer.json", move)
    said = sentences(source, "tokenizer", against=tmp_path / "official")
    assert "error 2 tokens have other ids than in" in said


def test_another_models_template(source):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|end|>"
    (source / "chat_template.jinja").write_text(template)
    said = sentences(source, "template")
    assert "the chat template writes '<|im_end|>', '<|im_start|>', and this tokenizer has no such tokens" in said


def test_generation_settings_that_contradict(source):
    change(source, "generation_config.json", lambda entries: entries.update(do_sample=False, temperature=0.6))
    assert "settings contradict each other: " in sentences(source, "generation")
    assert "temperature" in sentences(source, "generation")
    change(source, "generation_config.json", lambda entries: entries.update(eos_token_id=[0, 600], max_length=10**6))
    said = sentences(source, "generation")
    assert "error generation_config.json: eos_token_id is 600, and the embeddings have 512 rows" in said
    positions = entries_of(source)["max_position_embeddings"]
    assert f"max_length is 1000000, and the model has {positions} positions" in said
    (source / "generation_config.json").write_text("{")
    assert "generation_config.json: not valid JSON" in sentences(source, "json")


def test_padding_that_is_the_end(source):
    edit_config(source, pad_token_id=0)
    assert "note pad_token_id and eos_token_id are both 0" in sentences(source, "pad")


def test_a_name_that_is_nearly_right(source):
    edit_config(source, rms_norm_epss=1e-6)
    assert "'rms_norm_epss' (did you mean 'rms_norm_eps'?)" in sentences(source, "misspelt")


def test_words_in_a_text_file(tmp_path):
    official_folder(tmp_path, "bert", "ForMaskedLM")
    rows = entries_of(tmp_path)["vocab_size"]
    (tmp_path / "vocab.txt").write_text("\n".join(f"w{number}" for number in range(rows + 2)))
    assert f"the tokenizer has ids up to {rows + 1}, and the embeddings have {rows} rows" in sentences(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(f"w{number}\u2028" for number in range(rows)) + "\n")
    assert "the tokenizer has ids" not in sentences(tmp_path)


def test_only_the_mask_has_no_row(source):
    """BART's summarizers were fine-tuned without it, and their tokenizers still have it."""
    change(source, "tokenizer.json", lambda entries: entries["added_tokens"].append({"id": 512, "content": "<mask>"}))
    said = sentences(source, "tokenizer")
    assert "warning the tokenizer has ids up to 512, and the embeddings have 512 rows: the model was trained" in said


def test_entries_of_earlier_releases_are_not_misspelt(source):
    edit_config(source, static_position_embeddings=False, classif_dropout=0.0, eos_token_ids=0, pad_token="<pad>")
    assert not sentences(source, "misspelt")
