"""The narrowest models of each preset, whose parameters the tests of optimizers share out."""

from transformers import TrainingArguments

import blockformer
from blockformer.presets import PRESETS

HEAD = 8
NARROW = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": HEAD,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# One of each kind of norm, position, feed-forward network and topology.
USUALLY = ("qwen3", "gpt2", "bert", "t5", "umt5", "bart", "marian", "gemma2", "falcon", "bloom", "olmo", "ernie4_5_moe")


def small(preset, **settings):
    """A preset's config at small sizes."""
    if PRESETS[preset][1].get("decoder_start_token_id") is not None:
        settings = {"decoder_start_token_id": 0, **settings}
    return blockformer.preset(preset, **{**NARROW, **settings})


def models_of(a_config):
    """A model of each class that serves a config."""
    names = sorted({target for auto, target in type(a_config).auto_classes.items() if auto != "AutoConfig"})
    for name in names:
        module, _, cls = name.rpartition(".")
        home = getattr(blockformer.model, module)
        yield getattr(home, cls)(a_config)


def arguments(folder, **settings):
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    return TrainingArguments(str(folder), **quiet, dataloader_pin_memory=False, **settings)


def names_of(a_model, groups):
    names = {parameter: name for name, parameter in a_model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in groups]


def of_width(preset, width, **settings):
    """A preset's config at a width of which everything has its share but the size of a head."""
    heads = width // HEAD
    widths = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": heads, "head_dim": HEAD}
    if PRESETS[preset][1].get("num_key_value_heads") != 1:
        widths["num_key_value_heads"] = heads // 2 if preset.startswith("qwen") else heads
    if "num_experts" in PRESETS[preset][1]:
        widths |= {"moe_intermediate_size": width, "num_experts": 4, "num_experts_per_tok": 2}
    if PRESETS[preset][1].get("shared_expert_intermediate_size"):
        widths["shared_expert_intermediate_size"] = width
    return small(preset, **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **widths, **settings})
