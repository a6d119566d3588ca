"""Every parameter that may learn does: one without a gradient fails in DistributedDataParallel and wastes memory.

And padding that a label trains, the token before a text's first, has the gradients of the official class.
"""

import pytest
import torch
import transformers
from pairs import assert_gradients_close, left_padded, token_ids
from sizes import TINY, TOKENS

import blockformer

SIZES = {**TINY, **TOKENS, "vocab_size": 199}
DENSE = {"deepseek_v3": {"num_experts": 0}}  # of experts, those that no token takes have no gradient
# Of each topology what has the most parts.
MOST = {"encoder": ["bert"], "decoder": ["qwen3", "gpt2", "deepseek_v3"], "encoder_decoder": ["marian", "bart", "umt5"]}
HEADS = [
    (preset, target.rpartition(".")[2])
    for kind, presets in MOST.items()
    for preset in presets
    for target in dict.fromkeys(type(blockformer.preset(presets[0])).auto_classes.values())
    if not target.endswith(("Config", "Model"))
]


def labels_of(name, ids):
    """What the head learns from, for tokens [B, T]."""
    rows = torch.arange(len(ids)) % 2
    if name.endswith("QuestionAnswering"):
        return {"start_positions": rows, "end_positions": rows + 1}
    if name.endswith("PreTraining"):
        return {"labels": ids, "next_sentence_label": rows}
    if name.endswith("TokenClassification"):
        return {"labels": ids % 2}
    per_row = name.endswith(("SequenceClassification", "NextSentencePrediction"))
    return {"labels": rows if per_row else ids}


def model_and_inputs(preset, name):
    """A small model of a preset, by the name of its class, and what it reads and learns from."""
    torch.manual_seed(0)
    config = blockformer.preset(
        preset,
        **SIZES,
        **DENSE.get(preset, {}),
        **({"decoder_start_token_id": 1} if preset in ("marian", "bart") else {}),
    )
    ids = token_ids(4, 10)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **labels_of(name, ids)}
    if name.endswith("MultipleChoice"):
        given = {"input_ids": ids.view(2, 2, 10), "labels": torch.tensor([0, 1])}
    return getattr(blockformer, name)(config), given


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["whole", "reentrant", "not reentrant"])
@pytest.mark.parametrize(("preset", "name"), HEADS)
def test_every_parameter_of_every_head_has_a_gradient(preset, name, checkpointing):
    model, given = model_and_inputs(preset, name)
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    model(**given).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None] == []


OFFICIAL = {
    "Gemma2": {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 4, "query_pre_attn_scalar": 16},
    "GptOss": {"head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.3},
}


@pytest.mark.parametrize("family", OFFICIAL)
def test_padding_that_a_label_trains_has_the_official_gradients(family, tmp_path):
    """With a soft cap, with sinks, and with a position of padding's own."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 199, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **OFFICIAL[family])
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids, mask = left_padded(3, 9)
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if family != "OPT":
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    theirs(**given).loss.backward()
    ours = blockformer.from_official(tmp_path).eval()
    ours(**given).loss.backward()
    gradients = [sorted(weight.grad.norm() for weight in model.parameters()) for model in (ours, theirs)]
    assert len(gradients[0]) == len(gradients[1])
    assert_gradients_close(*(dict(enumerate(each)) for each in gradients))


@pytest.mark.parametrize("prepared", [False, True])
def test_padding_that_a_label_trains_has_the_official_gradients_with_a_bias_of_scores(prepared, tmp_path):
    """BLOOM's tokenizer pads on the left: the last padding token, which sees nothing, learns a text's first token."""
    sizes = {"vocab_size": 199, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    theirs = transformers.BloomForCausalLM(
        transformers.BloomConfig(**sizes, hidden_size=32, n_layer=2, n_head=4)
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).eval()
    ids, mask = left_padded(3, 9)
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    gradients = []
    for each in (ours.prepare_for_training() if prepared else ours, theirs):
        each(**given).loss.backward()
        whole = torch.stack([weight.grad.norm() for weight in each.parameters()]).norm()
        gradients.append({"whole": whole, "embeddings": each.get_input_embeddings().weight.grad})
    assert_gradients_close(*gradients)
