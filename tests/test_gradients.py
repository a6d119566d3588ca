"""Every parameter that may learn does: one without a gradient fails in DistributedDataParallel and wastes memory."""

import pytest
import torch
from pairs import token_ids
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
    for auto_class, target in type(blockformer.preset(presets[0])).auto_classes.items()
    if auto_class not in ("AutoConfig", "AutoModel")
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
