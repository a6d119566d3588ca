"""Random configs of every topology, with weights that say something of float32, and one way to call them all.

The weights have deviations of 1/sqrt(inputs), embeddings of 1: the text depends on the prompt, and float32 rounds to
about a third of the bound of 1e-5 (`test_numbers.py` measures both). Larger ones blow rounding up, in the models of
transformers too, so that a test of them could only widen the bound.
"""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sizes import TINY
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import blockformer
from blockformer.model.axes import axes
from blockformer.model.positions import adds_to_scores

# The fields with a closed list of values.
CHOICES = {
    name: axis.values
    for name, axis in axes(blockformer.BlockformerDecoderConfig).items()
    if isinstance(axis.values, tuple) and True not in axis.values
}
VOCAB = 61
SIZES = {**TINY, "vocab_size": VOCAB, "max_position_embeddings": 40, "pad_token_id": 0}
MODELS = {
    "encoder": (blockformer.BlockformerEncoderConfig, blockformer.BlockformerEncoderForMaskedLM, {}),
    "decoder": (blockformer.BlockformerDecoderConfig, blockformer.BlockformerDecoderForCausalLM, {}),
    "decoder with cross-attention": (
        blockformer.BlockformerDecoderConfig,
        blockformer.BlockformerDecoderForCausalLM,
        {"add_cross_attention": True},
    ),
    "encoder-decoder": (
        blockformer.BlockformerEncoderDecoderConfig,
        blockformer.BlockformerEncoderDecoderForConditionalGeneration,
        {"decoder_start_token_id": 1},
    ),
}
TOPOLOGIES = tuple(MODELS)
WRITERS = TOPOLOGIES[1:]
# Relative terms are no business of a backend that takes no bias.
ABSOLUTE = tuple(name for name in CHOICES["position_type"] if not adds_to_scores(name))
ROPES = (
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 20},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    | {"original_max_position_embeddings": 30},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 20},
)
BOOLEANS = (
    "gated_mlp attention_bias attention_output_bias mlp_bias embedding_norm lm_head_transform tie_word_embeddings"
).split()
AXES = st.fixed_dictionaries(
    {name: st.booleans() for name in BOOLEANS}
    | {
        "qk_norm": st.sampled_from([False, True, "rotated"]),
        "lm_head_bias": st.sampled_from([False, True, "fixed"]),
        "norm_type": st.sampled_from(CHOICES["norm_type"]),
        "norm_weight": st.sampled_from(CHOICES["norm_weight"]),
        "norm_placement": st.sampled_from(CHOICES["norm_placement"]),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "hidden_act": st.sampled_from(["silu", "gelu", "relu"]),
        "attention_scale": st.sampled_from([None, 0.5, 1.0]),
        "embedding_scale": st.sampled_from([None, 2.0]),
        "logit_scale": st.sampled_from([1.0, 0.5]),
        "type_vocab_size": st.sampled_from([0, 2]),
        "num_hidden_layers": st.integers(1, 3),
    }
)


@dataclasses.dataclass(frozen=True)
class Mix:
    """A topology, the fields of its config, and the seed of its weights."""

    topology: str
    fields: dict
    seed: int


@st.composite
def mixes(draw, topologies=TOPOLOGIES, position_types=CHOICES["position_type"]):
    """Any mix of the axes, within what a config allows."""
    topology, fields = draw(st.sampled_from(topologies)), draw(AXES)
    if topology != "decoder":
        position_types = [name for name in position_types if name != "alibi"]
    if topology != "encoder":
        position_types = [name for name in position_types if name != "disentangled"]
    fields["position_type"] = position_type = draw(st.sampled_from(position_types))
    if position_type == "rotary":
        fields["rope_parameters"] = dict(draw(st.sampled_from(ROPES)))
    elif position_type == "learned":
        fields["position_offset"] = offset = draw(st.sampled_from([0, 2]))
        # The texts of a decoder go on from a cache, which does not say what was padding by its token.
        kinds = ["index"] + ["before"] * (offset > 0) + ["by_token"] * (offset > 0 and topology == "encoder")
        fields["padding_position"] = draw(st.sampled_from(kinds))
    elif position_type == "disentangled":
        fields |= {"qk_norm": False, "num_key_value_heads": 4, "relative_attention_num_buckets": 8}
    elif position_type == "relative_bias":
        fields["relative_bias_per_layer"] = draw(st.booleans())
        fields["relative_attention_num_buckets"] = draw(st.sampled_from([4, 8, 32]))
    if fields["norm_type"] == "layer_norm" and fields["norm_weight"] != "none":
        fields["norm_bias"] = draw(st.booleans())
    if fields["norm_placement"] == "pre":
        fields["final_norm"] = draw(st.booleans())
        if topology in ("encoder", "decoder"):
            fields["residual"] = draw(st.sampled_from(CHOICES["residual"]))
    if topology != "encoder" and position_type in ABSOLUTE:
        kinds = [draw(st.sampled_from(["full_attention", "sliding_attention"]))] * fields["num_hidden_layers"]
        kinds[0] = draw(st.sampled_from(["full_attention", "sliding_attention"]))
        if "sliding_attention" in kinds:
            fields |= {"layer_types": kinds, "sliding_window": draw(st.integers(2, 9))}
    has_latents = topology == "decoder" and position_type == "rotary" and draw(st.booleans())
    if has_latents:
        fields |= {"kv_lora_rank": draw(st.sampled_from([5, 20])), "q_lora_rank": draw(st.sampled_from([None, 24]))}
        fields |= {"head_dim": 16, "v_head_dim": draw(st.sampled_from([None, 6])), "qk_norm": False}
        fields["rope_parameters"]["partial_rotary_factor"] = 0.5
        fields |= {"num_key_value_heads": 4, "layer_types": None, "sliding_window": None}
    if topology.startswith("decoder"):
        fields["token_embedding_size"] = draw(st.sampled_from([None, 20]))
    if topology == "encoder":
        fields["num_hidden_groups"] = draw(st.sampled_from([None, 1, fields["num_hidden_layers"]]))
        fields["token_types_as_tokens"] = draw(st.booleans())
    group = {2: [0, 1], 4: [3]}.get(fields["num_key_value_heads"])  # heads that share a key
    can_prune = not (position_type == "disentangled" or has_latents or fields.get("num_hidden_groups"))
    if group and can_prune and topology != "encoder-decoder":
        fields["pruned_heads"] = draw(st.sampled_from([None, {0: group}]))
    if topology == "encoder-decoder":
        fields["decoder_layers"] = draw(st.integers(1, 3))
        fields["decoder_intermediate_size"] = draw(st.sampled_from([None, 24]))
        if fields["norm_placement"] != "post":
            fields["decoder_norm_placement"] = draw(st.sampled_from([None, "pre", "output", "input"]))
        fields["share_embeddings"] = draw(st.booleans())
        fields["merged_attention"] = position_type in ("rotary", "none") and draw(st.booleans())
        fields["centered_window"] = "sliding_window" in fields and draw(st.booleans())
        if not fields["share_embeddings"]:
            fields["decoder_vocab_size"] = draw(st.sampled_from([None, 53]))
    return Mix(topology, fields, draw(st.integers(0, 9999)))


