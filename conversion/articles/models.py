"""The models of three articles, read from the state dicts that their code saves (`docs/articles.md`).

`article-gpt` is `MyGPTModel`; `article-encoder-decoder` is the pre-norm encoder-decoder of `EncoderBlock`,
`DecoderBlock` and `ResidualConnection`; `article-transformer` is `Transformer` with `wte`, `wpe`, `encoder`, `decoder`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import ConversionError
from ..families.fields import Form
from ..rules.operations import Identity, Operation, Shape
from ..rules.table import Rule, RuleTable
from .base import (
    FLAG,
    POSITIVE,
    SHARE,
    SIZE,
    TARGET_TOKENS,
    TOKENS,
    ArticleFamily,
    causal,
    one_of,
    sinusoid,
)

KINDS = ("weight", "bias")
QUERIES_KEYS_VALUES = (
    ("W_query", "W_key", "W_value"),
    ("W_q", "W_k", "W_v"),
    ("q_proj", "k_proj", "v_proj"),
)
OUTPUTS = (("out_proj",), ("o_proj",), ("W_o",), ("proj",))
MASKS = ("mask", "mask_matrix")
OURS = ("q_proj", "k_proj", "v_proj")
SELF, CROSS = ("self_attn", "self_attn_pre_norm"), ("cross_attn", "cross_attn_pre_norm")
MLP = ("mlp", "mlp_pre_norm")
SUBLAYERS = {"encoder": (SELF, MLP), "decoder": (SELF, CROSS, MLP)}
"""The sub-layers of our layers, each with its norm, in running order."""
PLAIN_PRE_NORM = {
    "norm_type": "layer_norm",
    "norm_placement": "pre",
    "final_norm": True,
    "gated_mlp": False,
    "tie_word_embeddings": False,
}


def both(theirs: str, ours: str) -> list[Rule]:
    """Rules for a module's weight and bias."""
    return [Rule(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in KINDS]


def token_ids(settings: Mapping[str, Any]) -> dict[str, int]:
    """The special tokens named in the settings."""
    return {name: settings[name] for name in TARGET_TOKENS if name in settings}


def target_ids(settings: Mapping[str, Any]) -> dict[str, int]:
    """The same for an encoder-decoder, whose decoder starts with `bos` unless another start token is named."""
    ids = token_ids(settings)
    return {"decoder_start_token_id": ids["bos_token_id"], **ids} if "bos_token_id" in ids else ids


@dataclass(frozen=True)
class UnbiasedNorm:
    """The weight of a norm that divides by the standard deviation with C - 1 in it -> that of one with C.

    w (x - m) / s' with s' = s sqrt(C / (C - 1)) is w sqrt((C - 1) / C) (x - m) / s. It rounds once, so there is no
    exact way back.
    """

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`alpha` [C] -> the weight [C], in float64."""
        return [tensor.double() * ((len(tensor) - 1) / len(tensor)) ** 0.5 for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Not exact, so refused."""
        raise ConversionError("a norm by the unbiased standard deviation is read and not written")

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The same shapes."""
        if any(len(shape) != 1 for shape in shapes):
            raise ConversionError(
                f"alpha is {[list(shape) for shape in shapes]}, it must be one number for each feature"
            )
        return list(shapes)

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The same shapes."""
        return list(shapes)


class ArticleGPT(ArticleFamily):
    """`MyGPTModel`: learned positions, pre-norm, tanh GELU, a head of its own without bias.

    The class of the attention is imported in the article and not printed; its tensors are known by how they are named.
    """

    must_have = {
        **dict.fromkeys(("vocab_size", "max_seq_length", "embedding_dim", "n_heads", "n_layers"), SIZE),
        "drop_rate": SHARE,
        "qkv_bias": FLAG,
    }
    may_have = TOKENS
    heads_of = ("embedding_dim", "n_heads")
    mha = "transformer_blocks.{layer}.mha."

    def traits(self, names: Collection[str]) -> set[str]:
        """The spelling of the attention's projections, and "output bias" where there is one."""
        parts = [name.split(".") for name in names if name.startswith("transformer_blocks.") and ".mha." in name]
        inner = {".".join(part[3:]) for part in parts}
        modules = {name.rpartition(".")[0] or name for name in inner} - set(MASKS)
        if not modules:
            return {*QUERIES_KEYS_VALUES[0], *OUTPUTS[0]}  # the rule table says what is there instead
        what = "the projections of transformer_blocks.N.mha"
        named = one_of([(*qkv, *out) for qkv in QUERIES_KEYS_VALUES for out in OUTPUTS], modules, what)
        return {*named} | ({"output bias"} if f"{named[-1]}.bias" in inner else set())

    def checks(self, settings):
        """The causal mask that the attention may hold as a buffer."""
        return {f".mha.{name}": causal(settings["max_seq_length"]) for name in MASKS}

    def rules_for(self, form: Form, config) -> RuleTable:
        """See `Family.rules_for`."""
        qkv = next(names for names in QUERIES_KEYS_VALUES if names[0] in form.traits)
        (out,) = next(names for names in OUTPUTS if names[0] in form.traits)
        block, layer = "transformer_blocks.{layer}.", "model.layers.{layer}."
        rules = [
            Rule("token_embedding.weight", "model.embed_tokens.weight"),
            Rule("position_embedding.weight", "model.embed_positions.weight"),
            *both("layer_norm", "model.norm"),
            Rule("out_head.weight", "lm_head.weight"),
        ]
        modules = {
            **{f"mha.{theirs}": f"self_attn.{ours}" for theirs, ours in zip(qkv, OURS, strict=True)},
            f"mha.{out}": "self_attn.o_proj",
            "ffn.layers.0": "mlp.up_proj",
            "ffn.layers.2": "mlp.down_proj",
            "norm_1": "self_attn_pre_norm",
            "norm_2": "mlp_pre_norm",
        }
        rules += [rule for theirs, ours in modules.items() for rule in both(block + theirs, layer + ours)]
        return RuleTable(rules, ignored=[self.mha + name for name in MASKS])

    def our_settings(self, settings, traits):
        """See `ArticleFamily.our_settings`."""
        return {
            **PLAIN_PRE_NORM,
            "vocab_size": settings["vocab_size"],
            "hidden_size": settings["embedding_dim"],
            "intermediate_size": 4 * settings["embedding_dim"],
            "num_hidden_layers": settings["n_layers"],
            "num_attention_heads": settings["n_heads"],
            "norm_eps": 1e-5,
            "position_type": "learned",
            "max_position_embeddings": settings["max_seq_length"],
            "hidden_act": "gelu_new",
            "attention_bias": settings["qkv_bias"],
            "attention_output_bias": "output bias" in traits,
            "mlp_bias": True,
            "hidden_dropout": float(settings["drop_rate"]),
            "attention_dropout": float(settings["drop_rate"]),
            **token_ids(settings),
        }


class ArticleEncoderDecoder(ArticleFamily):
    """Two stacks of pre-norm layers with a vocabulary each, sinusoids, ReLU, and a norm at the end of each stack.

    The norm is PyTorch's, or one that divides by the unbiased standard deviation plus a small number. The latter
    becomes the former with `eps**2` under the root: both differ by about `eps` / standard deviation.
    """

    must_have = {
        **dict.fromkeys(("d_model", "d_ff", "h", "N"), SIZE),
        "dropout": SHARE,
        **dict.fromkeys(("src_vocab_size", "tgt_vocab_size", "src_seq_len", "tgt_seq_len"), SIZE),
    }
    may_have = {"eps": POSITIVE, **TARGET_TOKENS}
    heads_of = ("d_model", "h")
    stacks = {
        "encoder": ("self_attention_block", "feed_forward_block"),
        "decoder": ("self_attention_block", "cross_attention_block", "feed_forward_block"),
    }
    biases = {
        "attention bias": (".w_q.bias", ".w_k.bias", ".w_v.bias"),
        "output bias": (".w_o.bias",),
        "mlp bias": (".linear_1.bias", ".linear_2.bias"),
        "head bias": ("projection_layer.proj.bias",),
        "norm bias": (".norm.bias",),
    }

    def traits(self, names: Collection[str]) -> set[str]:
        """Which biases there are, and "alpha" for the norm of the article's own."""
        traits = {trait for trait, ends in self.biases.items() if any(name.endswith(ends) for name in names)}
        norms = {name.rpartition(".")[2] for name in names if ".norm." in name} - {"bias"}
        if norms:
            traits.add(one_of([("weight",), ("alpha",)], norms, "the norms")[0])
        return traits

    def checks(self, settings):
        """The tables of positions."""
        sides = {"src_pos.pe": "src_seq_len", "tgt_pos.pe": "tgt_seq_len"}
        return {name: sinusoid(settings[length], settings["d_model"]) for name, length in sides.items()}

    def rules_for(self, form: Form, config) -> RuleTable:
        """See `Family.rules_for`."""
        alpha = "alpha" in form.traits

        def norm(theirs: str, ours: str) -> list[Rule]:
            op: Operation = UnbiasedNorm() if alpha else Identity()
            weight = Rule(f"{theirs}.{'alpha' if alpha else 'weight'}", f"{ours}.weight", op)
            return [weight, Rule(f"{theirs}.bias", f"{ours}.bias")]

        rules = [
            Rule("src_embed.embedding.weight", "model.encoder.embed_tokens.weight"),
            Rule("tgt_embed.embedding.weight", "model.decoder.embed_tokens.weight"),
            *both("projection_layer.proj", "lm_head"),
        ]
        for stack, parts in self.stacks.items():
            rules += norm(f"{stack}.norm", f"model.{stack}.norm")
            here, there = f"{stack}.layers.{{layer}}.", f"model.{stack}.layers.{{layer}}."
            for index, (part, (own, own_norm)) in enumerate(zip(parts, SUBLAYERS[stack], strict=True)):
                rules += norm(f"{here}residual_connections.{index}.norm", there + own_norm)
                modules = {f"w_{name}": f"{name}_proj" for name in "qkvo"}
                if own == "mlp":
                    modules = {"linear_1": "up_proj", "linear_2": "down_proj"}
                for theirs, name in modules.items():
                    rules += both(f"{here}{part}.{theirs}", f"{there}{own}.{name}")
        return RuleTable(rules, ignored=["src_pos.pe", "tgt_pos.pe"])

    def our_settings(self, settings, traits):
        """See `ArticleFamily.our_settings`."""
        dropout = float(settings["dropout"])
        eps = settings.get("eps", 1e-6) ** 2 if "alpha" in traits else settings.get("eps", 1e-5)
        return {
            **PLAIN_PRE_NORM,
            "vocab_size": settings["src_vocab_size"],
            "decoder_vocab_size": settings["tgt_vocab_size"],
            "share_embeddings": False,
            "hidden_size": settings["d_model"],
            "intermediate_size": settings["d_ff"],
            "num_hidden_layers": settings["N"],
            "num_attention_heads": settings["h"],
            "norm_eps": float(eps),
            "norm_bias": "norm bias" in traits,
            "position_type": "sinusoidal",
            "max_position_embeddings": max(settings["src_seq_len"], settings["tgt_seq_len"]),
            "embedding_scale": settings["d_model"] ** 0.5,
            "hidden_act": "relu",
            "attention_bias": "attention bias" in traits,
            "attention_output_bias": "output bias" in traits,
            "mlp_bias": "mlp bias" in traits,
            "lm_head_bias": "head bias" in traits,
            **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), dropout),
            **target_ids(settings),
        }


