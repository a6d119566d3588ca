"""The tokenizers of families with a SentencePiece model, as their repos hold them."""

import json
from typing import Any

from .pieces import bpe_json, scored, trained, unigram_json
from .words import Words, added_tokens_decoder

ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")
ROBERTA_MAP = {
    "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "sep_token": "</s>",
    "unk_token": "<unk>",
}  # fmt: skip
MASK = {"content": "<mask>", "lstrip": True, "normalized": True, "rstrip": False, "single_word": False}
EXTRA_IDS = tuple(f"<extra_id_{index}>" for index in range(100))
MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
).split()
MBART50 = [
    *MBART,
    *(
        "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE "
        "ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
    ).split(),
]
M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
).split()
NLLB = ("ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans", "zul_Latn")


def with_settings(files: dict[str, Any], config: Any, special_map: Any) -> dict[str, Any]:
    """The files with `tokenizer_config.json` and `special_tokens_map.json`, where they are given."""
    both = {"tokenizer_config.json": config, "special_tokens_map.json": special_map}
    return {**files, **{name: content for name, content in both.items() if content is not None}}


def shifted(model: bytes, last: tuple[str, ...] = ("<mask>",)) -> list[tuple[str, float]]:
    """The pieces of a model whose first three give way to the four special tokens of fairseq."""
    zero = [(token, 0.0) for token in ROBERTA]
    return [*zero, *scored(model)[3:], *((token, 0.0) for token in last)]


def places(pieces: list[tuple[str, float]]) -> dict[str, int]:
    return {piece: index for index, (piece, _) in enumerate(pieces)}


def xlm_roberta(
    *,
    config: dict[str, Any] | None = None,
    special_map: dict[str, Any] | None = None,
    model_file: str | None = "sentencepiece.bpe.model",
    fast: bool = True,
) -> Words:
    """A tokenizer of XLM-RoBERTa."""
    model = trained()
    pieces = shifted(model)
    files: dict[str, Any] = {} if model_file is None else {model_file: model}
    if fast:
        files["tokenizer.json"] = unigram_json(
            model, pieces, 3, (*ROBERTA, "<mask>"), ("<s>",), ("</s>",), doubled=True
        )
    return Words(with_settings(files, config, special_map), places(pieces))


def camembert() -> Words:
    """A tokenizer of CamemBERT: fairseq's special tokens before those of the model."""
    model = trained()
    unused = [("<s>NOTUSED", 0.0), ("<pad>", 0.0), ("</s>NOTUSED", 0.0), ("<unk>", 0.0), ("<unk>NOTUSED", -100.0)]
    pieces = [*unused, *scored(model)[1:], ("<mask>", 0.0)]
    special = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<s>", "</s>", "<mask>")
    fast = unigram_json(model, pieces, 3, special, ("<s>",), ("</s>",), doubled=True)
    files = {
        "sentencepiece.bpe.model": model,
        "tokenizer.json": fast,
        "tokenizer_config.json": {"model_max_length": 512},
    }
    return Words(files, places(pieces))


def albert() -> Words:
    """A tokenizer of ALBERT: the special tokens are pieces of the model."""
    model = trained(unk=1, bos=-1, eos=-1, pad=0, control=("[CLS]", "[SEP]", "[MASK]"))
    special = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    fast = unigram_json(model, scored(model), 1, special, ("[CLS]",), ("[SEP]",))
    config = {"do_lower_case": True, "model_max_length": 512}
    files = {"spiece.model": model, "tokenizer.json": fast, "tokenizer_config.json": config}
    return Words(files, places(scored(model)))


def deberta() -> Words:
    """A tokenizer of DeBERTa-v3: only the model, with BERT's names of the special pieces; the mask follows its end."""
    names = (("pad", "[PAD]"), ("bos", "[CLS]"), ("eos", "[SEP]"), ("unk", "[UNK]"))
    model = trained(unk=3, bos=1, eos=2, pad=0, named=names)
    files = {"spm.model": model, "tokenizer_config.json": {"do_lower_case": False, "vocab_type": "spm"}}
    pieces = places(scored(model))
    return Words(files, {**pieces, "[MASK]": len(pieces)})


def t5(*, extra: int = 100, fast: bool = True, config: Any = None, special_map: Any = None) -> Words:
    """A tokenizer of T5, mT5 and UMT5; the extra tokens stand at the end in falling order."""
    model = trained(unk=2, bos=-1, eos=1, pad=0)
    pieces = [*scored(model), *((token, 0.0) for token in reversed(EXTRA_IDS[:extra]))]
    files: dict[str, Any] = {"spiece.model": model}
    if fast:
        special = ("<pad>", "</s>", "<unk>", *EXTRA_IDS[:extra])
        files["tokenizer.json"] = unigram_json(model, pieces, 2, special, (), ("</s>",))
    return Words(with_settings(files, config, special_map), places(pieces))


