"""Inputs that cannot be right are refused, with the argument's name and the fix; hard but right ones work."""

import re

import pytest
import torch
from encoder_decoders import t5
from pairs import assert_close, model, token_ids

import blockformer
from blockformer.model.losses import shifted, span_loss, token_cross_entropy


def ones(*shape):
    return torch.ones(*shape, dtype=torch.long)


@pytest.fixture(scope="module")
def decoder():
    return model("qwen3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.tensor([[1, 199]])}, "holds the token 199, but the vocabulary has 0 to 198"),
        ({"input_ids": torch.tensor([[1, -3]])}, "holds the token -3"),
        ({"input_ids": torch.tensor([[1.0, 2.0]])}, "must be a tensor of int64 or int32, not torch.float32"),
        ({"input_ids": torch.tensor([1, 2])}, "must be [batch, length], not [2]: add a batch dimension"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "the input is empty (shape [1, 0])"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, "the input is empty (shape [0, 4])"),
        ({"input_ids": token_ids(2, 5), "attention_mask": ones(2, 4)}, "covers 4 tokens, but there are 5"),
        ({"input_ids": token_ids(2, 5), "attention_mask": ones(2, 6)}, "covers 6 tokens, but there are 5"),
        ({"input_ids": token_ids(2, 5), "attention_mask": ones(1, 5)}, "must be [batch=2, length]"),
        ({"input_ids": token_ids(2, 5), "attention_mask": ones(5)}, "must be [batch=2, length]"),
        ({"input_ids": token_ids(1, 3), "attention_mask": torch.tensor([[1, 2, 1]])}, "1 for a token and 0 for"),
        ({"input_ids": token_ids(1, 3), "attention_mask": torch.tensor([[0.0, -1e9, 0.0]])}, "0 for padding"),
        (
            {"input_ids": token_ids(1, 3), "attention_mask": ones(1, 3).to("meta")},
            "attention_mask is on 'meta', but the input is on 'cpu': move it there.",
        ),
        *(
            (
                {"input_ids": token_ids(1, 3), "cu_seq_lens_q": torch.tensor(starts)},
                f"[sequences + 1], each start and the end, not {shape}",
            )
            for starts, shape in (([], "[0]"), ([0], "[1]"), ([[0, 3]], "[1, 2]"))
        ),
        ({"input_ids": token_ids(1, 2).numpy()}, "input_ids must be a tensor of int64 or int32, not ndarray"),
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor of int64 or int32, not list: use model(**tokenizer("),
        *(
            ({"input_ids": token_ids(2, 5), "labels": labels}, f"pass 10 int64 labels, one per prediction, not {given}")
            for labels, given in (
                (token_ids(2, 6), "12 of torch.int64"),
                (token_ids(1, 5), "5 of torch.int64"),
                (token_ids(2, 5).int(), "10 of torch.int32"),
                (token_ids(2, 5).float(), "10 of torch.float32"),
            )
        ),
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": token_ids(1, 3), "inputs_embeds": torch.zeros(1, 3, 64)}, "exactly one of"),
        ({"inputs_embeds": torch.zeros(1, 3, 63)}, "inputs_embeds must be [batch, length, 64], not [1, 3, 63]"),
    ],
)
def test_refused(decoder, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        decoder(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"decoder_input_ids": ones(2, 4).numpy()},
            "decoder_input_ids must be a tensor of int64 or int32, not ndarray",
        ),
        ({"decoder_input_ids": ones(4)}, "decoder_input_ids must be [batch, length], not [4]: add a batch dimension"),
        ({"decoder_input_ids": ones(1, 4)}, "has 2 rows of 5 states, but what the decoder reads has 1 rows"),
        ({"decoder_input_ids": 97 * ones(2, 4)}, "decoder_input_ids holds the token 97"),
        (
            {"decoder_inputs_embeds": torch.ones(2, 48)},
            "decoder_inputs_embeds must be [batch, length, 48], not [2, 48]",
        ),
        (
            {"decoder_input_ids": ones(2, 4), "decoder_attention_mask": ones(2, 5)},
            "decoder_attention_mask covers 5 tokens, but there are 4",
        ),
        ({"labels": ones(4)}, "labels must be a tensor of integers [batch, length], not torch.int64 [4]"),
        ({"labels": [[1]]}, "labels must be a tensor of integers [batch, length], not list"),
        ({"labels": torch.ones(2, 4)}, "labels must be a tensor of integers [batch, length], not torch.float32 [2, 4]"),
    ],
)
def test_what_a_decoder_reads_is_refused_by_its_own_name(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        t5()(input_ids=ones(2, 5), **arguments)


def test_a_cache_of_another_batch_is_refused(decoder):
    cache = decoder(token_ids(2, 5)).past_key_values
    with pytest.raises(ValueError, match="past_key_values holds 2 rows, the input has 1"):
        decoder(token_ids(1, 1), past_key_values=cache)


def test_a_mask_must_cover_the_cached_tokens_too(decoder):
    cache = decoder(token_ids(2, 5)).past_key_values
    with pytest.raises(ValueError, match=r"covers 1 tokens, but there are 6 \(5 of them cached\)"):
        decoder(token_ids(2, 1), attention_mask=ones(2, 1), past_key_values=cache)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_row_of_padding_is_finite_and_disturbs_no_other_row(backend):
    decoder = model("qwen3")
    decoder.set_attn_implementation(backend)
    ids, mask = token_ids(3, 8), ones(3, 8)
    mask[1] = 0
    logits = decoder(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    assert_close(logits[[0, 2]], decoder(ids[[0, 2]]).logits)
    logits[[0, 2]].logsumexp(-1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())


def test_nan_stays_in_its_row(decoder):
    embeds = decoder.model.embed_tokens(token_ids(2, 6)).detach().clone()
    expected = decoder(inputs_embeds=embeds).logits[1]
    embeds[0, 2] = torch.nan
    logits = decoder(inputs_embeds=embeds).logits
    assert logits[0, 2:].isnan().all()
    assert_close(logits[1], expected)


def test_a_text_longer_than_in_training_warns(caplog):
    decoder = model("qwen3", max_position_embeddings=23)
    decoder(token_ids(1, 23))
    assert not caplog.records
    decoder(token_ids(1, 24))
    assert "the text is longer than the 23 tokens (max_position_embeddings)" in caplog.text
    decoder.generate(token_ids(1, 22), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert caplog.text.count("the text is longer") == 1


def test_int32_tokens_are_taken(decoder):
    ids = token_ids(1, 5)
    assert torch.equal(decoder(ids.int()).logits, decoder(ids).logits)


def test_no_label_at_all_is_a_loss_of_zero():
    logits = torch.randn(2, 5, 7, requires_grad=True)
    loss = token_cross_entropy(logits, shifted(torch.full((2, 5), -100)))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()
    nowhere = torch.tensor([99, 99])
    assert span_loss(logits[0], logits[1], nowhere[:1].expand(5), nowhere[:1].expand(5)) == 0


@pytest.mark.parametrize("wrong", [7, -1, -101])
def test_labels_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"labels holds {wrong}: each must be a class from 0 to 6, or -100"):
        token_cross_entropy(torch.randn(3, 7), torch.tensor([0, wrong, 6]))


@pytest.mark.parametrize("count", [5, torch.tensor(5)])
def test_num_items_divides_the_sum(count):
    logits, labels = torch.randn(3, 7), torch.tensor([0, -100, 6])
    mean = token_cross_entropy(logits, labels)
    assert_close(token_cross_entropy(logits, labels, count), mean * 2 / 5)


def test_task_types_have_their_own_table_where_token_types_are_tokens():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
    tables = {"type_vocab_size": 0, "token_types_as_tokens": True, "task_type_vocab_size": 3}
    encoder = blockformer.BlockformerEncoderModel(blockformer.preset("ernie", vocab_size=30, **sizes, **tables))
    ids = torch.randint(5, 30, (1, 4))
    encoder(ids, token_type_ids=ids, task_type_ids=ones(1, 4))
    with pytest.raises(ValueError, match="task_type_ids holds 5, and task_type_vocab_size is 3: use smaller ids"):
        encoder(ids, task_type_ids=5 * ones(1, 4))