def property_test(few: int, many: int, **strategies):
    """A test of a property: `few` examples in the ordinary suite, `many` with the marker `exhaustive`.

    They are always the same, except with `--fresh-seeds`, as the exhaustive run has it. The checked function takes what
    the strategies draw.
    """

    def decorate(check):
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.exhaustive)])
        def test(examples):
            quiet = settings(
                max_examples=examples,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            )
            quiet(given(**strategies)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


@torch.no_grad()
def draw_weights(model, seed: int):
    """Every weight random, biases and norms too, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parameter.normal_(generator=generator)
        if parameter.dim() == 1:
            parameter.mul_(0.3).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        elif not ("embed" in name or "relative" in name) or (tied and "embed_tokens.weight" in name):
            parameter.mul_(parameter.shape[1] ** -0.5)
    return model.eval()


class Subject:
    """A model of a mix and how its topology is called; the tokens are those whose logits come out."""

    def __init__(self, mix: Mix, **overrides):
        config_class, model_class, own = MODELS[mix.topology]
        self.topology = mix.topology
        self.config = config_class(**{**SIZES, **own, **mix.fields, **overrides})
        self.model = draw_weights(model_class(self.config), mix.seed)
        self.has_two_stacks = mix.topology == "encoder-decoder"
        self.decoder_config = self.config.get_text_config(decoder=True)

    def tokens(self, rows, length, seed=0):
        """int [rows, length], none of them special."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.decoder_config.vocab_size, (rows, length), generator=generator)

    def source(self, rows, seed=1):
        """What the tokens look at besides themselves: nothing, states, or a source text; its last row is padded."""
        if self.topology in ("encoder", "decoder"):
            return {}
        generator, mask = torch.Generator().manual_seed(seed), torch.ones(rows, 7, dtype=torch.long)
        mask[-1, 4:] = 0
        if self.has_two_stacks:
            return {"input_ids": torch.randint(3, VOCAB, (rows, 7), generator=generator), "attention_mask": mask}
        states = torch.randn(rows, 7, SIZES["hidden_size"], generator=generator)
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    def padded(self, lengths, side="right"):
        """Tokens and their mask, both [rows, longest], for rows of these lengths, and what they look at."""
        mask = rows_of(lengths, side)
        return self.tokens(*mask.shape), mask, self.source(len(lengths))

    def __call__(self, ids, mask=None, source=None, **keywords):
        """The outputs; `mask` is that of `ids`."""
        prefix = "decoder_" if self.has_two_stacks else ""
        given = {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}
        return self.model(**given, **(source or {}), **keywords)

    def cache(self, kind, length):
        """An empty cache: "growing" is ours, "dynamic" and "static" are the library's."""
        has_cross = "attention" in self.topology or self.has_two_stacks
        if kind == "growing":
            return self.model.get_decoder().new_cache(for_cross_attention=has_cross)
        if kind == "dynamic":
            own = DynamicCache(config=self.decoder_config)
            return EncoderDecoderCache(own, DynamicCache()) if has_cross else own
        own = StaticCache(config=self.decoder_config, max_cache_len=length)
        return EncoderDecoderCache(own, DynamicCache()) if has_cross else own

    def write(self, ids, mask, source, tokens=6, **settings):
        """Greedy tokens after `ids` [rows, `tokens`]; two stacks begin with the start token and take no `ids`."""
        settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, **settings}
        if self.has_two_stacks:
            return self.model.generate(**source, **settings)[:, 1:]
        return self.model.generate(ids, attention_mask=mask, **source, **settings)[:, ids.shape[1] :]


def rows_of(lengths, side):
    """A mask [rows, longest] of rows of these lengths, padded on a side."""
    places = torch.arange(max(lengths))
    places = places.flip(0) if side == "left" else places
    return (places < torch.tensor(lengths)[:, None]).long()
