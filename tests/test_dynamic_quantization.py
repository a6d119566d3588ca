"""PyTorch's dynamic quantization, whose layers have a method for a weight. Oracle: transformers' models, likewise."""

import pytest
import torch
from pairs import assert_close, pair, token_ids
from torch.ao.quantization import quantize_dynamic
from transformers import T5Config, T5ForConditionalGeneration

import blockformer

# torch announces the end of both; until then people use them.
pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.ao.quantization|torch.quantize_per_tensor).*")


def t5(folder, **settings):
    """Ours and transformers' T5 with the same weights, which keeps its down projections in float32 under float16."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 199, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    theirs = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **settings)).eval()
    theirs.save_pretrained(folder)
    return blockformer.from_official(folder).eval(), theirs


@pytest.mark.parametrize("family", ["t5", "t5-v1.1", "qwen3"])
def test_a_quantized_model_is_the_quantized_official_one(family, tmp_path):
    ids = token_ids(2, 9)
    if family == "qwen3":
        models, inputs = pair(initializer_range=0.1), {"input_ids": ids}
    else:
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if family == "t5-v1.1" else {}
        models, inputs = t5(tmp_path, **gated), {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    quantized = [quantize_dynamic(model, {torch.nn.Linear}) for model in models]
    with torch.no_grad():
        found, wanted, exact = (model(**inputs).logits for model in (*quantized, models[0]))
        assert_close(found, wanted)
        assert (found - exact).abs().max() > 1e-3 * exact.abs().max()
        texts = [model.generate(ids, max_new_tokens=8, do_sample=False) for model in quantized]
    assert torch.equal(*texts)


def test_a_model_is_quantized_first_and_prepared_afterwards():
    """Of a prepared one `quantize_dynamic` finds no layer: it looks for `nn.Linear` itself, not for a subclass."""
    ids = token_ids(2, 9)
    ours, theirs = (quantize_dynamic(model, {torch.nn.Linear}) for model in pair(initializer_range=0.1))
    ours.prepare_for_inference()
    with torch.no_grad():
        assert_close(ours(ids).logits, theirs(ids).logits)
    texts = [model.generate(ids, max_new_tokens=8, do_sample=False) for model in (ours, theirs)]
    assert torch.equal(*texts)
