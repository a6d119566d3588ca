"""A text through models of every kind: maps, states and words of each layer, and the model's own numbers."""

import base64
import zlib

import pytest
import torch
from sizes import TINY

import blockformer
from blockformer.page.reading import read

SMALL = {**TINY, "num_hidden_layers": 4, "vocab_size": 512}
SMALL |= {"pad_token_id": 1, "eos_token_id": 0, "bos_token_id": None}
TEXT = "def heappush(heap, item): the smallest item of the heap comes first"
CAUSAL, MASKED = "BlockformerDecoderForCausalLM", "BlockformerEncoderForMaskedLM"
CASES = {
    "albert": (MASKED, {"embedding_size": 16, "initializer_range": 0.3}),
    "bert": (MASKED, {}),
    "deberta-v2": (MASKED, {}),
    "modernbert": (MASKED, {"sliding_window": 4}),
    "mpnet": (MASKED, {}),
    "bert-decoder": (CAUSAL, {}),
    "bloom": (CAUSAL, {}),
    "gemma3_text": (CAUSAL, {"num_hidden_layers": 8, "sliding_window": 5, "embedding_scale": 5.0}),
    "gpt_neox": (CAUSAL, {}),
    "gpt_oss": (CAUSAL, {"sliding_window": 5, "moe_intermediate_size": 16}),
    "mixtral": (CAUSAL, {"moe_intermediate_size": 16}),
    "qwen3": (CAUSAL, {"num_key_value_heads": 2, "pruned_heads": {1: [2, 3]}}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model_reads_a_text(name, tiny_tokenizer):
    architecture, settings = CASES[name]
    config = blockformer.preset(name, **{**SMALL, **settings})
    model = getattr(blockformer, architecture)(config).eval()
    told = read(model, tiny_tokenizer, TEXT, 20)
    assert told["note"].startswith("The first 20 of ")
    (side,), (group,) = told["sides"], told["maps"]
    layers = config.num_hidden_layers
    assert (len(side["tokens"]), len(side["norms"]), len(group["heads"])) == (20, layers + 1, layers)
    assert group["heads"] == [len(config.heads_of(layer)) for layer in range(layers)]
    ids = tiny_tokenizer(TEXT, return_tensors="pt", truncation=True, max_length=20)["input_ids"]
    with torch.no_grad():
        output = model(ids, output_attentions=True)
    content = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(group["data"]))), dtype=torch.uint8)
    for ours, theirs in zip(content.view(-1, 20, 20).split(group["heads"]), output.attentions, strict=True):
        assert (ours / 255 - theirs[0]).abs().max() <= 0.5 / 255 + 1e-6
    shares = output.logits[0].softmax(-1).topk(5).values
    for place, line in enumerate(side["lens"]["said"][-1]):
        assert line[1::2] == pytest.approx((shares[place] * 1e4).tolist(), abs=1)


def test_a_model_without_a_head_says_no_words(tiny_tokenizer):
    model = blockformer.BlockformerEncoderModel(blockformer.preset("bert", **SMALL)).eval()
    told = read(model, tiny_tokenizer, TEXT, 8)
    assert told["sides"][0]["lens"] is None
    assert "no language model head" in told["reads"]