def pegasus() -> Words:
    """A tokenizer of Pegasus: only the model; 103 tokens stand before all but the first two pieces."""
    model = trained(unk=2, bos=-1, eos=1, pad=0)
    unknown = [f"<unk_{index}>" for index in range(2, 103)]
    entries = {
        "additional_special_tokens": ["<mask_1>", *unknown],
        "eos_token": "</s>",
        "mask_token": "<mask_2>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    config = {
        **entries,
        "full_tokenizer_file": None,
        "mask_token_sent": "<mask_1>",
        "model_max_length": 512,
        "offset": 103,
        "special_tokens_map_file": None,
    }
    files = {"spiece.model": model, "tokenizer_config.json": config, "special_tokens_map.json": entries}
    rest = [piece for piece, _ in scored(model)[2:]]
    order = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *unknown, *rest]
    return Words(files, {piece: index for index, piece in enumerate(order)})


def marian(config: dict[str, Any]) -> Words:
    """A tokenizer of Marian: a model for each side, and one vocabulary for both that ends in the padding."""
    source, target = (trained(size=340, unk=1, bos=-1, eos=0, seed=seed) for seed in (0, 3))
    order = dict.fromkeys(
        ["</s>", "<unk>", *(piece for model in (source, target) for piece, _ in scored(model)), "<pad>"]
    )
    ids = {piece: index for index, piece in enumerate(order)}
    vocabulary = json.dumps(ids, indent=2)
    files = {"source.spm": source, "target.spm": target, "vocab.json": vocabulary, "tokenizer_config.json": config}
    return Words(files, ids)


def m2m_100() -> Words:
    """A tokenizer of M2M-100: a model and its vocabulary; a hundred languages follow, and eight words without use."""
    model = trained("bpe")
    pieces = [*ROBERTA, *(piece for piece, _ in scored(model)[3:])]
    ids = {piece: index for index, piece in enumerate(pieces)}
    languages = [f"__{code}__" for code in M2M100]
    entries = {**{name: token for name, token in ROBERTA_MAP.items() if name != "cls_token"}}
    entries["additional_special_tokens"] = languages
    config = {
        **entries,
        "language_codes": "m2m100",
        "model_max_length": 1024,
        "num_madeup_words": 8,
        "sp_model_kwargs": {},
        "special_tokens_map_file": "m2m_100_1.2B_v2/special_tokens_map.json",
        "src_lang": None,
        "tgt_lang": None,
        "tokenizer_file": None,
    }
    files = {"sentencepiece.bpe.model": model, "vocab.json": json.dumps(ids, indent=2, ensure_ascii=False)}
    more = [*languages, *(f"madeupword{index}" for index in range(8))]
    known = {**ids, **{token: len(ids) + index for index, token in enumerate(more)}}
    return Words(with_settings(files, config, entries), known)


def nllb() -> Words:
    """A tokenizer of NLLB: a BPE model with languages at its end, six of the 202."""
    model = trained("bpe")
    ids = places(shifted(model, (*NLLB, "<mask>")))
    special = (*ROBERTA, *NLLB, "<mask>")
    inner = {piece: index for piece, index in ids.items() if piece not in (*NLLB, "<mask>")}
    fast = bpe_json(model, inner | {"eng_Latn": ids["eng_Latn"]}, special, ("eng_Latn",), ("</s>",), exact=False)
    entries = {**ROBERTA_MAP, "additional_special_tokens": list(NLLB), "mask_token": MASK}
    config = {
        **entries,
        "mask_token": {"__type": "AddedToken", **MASK},
        "model_max_length": 1024,
        "name_or_path": "facebook/nllb-200-distilled-600M",
        "sp_model_kwargs": {},
        "special_tokens_map_file": None,
        "src_lang": None,
        "tgt_lang": None,
        "tokenizer_class": "NllbTokenizer",
        "tokenizer_file": None,
    }
    files = {"sentencepiece.bpe.model": model, "tokenizer.json": fast}
    return Words(with_settings(files, config, entries), ids)


