"""`article-transformer`: `Transformer` with `wte`, `wpe`, `encoder`, `decoder`, which writes on what it reads."""

from blockformer.presets import STRUCTURES

from ..rules.table import RuleTable
from .base import FLAG, OURS, SHARE, SIZE, TARGET_TOKENS, ArticleFamily, both, causal, sinusoid, target_ids

SUBLAYERS = {
    "encoder": (("attn", "ln1", "self_attn"), ("mlp", "ln2", "mlp")),
    "decoder": (("m_attn", "ln_1", "self_attn"), ("attn", "ln_2", "cross_attn"), ("mlp", "ln_3", "mlp")),
}
"""The sub-layers of a layer in running order: the article's name, that of its norm, ours."""
MLP = {"c_fc": "up_proj", "c_proj": "down_proj"}
ATTENTION = {**{f"c_attns.{index}": name for index, name in enumerate(OURS[:3])}, "c_proj": "o_proj"}
EMBEDDINGS = "transformer.wte.weight"


class ArticleTransformer(ArticleFamily):
    """`Transformer`: one embedding for both sides, sinusoids, pre-norm by the formula x + f(norm(x)), ReLU."""

    must_have = {
        **dict.fromkeys(("vocab_size", "block_size", "n_layer", "n_head", "n_embd"), SIZE),
        "dropout": SHARE,
        "bias": FLAG,
    }
    may_have = {"tie_word_embeddings": FLAG, **TARGET_TOKENS}
    heads_of = ("n_embd", "n_head")
    embeddings = {EMBEDDINGS: "model.encoder.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    shared = [("tie_word_embeddings", "lm_head.weight", EMBEDDINGS)]

    def traits(self, names, settings):
        """None: the settings say it all."""
        return set()

    def checks(self, settings):
        """The table of positions, and the causal mask that every attention holds on an old PyTorch."""
        length = settings["block_size"]
        return {"wpe.pe": sinusoid(length, settings["n_embd"]), "attn.bias": causal(length)}

    def rules_for(self, form, config) -> RuleTable:
        """See `Family.rules_for`."""
        rules, ignored = self.embedding_rules(form)
        ignored += ["transformer.wpe.pe"]
        for stack, parts in SUBLAYERS.items():
            rules += both(f"transformer.{stack}.norm", f"model.{stack}.norm")
            here, there = f"transformer.{stack}.layers.{{layer}}.", f"model.{stack}.layers.{{layer}}."
            for part, norm, ours in parts:
                rules += both(here + norm, f"{there}{ours}_pre_norm")
                if ours != "mlp":
                    ignored.append(f"{here}{part}.bias")
                for theirs, name in (MLP if ours == "mlp" else ATTENTION).items():
                    rules += both(f"{here}{part}.{theirs}", f"{there}{ours}.{name}")
        return RuleTable(rules, ignored=ignored)

    def our_settings(self, settings, traits):
        """See `ArticleFamily.our_settings`."""
        dropout = float(settings["dropout"])
        biases = ("attention_bias", "attention_output_bias", "mlp_bias", "norm_bias")
        return {
            **STRUCTURES[self.name],
            "vocab_size": settings["vocab_size"],
            "hidden_size": settings["n_embd"],
            "intermediate_size": 4 * settings["n_embd"],
            "num_hidden_layers": settings["n_layer"],
            "num_attention_heads": settings["n_head"],
            "max_position_embeddings": settings["block_size"],
            "tie_word_embeddings": "tie_word_embeddings" in traits,
            **dict.fromkeys(biases, settings["bias"]),
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            **target_ids(settings),
        }


FAMILY = ArticleTransformer("article-transformer", "Transformer", "BlockformerEncoderDecoderForConditionalGeneration")
