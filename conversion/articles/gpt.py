"""`article-gpt`: `MyGPTModel`, read from the state dict that its code saves (`docs/articles.md`)."""

from dataclasses import dataclass

from ..families.gpt2 import FRESH as GPT2_FRESH
from ..rules.table import Rule, RuleTable, module_rules
from .base import (
    FLAG,
    POSITIVE,
    SHARE,
    SIZE,
    STRUCTURE,
    TOKENS,
    Article,
    ArticleFamily,
    projections,
    spelled,
    token_ids,
)
from .buffers import causal
from .norms import NORM, norm_rules, norm_settings, norm_traits

MASKS = ("mask", "mask_matrix")
BLOCK = "transformer_blocks."
FEED_FORWARD = {"ffn.layers.0": "mlp.up_proj", "ffn.layers.2": "mlp.down_proj"}


@dataclass(kw_only=True, eq=False)
class ArticleGPT(Article):
    """`MyGPTModel`: learned positions, pre-norm, tanh GELU, its own head without bias.

    The class of the attention is imported in the article and not printed; its tensors are known by how they are named.
    """

    topology = "decoder"
    must_have = {
        **dict.fromkeys(("vocab_size", "max_seq_length", "embedding_dim", "n_heads", "n_layers"), SIZE),
        "drop_rate": SHARE,
        "qkv_bias": FLAG,
    }
    may_have = {"eps": POSITIVE, "norm": NORM, "tie_word_embeddings": FLAG, **TOKENS}
    heads_of = ("embedding_dim", "n_heads")
    embeddings = {"token_embedding.weight": "model.embed_tokens.weight", "out_head.weight": "lm_head.weight"}
    shared = [("tie_word_embeddings", "out_head.weight", "token_embedding.weight")]

    def traits(self, names, settings):
        """The spelling of the attention's projections and of the norms, and "output bias" where there is one."""
        parts = [name.split(".") for name in names if name.startswith(BLOCK) and ".mha." in name]
        inner = {".".join(part[3:]) for part in parts}
        modules = {name.rpartition(".")[0] or name for name in inner} - set(MASKS)
        named = projections(modules, f"the projections of {BLOCK}N.mha")
        norms = {name.rpartition(".")[2] for name in names if name.startswith("layer_norm.") or ".norm_" in name}
        bias = {"output bias"} if f"{spelled(named)['o_proj']}.bias" in inner else set()
        return named | norm_traits(norms, settings) | bias

    def checks(self, settings):
        """The causal mask that the attention may hold as a buffer."""
        return {f".mha.{name}": causal(settings["max_seq_length"]) for name in MASKS}

    def layout(self, variant, config) -> RuleTable:
        block, layer = BLOCK + "{layer}.", "model.layers.{layer}."
        linear = {
            f"mha.{theirs}": f"self_attn.{ours}" for ours, theirs in spelled(variant.traits).items()
        } | FEED_FORWARD
        norms = {f"{block}norm_1": f"{layer}self_attn_pre_norm", f"{block}norm_2": f"{layer}mlp_pre_norm"}
        rules, copies = self.embedding_rules(variant)
        rules += [
            Rule("position_embedding.weight", "model.embed_positions.weight"),
            *module_rules({block + theirs: layer + ours for theirs, ours in linear.items()}),
            *(
                rule
                for names in {**norms, "layer_norm": "model.norm"}.items()
                for rule in norm_rules(*names, variant, config)
            ),
        ]
        return RuleTable(rules, ignored=[*copies, *(f"{block}mha.{name}" for name in MASKS)])

    def our_settings(self, settings, traits):
        return {
            "vocab_size": settings["vocab_size"],
            "hidden_size": settings["embedding_dim"],
            "intermediate_size": 4 * settings["embedding_dim"],
            "num_hidden_layers": settings["n_layers"],
            "num_attention_heads": settings["n_heads"],
            **norm_settings(settings, traits),
            "max_position_embeddings": settings["max_seq_length"],
            "attention_bias": settings["qkv_bias"],
            "attention_output_bias": "output bias" in traits,
            "tie_word_embeddings": "tie_word_embeddings" in traits,
            "hidden_dropout": float(settings["drop_rate"]),
            "attention_dropout": float(settings["drop_rate"]),
            **token_ids(settings),
        }


FAMILY = ArticleFamily(
    "article-gpt",
    "MyGPTModel",
    "BlockformerDecoderForCausalLM",
    ArticleGPT(),
    structure={**STRUCTURE, "position_type": "learned", "hidden_act": "gelu_new"},
    fresh={**GPT2_FRESH, "attention_bias": False, "tie_word_embeddings": False},
)