def mbart() -> Words:
    """A tokenizer of mBART-cc25: the language follows the text."""
    model = trained()
    pieces = shifted(model, (*MBART, "<mask>"))
    fast = unigram_json(model, pieces, 3, (*ROBERTA, *MBART, "<mask>"), (), ("</s>", "en_XX"))
    files = {"sentencepiece.bpe.model": model, "tokenizer.json": fast}
    return Words(with_settings(files, {"model_max_length": 1024}, None), places(pieces))


def mbart50() -> Words:
    """A tokenizer of mBART-50: only the model; the language comes before the text."""
    model = trained()
    config = {
        **{name: token for name, token in ROBERTA_MAP.items() if name != "bos_token"},
        "language_codes": "mbart50",
        "mask_token": {"__type": "AddedToken", **MASK},
        "model_max_length": 1024,
        "sp_model_kwargs": {},
        "special_tokens_map_file": None,
        "src_lang": None,
        "tgt_lang": None,
        "tokenizer_class": "MBart50Tokenizer",
        "tokenizer_file": None,
    }
    entries = {**ROBERTA_MAP, "additional_special_tokens": MBART50, "mask_token": MASK}
    files = {"sentencepiece.bpe.model": model}
    return Words(with_settings(files, config, entries), places(shifted(model, (*MBART50, "<mask>"))))


def plbart() -> Words:
    """A tokenizer of PLBART: only the model; three languages of code follow its pieces."""
    model = trained()
    languages = ("__java__", "__python__", "__en_XX__")
    config = {
        **ROBERTA_MAP,
        "additional_special_tokens": None,
        "language_codes": "base",
        "mask_token": {"__type": "AddedToken", **MASK},
        "sp_model_kwargs": {},
        "special_tokens_map_file": None,
        "src_lang": None,
        "tgt_lang": None,
        "tokenizer_class": "PLBartTokenizer",
        "tokenizer_file": None,
    }
    entries = {**ROBERTA_MAP, "additional_special_tokens": list(languages), "mask_token": MASK}
    files = {"sentencepiece.bpe.model": model}
    return Words(with_settings(files, config, entries), places(shifted(model, (*languages, "<mask>"))))


def llama(
    last: tuple[str, ...] = (),
    *,
    bos: bool = True,
    listed: bool = True,
    added: bool = False,
    config: dict[str, Any] | None = None,
    special_map: dict[str, Any] | None = None,
) -> Words:
    """A tokenizer of Llama 2 and Mistral, or of Phi-3, which adds tokens and puts none before the text.

    Args:
        last: tokens after those of the model.
        bos: whether <s> comes before the text.
        listed: whether `tokenizer_config.json` lists the special tokens.
        added: whether `added_tokens.json` lists the last tokens.
        config: `tokenizer_config.json`.
        special_map: `special_tokens_map.json`.
    """
    model = trained("bpe", 520, exact=True)
    ids = places(scored(model))
    first = ("<unk>", "<s>", "</s>")
    outside = {token: len(ids) + index for index, token in enumerate(last)}
    fast = bpe_json(model, ids, (*first, *last), ("<s>",) if bos else ())
    files: dict[str, Any] = {"tokenizer.model": model, "tokenizer.json": fast}
    if added:
        files["added_tokens.json"] = outside
    ids = {**ids, **outside}
    entries = {"added_tokens_decoder": added_tokens_decoder({token: ids[token] for token in (*first, *last)})}
    return Words(with_settings(files, {**(entries if listed else {}), **(config or {})}, special_map), ids)


def gemma(*, config: dict[str, Any]) -> Words:
    """A tokenizer of Gemma: no space before the text, and turns that are pieces of the model."""
    turns = ("<start_of_turn>", "<end_of_turn>")
    names = (("pad", "<pad>"), ("bos", "<bos>"), ("eos", "<eos>"))
    settings = {"unk": 3, "bos": 2, "eos": 1, "pad": 0, "exact": True, "dummy_prefix": False}
    model = trained("bpe", 540, named=names, user=(*turns, "\n\n"), **settings)
    ids = places(scored(model))
    special = ("<pad>", "<eos>", "<bos>", "<unk>", *turns)
    fast = bpe_json(model, ids, special, ("<bos>",), prefix=False)
    entries = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    common = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": added_tokens_decoder({token: ids[token] for token in special}),
        "additional_special_tokens": list(turns),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": False,
        "tokenizer_class": "GemmaTokenizer",
        "use_default_system_prompt": False,
    }
    files = {"tokenizer.model": model, "tokenizer.json": fast}
    special_map = {**entries, "additional_special_tokens": list(turns)}
    return Words(with_settings(files, {**common, **entries, **config}, special_map), ids)
