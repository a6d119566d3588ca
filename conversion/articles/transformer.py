"""`article-transformer`: `Transformer` with `wte`, `wpe`, `encoder`, `decoder`, which continues its input."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from blockformer.files.errors import ConversionError
from blockformer.model.layer import norm_slots
from blockformer.publishing.repo_code import EXTRA_CODE

from ..families.fresh import four_widths
from ..families.preset import Preset
from ..rules.table import RuleTable, module_rules
from .base import (
    BOTH_STACKS,
    FLAG,
    FRESH,
    OURS,
    SHARE,
    SIZE,
    TARGET_TOKENS,
    Article,
    ArticleFamily,
    Kind,
    target_ids,
)
from .buffers import causal, sinusoid

READINGS = {
    "printed": {**BOTH_STACKS, "norm_placement": "input_pre", "decoder_norm_placement": "input"},
    "formula": BOTH_STACKS,
}
"""Where the norms are, by the article's code or by its formula -> the structure of that model."""
OWN_FRESH = {
    **FRESH,
    "intermediate_size": four_widths,
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "norm_bias"), False),
}
READING: Kind = ("'printed' or 'formula'", lambda value: value in READINGS)
CLEAR = 0.9
"""A reading fits if its loss is at most this share of the other one's."""


def _rows_of(value: Any) -> list:
    """One row of tokens or several, as rows."""
    return value if isinstance(value, list) and value and isinstance(value[0], list) else [value]


def _is_sample(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"input", "targets"}:
        return False
    rows, targets = _rows_of(value["input"]), _rows_of(value["targets"])
    for row in (*rows, *targets):
        if not (isinstance(row, list) and row and all(type(one) is int for one in row)):
            return False
    return {len(row) for row in rows} == {len(rows[0])} and list(map(len, rows)) == list(map(len, targets))


SAMPLE: Kind = ('{"input": [tokens], "targets": [as many tokens]}, or rows of equal length in both', _is_sample)
SUBLAYERS = {
    "encoder": (("attn", "ln1", "self_attn"), ("mlp", "ln2", "mlp")),
    "decoder": (("m_attn", "ln_1", "self_attn"), ("attn", "ln_2", "cross_attn"), ("mlp", "ln_3", "mlp")),
}
"""The sub-layers of a layer in running order: the article's name, its norm's name, ours."""
MLP = {"c_fc": "up_proj", "c_proj": "down_proj"}
ATTENTION = {**{f"c_attns.{index}": name for index, name in enumerate(OURS[:3])}, "c_proj": "o_proj"}
EMBEDDINGS = "transformer.wte.weight"


