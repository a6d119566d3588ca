"""`article-encoder-decoder`: pre-norm, of `EncoderBlock`, `DecoderBlock` and `ResidualConnection`."""

from dataclasses import dataclass

from ..families.fresh import root_of_width
from ..rules.table import RuleTable, module_rules
from .base import (
    BOTH_STACKS,
    FLAG,
    FRESH,
    POSITIVE,
    SHARE,
    SIZE,
    TARGET_TOKENS,
    Article,
    ArticleFamily,
    projections,
    spelled,
    target_ids,
)
from .buffers import sinusoid
from .norms import NORM, norm_rules, norm_settings, norm_traits

OURS = {
    "self_attention_block": "self_attn",
    "cross_attention_block": "cross_attn",
    "feed_forward_block": "mlp",
}
"""The article's parts of a layer -> ours, in running order; an encoder has no second one."""
SOURCE, TARGET = "src_embed.embedding.weight", "tgt_embed.embedding.weight"
HEAD = "projection_layer.proj"


@dataclass(kw_only=True, eq=False)
class ArticleEncoderDecoder(Article):
    """Two stacks of pre-norm layers with a vocabulary each, sinusoids, ReLU, and a norm at the end of each stack.

    The norm is PyTorch's, or one that divides by the unbiased standard deviation plus a small number. The latter
    becomes the former with `eps**2` under the root: both differ by about `eps` / standard deviation.
    """

    topology = "encoder_decoder"
    must_have = {
        **dict.fromkeys(("d_model", "d_ff", "h", "N"), SIZE),
        "dropout": SHARE,
        **dict.fromkeys(("src_vocab_size", "tgt_vocab_size", "src_seq_len", "tgt_seq_len"), SIZE),
    }
    may_have = {
        "eps": POSITIVE,
        "norm": NORM,
        **dict.fromkeys(("tie_word_embeddings", "share_embeddings"), FLAG),
        **TARGET_TOKENS,
    }
    heads_of = ("d_model", "h")
    embeddings = {
        SOURCE: "model.encoder.embed_tokens.weight",
        TARGET: "model.decoder.embed_tokens.weight",
        f"{HEAD}.weight": "lm_head.weight",
    }
    shared = [("share_embeddings", TARGET, SOURCE), ("tie_word_embeddings", f"{HEAD}.weight", TARGET)]

    def traits(self, names, settings):
        """The spelling of the projections and norms, and which biases there are."""
        parts = [name.partition("_attention_block.")[2] for name in names if "_attention_block." in name]
        named = projections({part.rpartition(".")[0] for part in parts}, "the projections of an attention block")
        linear = spelled(named)
        biases = {
            "attention bias": tuple(f"_attention_block.{linear[f'{name}_proj']}.bias" for name in "qkv"),
            "output bias": (f"_attention_block.{linear['o_proj']}.bias",),
            "mlp bias": (".linear_1.bias", ".linear_2.bias"),
            "head bias": (f"{HEAD}.bias",),
        }
        found = {trait for trait, ends in biases.items() if any(name.endswith(ends) for name in names)}
        norms = {name.rpartition(".")[2] for name in names if ".norm." in name}
        return named | found | norm_traits(norms, settings)

    def checks(self, settings):
        """The tables of positions."""
        sides = {"src_pos.pe": "src_seq_len", "tgt_pos.pe": "tgt_seq_len"}
        return {name: sinusoid(settings[length], settings["d_model"]) for name, length in sides.items()}

    def layout(self, variant, config) -> RuleTable:
        attention = {theirs: ours for ours, theirs in spelled(variant.traits).items()}
        modules = {"mlp": {"linear_1": "up_proj", "linear_2": "down_proj"}}
        rules, copies = self.embedding_rules(variant)
        rules += module_rules({HEAD: "lm_head"})[1:]
        for stack in ("encoder", "decoder"):
            rules += norm_rules(f"{stack}.norm", f"model.{stack}.norm", variant, config)
            here, there = f"{stack}.layers.{{layer}}.", f"model.{stack}.layers.{{layer}}."
            parts = [part for part in OURS.items() if stack == "decoder" or part[1] != "cross_attn"]
            for index, (theirs, ours) in enumerate(parts):
                norm = (f"{here}residual_connections.{index}.norm", f"{there}{ours}_pre_norm")
                rules += norm_rules(*norm, variant, config)
                for linear, name in modules.get(ours, attention).items():
                    rules += module_rules({f"{here}{theirs}.{linear}": f"{there}{ours}.{name}"})
        return RuleTable(rules, ignored=[*copies, "src_pos.pe", "tgt_pos.pe"])

    def our_settings(self, settings, traits):
        dropout, shares = float(settings["dropout"]), "share_embeddings" in traits
        source, target = settings["src_vocab_size"], settings["tgt_vocab_size"]
        return {
            "vocab_size": source,
            "decoder_vocab_size": None if shares and source == target else target,
            "share_embeddings": shares,
            "tie_word_embeddings": "tie_word_embeddings" in traits,
            "hidden_size": settings["d_model"],
            "intermediate_size": settings["d_ff"],
            "num_hidden_layers": settings["N"],
            "num_attention_heads": settings["h"],
            **norm_settings(settings, traits),
            "max_position_embeddings": max(settings["src_seq_len"], settings["tgt_seq_len"]),
            "embedding_scale": settings["d_model"] ** 0.5,
            "attention_bias": "attention bias" in traits,
            "attention_output_bias": "output bias" in traits,
            "mlp_bias": "mlp bias" in traits,
            "lm_head_bias": "head bias" in traits,
            **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), dropout),
            **target_ids(settings),
        }


FAMILY = ArticleFamily(
    "article-encoder-decoder",
    "Transformer",
    "BlockformerEncoderDecoderForConditionalGeneration",
    ArticleEncoderDecoder(),
    structure={**BOTH_STACKS, "share_embeddings": False},
    fresh={
        **FRESH,
        **dict.fromkeys(("attention_bias", "attention_output_bias"), False),
        "lm_head_bias": True,
        "activation_dropout": 0.1,
        "embedding_scale": root_of_width,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
)