class ArticleTransformer(ArticleFamily):
    """`Transformer`: one embedding for both sides, sinusoids, pre-norm by the formula x + f(norm(x)), ReLU."""

    must_have = {
        **dict.fromkeys(("vocab_size", "block_size", "n_layer", "n_head", "n_embd"), SIZE),
        "dropout": SHARE,
        "bias": FLAG,
    }
    may_have = TARGET_TOKENS
    heads_of = ("n_embd", "n_head")
    stacks = {
        "encoder": (("attn", "ln1"), ("mlp", "ln2")),
        "decoder": (("m_attn", "ln_1"), ("attn", "ln_2"), ("mlp", "ln_3")),
    }

    def traits(self, names: Collection[str]) -> set[str]:
        """None: the settings say it all."""
        return set()

    def checks(self, settings):
        """The table of positions, and the causal mask that every attention holds on an old PyTorch."""
        length = settings["block_size"]
        return {"wpe.pe": sinusoid(length, settings["n_embd"]), "attn.bias": causal(length)}

    def rules_for(self, form: Form, config) -> RuleTable:
        """See `Family.rules_for`."""
        rules = [
            Rule("transformer.wte.weight", "model.encoder.embed_tokens.weight"),
            Rule("lm_head.weight", "lm_head.weight"),
        ]
        ignored = ["transformer.wpe.pe"]
        for stack, parts in self.stacks.items():
            rules += both(f"transformer.{stack}.norm", f"model.{stack}.norm")
            here, there = f"transformer.{stack}.layers.{{layer}}.", f"model.{stack}.layers.{{layer}}."
            for (part, norm), (own, own_norm) in zip(parts, SUBLAYERS[stack], strict=True):
                rules += both(here + norm, there + own_norm)
                modules = {"c_fc": "up_proj", "c_proj": "down_proj"}
                if own != "mlp":
                    modules = {**{f"c_attns.{i}": name for i, name in enumerate(OURS)}, "c_proj": "o_proj"}
                    ignored.append(f"{here}{part}.bias")
                for theirs, name in modules.items():
                    rules += both(f"{here}{part}.{theirs}", f"{there}{own}.{name}")
        return RuleTable(rules, ignored=ignored)

    def our_settings(self, settings, traits):
        """See `ArticleFamily.our_settings`."""
        dropout = float(settings["dropout"])
        biases = ("attention_bias", "attention_output_bias", "mlp_bias", "norm_bias")
        return {
            **PLAIN_PRE_NORM,
            "vocab_size": settings["vocab_size"],
            "share_embeddings": True,
            "hidden_size": settings["n_embd"],
            "intermediate_size": 4 * settings["n_embd"],
            "num_hidden_layers": settings["n_layer"],
            "num_attention_heads": settings["n_head"],
            "norm_eps": 1e-5,
            "position_type": "sinusoidal",
            "max_position_embeddings": settings["block_size"],
            "hidden_act": "relu",
            **dict.fromkeys(biases, settings["bias"]),
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            **target_ids(settings),
        }


FAMILIES = (
    ArticleGPT("article-gpt", "MyGPTModel", "BlockformerDecoderForCausalLM"),
    ArticleEncoderDecoder(
        "article-encoder-decoder", "Transformer", "BlockformerEncoderDecoderForConditionalGeneration"
    ),
    ArticleTransformer("article-transformer", "Transformer", "BlockformerEncoderDecoderForConditionalGeneration"),
)
