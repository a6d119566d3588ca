"""Which families there are, and in which file the record of each one is. Imports neither torch nor transformers.

The command line checks names by it, and presets and conversion load a family's file by it.
"""

import importlib
from types import ModuleType

ONE_STACK = (
    *("bart-decoder", "mbart-decoder", "marian-decoder", "plbart-decoder", "blenderbot-decoder", "pegasus-decoder"),
    "mvp-decoder",
)
"""The decoders of encoder-decoders, whose `model_type` they have."""
NAMES: tuple[str, ...] = (
    *("qwen3", "qwen2", "llama", "mistral"),
    *("phi3", "phi", "olmo2", "olmo3", "olmo", "gemma", "gemma2", "gemma3_text", "vaultgemma", "granite"),
    *("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text"),
    *("ministral", "ministral3", "cwm", "smollm3", "arcee", "helium", "seed_oss", "exaone4", "glm", "glm4"),
    *("cohere", "cohere2", "cohere_compass_text"),
    *("starcoder2", "nemotron", "jais2", "stablelm", "ernie4_5", "hyperclovax", "internlm3", "iquestcoder"),
    *("granite_swa", "hunyuan_v1_dense", "apertus", "nanochat", "exaone"),
    "gpt2",
    *("gpt_neox", "persimmon", "gptj", "codegen", "falcon", "bloom", "mpt", "opt", "gpt_bigcode", "gpt_neo"),
    *("biogpt", "xglm", "ctrl"),
    *("qwen3_moe", "qwen2_moe", "mixtral"),
    *("olmoe", "flex_olmo", "dots1", "glm4_moe", "ernie4_5_moe", "minimax_m2", "granitemoe", "granitemoeshared"),
    *("afmoe", "solar_open", "mellum", "granitemoe_swa", "flint", "exaone_moe", "hy_v3", "sarvam_moe"),
    *("hunyuan_v1_moe", "cohere2_moe", "aria_text"),
    "phimoe",
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lara_mini"),
    *("olmo_hybrid", "lfm2", "lfm2_moe"),
    *("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"),
    *("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "mistral4", "sarvam_mla"),
    *("youtu", "minicpm3"),
    *("gpt_oss", "openai_privacy_filter"),
    *("distilbert", "roberta", "xlm-roberta", "bert"),
    *("camembert", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm", "megatron-bert", "ernie", "electra"),
    *("albert", "roformer", "bert-generation", "xlm", "flaubert", "squeezebert"),
    *("jina_embeddings_v3", "nomic_bert", "gte", "modernbert", "eurobert", "modernbert-decoder"),
    "deberta-v2",
    "mpnet",
    "esm",
    *("umt5", "t5", "mt5"),
    *("t5gemma", "t5gemma2"),
    *("marian", "mbart", "bart", "mvp"),
    *("plbart", "blenderbot", "pegasus", "m2m_100", "fsmt"),
    *ONE_STACK,
)
"""All official families. On the way out the first that can express a config is taken: it demands the most.

Which there are and which goes first is one list, so that no family can be in one and missing in the other.
"""
MODEL_TYPES = {name: name.removesuffix("-decoder") for name in ONE_STACK}
"""Families whose official `model_type` is not their name."""
FORMER_TYPES = {"new": "gte", "gpt-sw3": "gpt2"}
"""`model_type` of checkpoints that came with their own code, or another name of a class -> the family."""
OUT_OF_REACH = {
    "blenderbot-small": "its decoder normalizes token vectors before it adds positions, its encoder after",
    "dbrx": "all experts of a layer lie in one matrix, which no rule takes apart",
    "ibert": "its layers hold integers and their scales next to the weights",
    "ultrabert": "its language model's head has two layers of another width; here it has one of the model's width",
    "openai-gpt": "its official class has no cache, with which conversions are compared",
    "kolibri1": "its router adds the term of the choice to logits; here it is added to their sigmoid",
    "axk1": "it norms what its sparse layers give, and not its dense ones; here all layers have the same norms",
    "laguna": "its gates of heads go through softplus; here they go through a sigmoid",
    "mimo_v2_flash": "only its layers with a window have sinks, and its values are narrower than its keys",
    "beam": "its layers add what they compute with weights that depend on their depth",
    "lfm3": "its attention has one gate a head; here each channel has its own",
    "bitnet": "it norms what its output projections read",
    "esmc": "its layer norms have biases, except the last one and the norms of queries and keys; here all have or none",
    "rembert": "the head of its language model is wider than its embeddings and its states",
    **dict.fromkeys(
        ("apertus1p5", "apertus1p5_text"),
        "the head of its language model has fewer rows than its embeddings; here both have one for each token",
    ),
    "xmod": "its layers have an adapter for each language",
    "deberta": "its relative positions have no buckets, and separate matrices turn them into queries and keys",
    "gpt_neox_japanese": "only the attention of its last layer has a bias",
    "llama4_text": "its windows are chunks, and it norms queries and keys to their length",
    "gemma3n_text": "its layers carry several streams of states",
    "diffllama": "its attention is the difference of two",
    "doge": "its attention chooses keys by a learned mask",
    "jetmoe": "its attention has experts, too",
    "hrm_text": "it runs through its layers several times",
    "dory": "its states have length 1, each layer moves them by learned rates, and some layers run several times",
    "longcat_flash": "its layers have attention twice, and experts next to both",
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "axk2", "qwen4_exp_text"),
        "in its attention an indexer chooses the keys of each token",
    ),
    **dict.fromkeys(
        ("minimax_m3_vl_text", "mistral_large4_text", "dots3_note_text"),
        "in its attention an indexer chooses the keys of each token",
    ),
    **dict.fromkeys(
        ("layoutlm", "layoutlmv2", "layoutlmv3", "layoutxlm", "lilt", "bros", "markuplm"),
        "it reads where each word stands on a page; here a token has only its place in the text",
    ),
    "tapas": "it reads in which row and column of a table each token stands",
    "visual_bert": "it reads vectors of pictures next to tokens",
    "luke": "it reads entities next to tokens, with separate queries",
    "roc_bert": "it reads the shape and the pronunciation of each character next to the character",
    "canine": "it reads characters, which several hashes look up, and shortens the text by a convolution",
    "perceiver": "its attention reads the text into a fixed number of vectors",
    "blt": "it reads bytes, which a separate model joins into patches",
    "splinter": "its head compares each token with the one that stands for the question; the rest is BERT",
    "dpr": "its classes give the first state of a BERT, in their own output class; the rest is BERT",
    "fnet": "it mixes tokens by a Fourier transform in place of attention",
    "xlnet": "its scores add terms of computed distances and of segments, with vectors that all tokens share",
    "funnel": "its layers pool the text to half its length, and its scores add terms of computed distances",
    "convbert": "half of its attention is a convolution whose weights depend on the token",
    "mobilebert": "its layers are narrower inside than the states between them, and have several networks each",
    "nystromformer": "its attention is approximated by a few landmarks of the text",
    "mra": "its attention is approximated in blocks, of which some are computed exactly",
    "yoso": "its attention is approximated by hashes",
    "reformer": "its attention hashes tokens into buckets, and its layers are reversible",
    "prophetnet": "its decoder predicts several tokens at once, each in its own stream",
    "cpmant": "its relative bias depends on segments, and a trained prompt stands before each text",
    "rag": "it looks up passages, and joins two models",
    "encoder-decoder": "it joins two models of any types; convert each of them by itself",
    "molmo2_text": "its tokens lie in two tables",
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_loop_text"),
        "its keys and values go through a short convolution, and its scores add a term of the distance",
    ),
    "zaya": "its queries and keys go through convolutions, and half of each value is the earlier token's",
    **dict.fromkeys(
        ("kimi_linear", "bailing_hybrid"),
        "its layers with a state forget by channel; here a head forgets as a whole",
    ),
    "recurrent_gemma": "its layers have a gated linear recurrence, whose state is a vector",
    **dict.fromkeys(("zamba", "zamba2"), "its layers share an attention that also reads the token vectors"),
    **dict.fromkeys(("rwkv", "xlstm"), "it has no attention; here a model with states needs one layer of it"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "it drafts for a Gemma 4, whose states, keys and values it reads",
    ),
    **dict.fromkeys(
        (
            *("clip_text_model", "clipseg_text_model", "metaclip_2_text_model", "chinese_clip_text_model"),
            *("altclip_text_model", "align_text_model", "clap_text_model", "groupvit_text_model", "xclip_text_model"),
            *("owlvit_text_model", "owlv2_text_model", "siglip_text_model", "siglip2_text_model", "blip_text_model"),
            *("aimv2_text_model", "tipsv2_text_model", "videoprism_text_model", "bridgetower_text_model"),
            "flava_text_model",
        ),
        "it is the tower for texts of a model of pictures or sounds",
    ),
    "minimax": "most of its layers have an attention whose weights decay with distance",
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "its state spaces are Mamba's first; here they are Mamba-2's"),
    "mamba2": "it has no attention; here a model with states needs one layer of it",
    **dict.fromkeys(("switch_transformers", "nllb-moe"), "its stacks have experts; here only decoders have"),
    **dict.fromkeys(
        ("longformer", "led", "longt5", "big_bird", "bigbird_pegasus", "pegasus_x"),
        "its encoder looks at a text in blocks, and at some tokens from everywhere",
    ),
}
"""`model_type` of models that people ask for -> the parts that ours lack."""
ARTICLES = ("article-gpt", "article-encoder-decoder", "article-transformer")
"""Families without an official layout, read from an article's weight file."""
MORE_PRESETS = {
    "transformer-base": "original",
    "transformer-big": "original",
    "transformer-pre-ln": "original",
    "bert-decoder": "bert",
    "t5-v1.1": "t5",
    "article-transformer-printed": "article-transformer",
}
"""Presets that are not called like a family -> the file that they are in."""
FILES = {
    "phi3": "phi",
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "flex_olmo"), "olmo"),
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "gemma4"),
    "embedding_gemma2_text": "gemma4",
    "vaultgemma": "gemma",
    **dict.fromkeys(("qwen2", "qwen3", "mistral", "ministral", "cwm", "arcee", "helium", "seed_oss"), "llama"),
    **dict.fromkeys(("ernie4_5", "internlm3", "iquestcoder", "smollm3", "exaone4"), "llama"),
    **dict.fromkeys(("nemotron", "starcoder2", "stablelm"), "with_layer_norms"),
    **dict.fromkeys(("gpt_bigcode", "gpt_neo"), "gpt2"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "flint", "mellum"), "qwen_moe"),
    "minimax_m2": "mixtral",
    "openai_privacy_filter": "gpt_oss",
    **dict.fromkeys(("dots1", "solar_open", "glm4_moe", "exaone_moe", "hy_v3"), "like_deepseek"),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), "hunyuan"),
    "aria_text": "aria",
    **dict.fromkeys(("sarvam_moe", "sarvam_mla"), "sarvam"),
    "glm4": "glm",
    **dict.fromkeys(("cohere2", "cohere2_moe", "cohere_compass_text"), "cohere"),
    "codegen": "gptj",
    **dict.fromkeys(("hyperclovax", "granitemoe", "granitemoeshared", "granite_swa", "granitemoe_swa"), "granite"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "qwen3_next"),
    "lfm2_moe": "lfm2",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu", "minicpm3"), "deepseek"),
    "xglm": "biogpt",
    "persimmon": "gpt_neox",
    "ernie": "bert",
    "flaubert": "xlm",
    "modernbert-decoder": "modernbert",
    **dict.fromkeys(("xlm-roberta", "camembert", "data2vec-text", "xlm-roberta-xl"), "roberta"),
    "roberta-prelayernorm": "roberta",
    "megatron-bert": "megatron_bert",
    "bert-generation": "bert_generation",
    "deberta-v2": "deberta_v2",
    **dict.fromkeys(("jina_embeddings_v3", "nomic_bert", "gte"), "rotary_bert"),
    "umt5": "t5",
    "mt5": "t5",
    "mbart": "bart",
    "plbart": "bart",
    "mvp": "bart",
    "blenderbot": "bart",
    "pegasus": "marian",
    **dict.fromkeys(ONE_STACK, "bart_decoder"),
    **MORE_PRESETS,
}
"""Family or preset -> its file, where that has another name."""

WITHOUT_PRESET = (*MODEL_TYPES, "embedding_gemma2_text", "t5gemma2", "squeezebert", "openai_privacy_filter")
"""Families whose models are not made anew: they are trained from another one, or have matrices of blocks."""
PRESETS = (*(name for name in NAMES if name not in WITHOUT_PRESET), *MORE_PRESETS, *ARTICLES)
"""All presets."""


def module_of(name: str) -> ModuleType:
    """The module with the record of a family or preset."""
    file = FILES.get(name, name)
    folder = "articles" if file in ARTICLES else "families"
    return importlib.import_module(f"...{folder}.{file.removeprefix('article-').replace('-', '_')}", __name__)