@dataclass(kw_only=True, eq=False)
class ArticleTransformer(Article):
    """`Transformer`: one embedding for both sides, sinusoids, ReLU.

    The article's formula is x + f(norm(x)). Its code has x replaced by norm(x) first, around attention and, in the
    decoder, the feed-forward network: norm(x) + f(norm(x)). The tensors are the same, so the settings must say which
    of the two has made them, or hold a text of which both are tried.
    """

    topology = "encoder_decoder"
    must_have = {
        **dict.fromkeys(("vocab_size", "block_size", "n_layer", "n_head", "n_embd"), SIZE),
        "dropout": SHARE,
        "bias": FLAG,
    }
    may_have = {"norms": READING, "sample": SAMPLE, "tie_word_embeddings": FLAG, **TARGET_TOKENS}
    heads_of = ("n_embd", "n_head")
    embeddings = {EMBEDDINGS: "model.encoder.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    shared = [("tie_word_embeddings", "lm_head.weight", EMBEDDINGS)]

    def traits(self, names, settings):
        """None: the settings say it all."""
        return set()

    def variant_of(self, official, names=None, read=None):
        """See `Names.variant_of`.

        Raises:
            ConversionError: also where nothing tells the reading.
        """
        variant, settings = super().variant_of(official, names, read), self.checked(official)
        readings = {name: replace(variant, traits=variant.traits | {name}) for name in READINGS}
        told, sample = settings.get("norms"), settings.get("sample")
        if sample is None or read is None:
            if told is None:
                raise ConversionError(
                    "the article's code and its formula put the norms in different places, and the tensors are the "
                    'same: add "norms": "printed" to the settings if the model ran the code as the article prints it, '
                    '"norms": "formula" if it computes x + f(norm(x)); or add a "sample" of its training data, '
                    f"{SAMPLE[0]}, whose loss decides"
                )
            return readings[told]
        spellings = self.spelled(variant)
        tensors = {spellings.to_class(name): read(name) for name in names or ()}
        losses = {name: self._loss(official, each, tensors, sample) for name, each in readings.items()}
        said = ", ".join(f"{loss:.4g} with the norms as {name}" for name, loss in losses.items())
        best, other = sorted(losses, key=lambda name: losses[name])
        if told is None and not losses[best] <= CLEAR * losses[other]:
            raise ConversionError(f'the sample does not show where the norms are (loss {said}): set "norms"')
        return replace(readings[told or best], note=f"loss of the sample: {said}; taken as {told or best}")

    def _loss(self, official, variant, tensors, sample) -> float:
        """The article's loss of a text by one reading: both sides read the input, targets of -1 do not count."""
        config = self.settings.our_config(self.settings.read(official, variant, self.heads[0]))
        groups = self.layout(variant, config).plan(tensors)
        weights = {name: tensor for group in groups for name, tensor in group.apply(tensors.__getitem__)}
        text, targets = (torch.tensor(_rows_of(sample[name])) for name in ("input", "targets"))
        try:
            model = self.heads[0].model_class.from_pretrained(None, config=config, state_dict=weights).eval()
            with torch.no_grad():
                logits = model(text, decoder_input_ids=text).logits.float()
            return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1).item()
        except (ValueError, IndexError) as error:
            raise ConversionError(f"the sample cannot be run: {error}") from error

    def checks(self, settings):
        """The table of positions, and the causal mask that every attention holds on an old PyTorch."""
        length = settings["block_size"]
        return {"wpe.pe": sinusoid(length, settings["n_embd"]), "attn.bias": causal(length)}

    def layout(self, variant, config) -> RuleTable:
        rules, ignored = self.embedding_rules(variant)
        ignored += ["transformer.wpe.pe"]
        for stack, parts in SUBLAYERS.items():
            rules += module_rules({f"transformer.{stack}.norm": f"model.{stack}.norm"})
            here, there = f"transformer.{stack}.layers.{{layer}}.", f"model.{stack}.layers.{{layer}}."
            placement = config.placement_of(stack == "decoder")
            for part, norm, ours in parts:
                (slot,) = norm_slots(config, placement, ours)
                rules += module_rules({here + norm: f"{there}{ours}_{slot}_norm"})
                if ours != "mlp":
                    ignored.append(f"{here}{part}.bias")
                for theirs, name in (MLP if ours == "mlp" else ATTENTION).items():
                    rules += module_rules({f"{here}{part}.{theirs}": f"{there}{ours}.{name}"})
        return RuleTable(rules, ignored=ignored)

    def our_settings(self, settings, traits):
        dropout = float(settings["dropout"])
        biases = ("attention_bias", "attention_output_bias", "mlp_bias", "norm_bias")
        return {
            **next(READINGS[name] for name in READINGS if name in traits),
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


PRESETS = {"article-transformer-printed": Preset("encoder_decoder", {**READINGS["printed"], **OWN_FRESH})}
FAMILY = ArticleFamily(
    "article-transformer",
    "Transformer",
    "BlockformerEncoderDecoderForConditionalGeneration",
    ArticleTransformer(),
    structure=READINGS["formula"],
    fresh=OWN_FRESH,
    extra_code=EXTRA_CODE,
)
