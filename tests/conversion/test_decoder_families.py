"""Every family of decoders, a row of settings each: official checkpoint in, the same numbers and text, and back.

A row is a model type and settings of its official config class. `make test` takes the first row of each family, `make
exhaustive` all.
"""

import inspect
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from pairs import assert_close

import blockformer
from blockformer.conversion import convert
from blockformer.conversion.families.registry import FAMILIES

from .oracles import entries_of, stored
from .outputs import count_same_at

SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
SHARED_WINDOW = {
    "shared_expert_intermediate_size": 40,
    "use_sliding_window": True,
    "sliding_window": 8,
    "qkv_bias": False,
    "norm_topk_prob": True,
}


class Row(NamedTuple):
    """A model of a family.

    Attributes:
        family: the official model type.
        settings: of its config, beyond `SIZES` and over them.
        shards: whether its weights are stored in several files.
    """

    family: str
    settings: dict[str, Any] = {}
    shards: bool = False


ROWS = [
    Row("phi3"),
    Row("phi3", {"sliding_window": 8, "resid_pdrop": 0.1}, shards=True),
    Row("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "tie_word_embeddings": True}),
    Row("olmo2"),
    Row("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    Row("olmo2", {"num_key_value_heads": 4, "hidden_act": "gelu", "rms_norm_eps": 1e-3}, shards=True),
    Row("gpt_neox"),
    Row("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, "tie_word_embeddings": True}),
    Row("gpt_neox", {"attention_bias": False, "rotary_pct": 0.5, "hidden_act": "gelu_new"}, shards=True),
    Row("qwen3_moe", QWEN_EXPERTS | {"num_experts_per_tok": 3, "mlp_only_layers": [1]}),
    Row("qwen3_moe", QWEN_EXPERTS | {"norm_topk_prob": True, "attention_bias": True, "head_dim": 16}, shards=True),
    Row("qwen3_moe", QWEN_EXPERTS | {"use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": True}),
    Row("qwen2_moe", QWEN_EXPERTS | {"shared_expert_intermediate_size": 40}),
    Row("qwen2_moe", QWEN_EXPERTS | {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 2}, shards=True),
    Row("qwen2_moe", QWEN_EXPERTS | SHARED_WINDOW),
    Row("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    Row("olmoe", {"num_experts": 4, "num_experts_per_tok": 1, "attention_bias": True, "norm_topk_prob": True}, True),
    Row("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 3}),
    Row("flex_olmo", {"num_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": True}, shards=True),
    Row("dots1", DEEPSEEK_EXPERTS),
    Row("dots1", DEEPSEEK_EXPERTS | {"first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": True}, True),
    Row("dots1", DEEPSEEK_EXPERTS | {"sliding_window": 8, "max_window_layers": 1, "attention_bias": True}),
    Row("ernie4_5_moe", ERNIE_EXPERTS),
    Row("ernie4_5_moe", ERNIE_EXPERTS | {"use_bias": True, "moe_layer_start_index": 0}, shards=True),
    Row("ernie4_5_moe", ERNIE_EXPERTS | {"moe_num_shared_experts": 0, "tie_word_embeddings": False}),
    Row("mixtral", {"num_local_experts": 5}),
    Row("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 8}, shards=True),
    Row("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
]
LABELS = {"ForSequenceClassification": 3, "ForTokenClassification": 5}


def parameters():
    """The rows, those after the first of a family as `exhaustive`."""
    made = []
    for index, row in enumerate(ROWS):
        number = sum(each.family == row.family for each in ROWS[:index])
        marks = [pytest.mark.exhaustive] if number else []
        made.append(pytest.param(row, id=f"{row.family}-{number}", marks=marks))
    return made


def family_of(row):
    if row.family not in FAMILIES:
        pytest.skip(f"transformers {transformers.__version__} has no {row.family}")
    return FAMILIES[row.family]


def official_model(row, head=None):
    """A model of a row, with random biases and norms too."""
    family = family_of(row)
    name = family.model_class_name if head is None else head.official
    labels = next(({"num_labels": count} for ending, count in LABELS.items() if name.endswith(ending)), {})
    names = {field for field, ours in family.fields.items() if ours}
    known = set(inspect.signature(family.official_config_class.__init__).parameters) | names
    sizes = {**SIZES, **labels, **row.settings}
    for theirs, ours in family.fields.items():
        if theirs not in sizes and ours[0] in sizes:
            sizes[theirs] = sizes[ours[0]]
    settings = {key: value for key, value in sizes.items() if key in known or key in row.settings or key in labels}
    torch.manual_seed(0)
    model = getattr(transformers, name)(family.official_config_class(**settings)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "norm" in parameter_name or "statics" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model


def batch(length=20):
    """Two rows of tokens, the second padded on the left."""
    ids = torch.randint(3, SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    return ids, mask


def assert_same_state(one, other):
    state = other.state_dict()
    assert one.state_dict().keys() == state.keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(state[name], tensor), name


@torch.no_grad()
def assert_same_model(ours, theirs):
    """Logits of padded rows, step by step with a cache, and text in two ways."""
    ids, mask = batch()
    assert count_same_at(mask.bool(), ours(ids, attention_mask=mask), theirs(ids, attention_mask=mask), spread=0.3)
    caches: list[Any] = [None, None]
    for part in (ids[:1, :17], ids[:1, 17:18], ids[:1, 18:]):
        outputs = [
            model(part, past_key_values=cache, use_cache=True)
            for model, cache in zip((ours, theirs), caches, strict=True)
        ]
        caches = [output.past_key_values for output in outputs]
        assert_close(*(output.logits for output in outputs))
    for way in ({}, {"num_beams": 3}):
        settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0, **way}
        texts = [model.generate(ids, **settings) for model in (ours, theirs)]
        assert torch.equal(*texts)


@pytest.mark.versions
@pytest.mark.parametrize("row", parameters())
def test_there_and_back_with_the_same_numbers_and_text(tmp_path, row):
    theirs = official_model(row)
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    theirs.save_pretrained(src, max_shard_size="20KB" if row.shards else "5GB")
    assert len(list(src.glob("*.safetensors"))) > row.shards
    assert convert(src, dst, verify=False).family == row.family
    ours = blockformer.BlockformerDecoderForCausalLM.from_pretrained(dst)
    assert_same_model(ours, theirs)
    convert(dst, back, to_official=True, verify=False)
    assert stored(back) == stored(src)
    assert entries_of(back) == entries_of(src)
    again, info = type(theirs).from_pretrained(back, output_loading_info=True)
    assert not any(info.values())
    assert_same_state(again, theirs)

    (dst / "conversion.json").unlink()  # without a memory of the source
    convert(dst, tmp_path / "fresh", to_official=True, family=row.family, verify=False)
    assert stored(tmp_path / "fresh") == stored(src)
    fresh = type(theirs).from_pretrained(tmp_path / "fresh")
    ids, mask = batch()
    with torch.no_grad():
        assert torch.equal(*(model(ids, attention_mask=mask).logits for model in (fresh, theirs)))


HEADS = [
    (row, head) for family, row in {row.family: row for row in reversed(ROWS)}.items() if family in FAMILIES
    for head in FAMILIES[family].heads[1:]
]  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize(("row", "head"), HEADS, ids=lambda value: getattr(value, "official", ""))
def test_the_other_heads(tmp_path, row, head):
    theirs = official_model(row, head)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    assert type(ours).__name__ == head.ours
    ids, mask = batch()
    tensors = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        assert count_same_at(mask.bool(), ours(**tensors), theirs(**tensors), spread=0.1)
