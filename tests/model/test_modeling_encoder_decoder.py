"""The encoder-decoder: T5's numbers, caches, training, half precision."""

import copy
import warnings

import pytest
import torch
from encoder_decoders import DRY, SMALL, VOCAB, modern, source, t5, target
from pairs import assert_close, assert_gradients_close
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EncoderDecoderCache,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache

import blockformer
from blockformer import (
    BlockformerEncoderDecoderConfig,
    BlockformerEncoderDecoderForConditionalGeneration,
    BlockformerEncoderDecoderForQuestionAnswering,
    BlockformerEncoderDecoderForSequenceClassification,
    BlockformerEncoderDecoderModel,
    from_official,
    preset,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' T5 and ours with the same weights."""
    torch.manual_seed(0)
    theirs = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=48,
            d_kv=16,
            d_ff=80,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            relative_attention_num_buckets=12,
            relative_attention_max_distance=20,
            decoder_start_token_id=0,
            initializer_factor=1.3,
        )
    ).eval()
    folder = tmp_path_factory.mktemp("t5")
    theirs.save_pretrained(folder)
    return from_official(folder), theirs


# Generation


@torch.no_grad()
def test_a_projection_that_fails_leaves_no_hole_in_the_cross_cache():
    model = modern()
    encoded = model.model.encoder(torch.tensor([[5, 6, 7]])).last_hidden_state
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    settings = {"encoder_hidden_states": encoded, "past_key_values": cache}
    broken = model.model.decoder.layers[0].cross_attn.v_proj
    handle = broken.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("as on a GPU")))
    with pytest.raises(torch.OutOfMemoryError):
        model.model.decoder(torch.tensor([[2, 8]]), **settings)
    handle.remove()
    cache.self_attention_cache.reset()
    assert not any(cache.is_updated.values())
    found = model.model.decoder(torch.tensor([[2, 8]]), **settings).last_hidden_state
    expected = model.model.decoder(torch.tensor([[2, 8]]), encoder_hidden_states=encoded).last_hidden_state
    assert_close(found, expected)


@pytest.mark.portable
@pytest.mark.parametrize("make", [t5, modern, lambda: t5(name="umt5")], ids=["t5", "modern", "umt5"])
def test_with_and_without_a_cache_step_by_step(make):
    model, given, ids = make(), source("left"), target()
    with torch.no_grad():
        whole = model(**given, decoder_input_ids=ids, use_cache=False)
        assert whole.past_key_values is None
        encoded = (whole.encoder_last_hidden_state,)
        cache, logits = None, []
        for start, stop in ((0, 1), (1, 2), (2, 5), (5, 7)):
            step = model(
                encoder_outputs=encoded,
                attention_mask=given["attention_mask"],
                decoder_input_ids=ids[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
            cache = step.past_key_values
            logits.append(step.logits)
    assert isinstance(cache, EncoderDecoderCache)
    assert_close(torch.cat(logits, 1), whole.logits)


@pytest.mark.versions
@pytest.mark.parametrize("make", [t5, modern, lambda: t5(name="umt5")], ids=["t5", "modern", "umt5"])
@pytest.mark.parametrize("beams", [1, 3])
def test_every_cache_writes_the_same(make, beams):
    model, given = make(), source()
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    wanted = model.generate(**given, **settings)
    assert torch.equal(model.generate(**given, **settings, use_cache=False), wanted)
    assert torch.equal(model.generate(**given, **settings, cache_implementation="static"), wanted)
    assert torch.equal(model.generate(**given, **settings, prefill_chunk_size=3), wanted)
    library = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert torch.equal(model.generate(**given, **settings, past_key_values=library), wanted)
    assert len({tuple(row) for row in wanted.tolist()}) > 1


@pytest.mark.versions
@pytest.mark.parametrize("beams", [1, 3])
def test_a_cache_made_from_the_config_reads_the_whole_source(beams):
    """Its layers have the target's windows, in the cross-attention too."""
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    model, given = modern(**windows), source()
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    wanted, config = model.generate(**given, **settings), model.config.get_text_config(decoder=True)
    for make in (lambda: DynamicCache(config=config), lambda: StaticCache(config=config, max_cache_len=16)):
        cache = EncoderDecoderCache(make(), make())
        assert any(cache.cross_attention_cache.is_sliding)
        assert torch.equal(model.generate(**given, **settings, past_key_values=cache), wanted)


@pytest.mark.portable
@pytest.mark.parametrize("make", [t5, modern])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_single_rows(make, side):
    model, given, ids = make(), source(side), target()
    with torch.no_grad():
        together = model(**given, decoder_input_ids=ids).logits
    for beams in (1, 3):
        written = model.generate(**given, max_new_tokens=10, do_sample=False, num_beams=beams)
        for row in range(3):
            real = given["attention_mask"][row].bool()
            alone = {name: tensor[row : row + 1, real] for name, tensor in given.items()}
            with torch.no_grad():
                assert_close(model(**alone, decoder_input_ids=ids[row : row + 1]).logits, together[row : row + 1])
            single = model.generate(**alone, max_new_tokens=10, do_sample=False, num_beams=beams)[0]
            padded = nn.functional.pad(single, (0, written.shape[1] - len(single)), value=model.config.pad_token_id)
            assert torch.equal(written[row], padded)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_a_source_of_padding_has_no_right_answer_and_leaves_other_rows_as_they_are(pair, backend):
    """Of such a row T5's logits depend on the padding's ids; ours do not with sdpa, where none of it is read."""
    given = source()
    given["attention_mask"][1] = 0
    changed = given | {"input_ids": given["input_ids"].clone()}
    changed["input_ids"][1] = (changed["input_ids"][1] + 3) % VOCAB
    if backend == "sdpa" and not pair[1]._supports_sdpa:
        pytest.skip("the T5 of older releases is only eager")
    logits = []
    for model in pair:
        usual = model.config._attn_implementation
        model.set_attn_implementation(backend)
        first, second = (model(**each, decoder_input_ids=target()).logits for each in (given, changed))
        logits.append(first)
        reads_padding = not torch.equal(first[1], second[1])
        assert reads_padding == (backend == "eager" or model is pair[1])
        model.set_attn_implementation(usual)
    assert_close(logits[0][[0, 2]], logits[1][[0, 2]])
    if backend == "eager":
        assert_close(*logits)


def test_a_later_target_token_changes_no_earlier_logit():
    model, given, ids = t5(), source(), target()
    changed = ids.clone()
    changed[:, 4] += 1
    with torch.no_grad():
        before, after = (model(**given, decoder_input_ids=each % VOCAB).logits for each in (ids, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


def test_a_cache_of_the_library_and_inputs_as_embeddings():
    model, given, ids = t5(), source(), target()
    with torch.no_grad():
        wanted = model(**given, decoder_input_ids=ids).logits
        embed = model.get_input_embeddings()
        found = model(
            inputs_embeds=embed(given["input_ids"]),
            attention_mask=given["attention_mask"],
            decoder_inputs_embeds=embed(ids),
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
        ).logits
    assert_close(found, wanted)
    outputs = model(**given, decoder_input_ids=ids, return_dict=False)
    assert torch.equal(outputs[0], model(**given, decoder_input_ids=ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("t5", "inductor"), ("umt5", "eager")])
def test_a_step_compiles_as_one_graph_with_a_static_cache(name, backend):
    model, given, ids = t5(name=name, num_hidden_layers=1), source(), target()
    with torch.no_grad():
        wanted = model(**given, decoder_input_ids=ids).logits
        encoded = (model.model.encoder(**given).last_hidden_state,)
        cache = EncoderDecoderCache(
            StaticCache(model.config.get_text_config(decoder=True), max_cache_len=16), DynamicCache()
        )
        fixed = {"encoder_outputs": encoded, "attention_mask": given["attention_mask"], "past_key_values": cache}
        logits = [model(decoder_input_ids=ids[:, :1], **fixed, use_cache=True).logits]
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        torch._dynamo.reset()
        for step in range(1, 7):
            if step == 3:
                torch.compiler.set_stance("fail_on_recompile")
            logits.append(compiled(decoder_input_ids=ids[:, step : step + 1], **fixed, use_cache=True).logits)
        torch.compiler.set_stance("default")
    assert_close(torch.cat(logits, 1), wanted)


# T5's numbers


@pytest.mark.portable
def test_gradients_are_those_of_t5(pair):
    ours, theirs = (copy.deepcopy(model).train() for model in pair)
    labels = target().masked_fill(torch.arange(7) > torch.tensor([[6], [3], [4]]), -100)
    losses = [model(**source(), labels=labels).loss for model in (ours, theirs)]
    assert_close(*losses)
    for loss in losses:
        loss.backward()
    pairs = {
        "model.encoder.embed_tokens": "shared",
        "model.encoder.relative_bias.embedding": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "model.decoder.relative_bias.embedding": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "model.decoder.layers.1.cross_attn.k_proj": "decoder.block.1.layer.1.EncDecAttention.k",
        "model.encoder.layers.0.mlp.down_proj": "encoder.block.0.layer.1.DenseReluDense.wo",
        "model.decoder.layers.0.cross_attn_pre_norm": "decoder.block.0.layer.1.layer_norm",
    }
    for mine, other in pairs.items():
        assert_close(ours.get_submodule(mine).weight.grad, theirs.get_submodule(other).weight.grad)


@pytest.mark.portable
@pytest.mark.versions
def test_captured_states_and_attentions_are_those_of_t5(pair):
    given = {**source("left"), "decoder_input_ids": target()}
    outputs = []
    for model in pair:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            outputs.append(model(**given, output_hidden_states=True, output_attentions=True))
        model.set_attn_implementation("sdpa")
    ours, theirs = outputs
    source_mask = given["attention_mask"].bool()
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert len(ours[name]) == len(theirs[name]) == 3
        for found, expected in zip(ours[name], theirs[name], strict=True):
            mask = source_mask if name.startswith("encoder") else slice(None)
            assert_close(found[mask], expected[mask])
    for name, length in (("encoder_attentions", 11), ("decoder_attentions", 7), ("cross_attentions", 11)):
        assert len(ours[name]) == len(theirs[name]) == 2
        for found, expected in zip(ours[name], theirs[name], strict=True):
            assert found.shape[-1] == length
            if name == "encoder_attentions":
                found, expected = (each.transpose(1, 2)[source_mask] for each in (found, expected))
            assert_close(found, expected)


MASKED = {
    "head_mask": ("encoder", "self_attn"),
    "decoder_head_mask": ("decoder", "self_attn"),
    "cross_attn_head_mask": ("decoder", "cross_attn"),
}


@pytest.mark.parametrize("name", MASKED)
@torch.no_grad()
def test_a_masked_head_says_nothing(name):
    """As if its columns of the output projection were zero."""
    model, given, ids = t5(), source(), target()
    mask, (stack, part) = torch.ones(2, 4), MASKED[name]
    mask[1, 2] = 0
    plain = model(**given, decoder_input_ids=ids).logits
    masked = model(**given, decoder_input_ids=ids, **{name: mask}).logits
    assert torch.equal(model(**given, decoder_input_ids=ids, **{name: mask.fill_(1)}).logits, plain)
    getattr(getattr(model.model, stack).layers[1], part).o_proj.weight[:, 32:48] = 0
    assert_close(masked, model(**given, decoder_input_ids=ids).logits)
    assert not torch.allclose(masked, plain)


# Training


def test_labels_are_shifted_and_minus_100_becomes_padding():
    model = t5(decoder_start_token_id=3, pad_token_id=5)
    labels = torch.tensor([[10, 11, 12, -100], [20, -100, -100, -100]])
    assert model.shift_right(labels).tolist() == [[3, 10, 11, 12], [3, 20, 5, 5]]
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), model.shift_right(labels))
    given = source(lengths=(4, 6))
    by_labels = model(**given, labels=labels)
    by_hand = model(**given, decoder_input_ids=model.shift_right(labels))
    assert torch.equal(by_labels.logits, by_hand.logits)
    logits, kept = by_hand.logits[labels != -100], labels[labels != -100]
    assert_close(by_labels.loss, nn.functional.cross_entropy(logits, kept))
    for items in (7, torch.tensor(7)):
        total = nn.functional.cross_entropy(logits, kept, reduction="sum")
        assert_close(model(**given, labels=labels, num_items_in_batch=items).loss, total / 7)
    nothing = model(**given, labels=torch.full_like(labels, -100)).loss
    assert nothing.item() == 0
    nothing.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def rows(count=8, seed=0, longest=10):
    """Rows of a task: write the source backwards."""
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for index in range(count):
        length = 2 + (5 * index) % (longest - 1)
        ids = torch.randint(2, 12, (length,), generator=generator).tolist()
        entries.append({"input_ids": [*ids, 1], "labels": [*ids[::-1], 1]})
    return entries


class Padder:
    """The little that the collator wants of a tokenizer."""

    padding_side = "right"
    model_max_length = 64
    pad_token_id = 0

    def pad(self, features, padding=True, max_length=None, pad_to_multiple_of=None, return_tensors=None):
        width = max(len(feature["input_ids"]) for feature in features)
        gaps = [width - len(feature["input_ids"]) for feature in features]
        batch = {
            "input_ids": [f["input_ids"] + [0] * gap for f, gap in zip(features, gaps, strict=True)],
            "attention_mask": [[1] * len(f["input_ids"]) + [0] * gap for f, gap in zip(features, gaps, strict=True)],
        }
        return {name: torch.tensor(value) for name, value in batch.items()}


def trained(model, folder, train=None, **settings):
    """A trainer after its run."""
    arguments = {
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "seed": 3,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "dataloader_pin_memory": False,
        **settings,
    }
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(str(folder), **arguments),
        train_dataset=train or rows(),
        eval_dataset=rows(4, seed=1),
        data_collator=DataCollatorForSeq2Seq(Padder(), model),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("accumulate", [2, 8])
def test_accumulation_of_uneven_batches_is_one_large_batch(tmp_path, accumulate):
    model = t5()
    large = trained(copy.deepcopy(model), tmp_path)
    small = trained(
        copy.deepcopy(model),
        tmp_path,
        per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
    )
    losses = [trainer.state.log_history[0]["loss"] for trainer in (large, small)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for found, expected in zip(small.model.parameters(), large.model.parameters(), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_step_of_the_trainer_is_that_of_t5(tmp_path, pair, smoothing):
    ours, theirs = (
        trained(copy.deepcopy(model), tmp_path, label_smoothing_factor=smoothing, max_steps=3) for model in pair
    )
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][2] < losses[0][0]
    assert_close(ours.model.lm_head.weight, theirs.model.lm_head.weight, 1e-4)


@pytest.mark.slow
def test_it_learns_to_write_backwards_and_the_trainer_judges_by_what_is_written(tmp_path):
    torch.manual_seed(0)
    model = BlockformerEncoderDecoderForConditionalGeneration(preset("t5", **{**SMALL, **DRY, "vocab_size": 12}))
    settings = {"max_steps": 120, "learning_rate": 1e-2, "optim": "adamw_torch", "per_device_train_batch_size": 64}
    more = {"predict_with_generate": True, "generation_max_length": 14, "max_grad_norm": 1.0, "logging_steps": 50}
    trainer = trained(model, tmp_path, rows(2000, longest=2), **settings, **more, lr_scheduler_type="linear")
    held_out = rows(60, seed=9, longest=2)
    found = trainer.predict(held_out).predictions
    right = 0
    for row, written in zip(held_out, found, strict=True):
        right += [token for token in written[1:].tolist() if token > 0][: len(row["labels"])] == row["labels"]
    assert right / len(held_out) > 0.4  # by chance about 0.01
    assert "eval_loss" in trainer.evaluate()


@pytest.mark.portable
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_gradient_checkpointing_changes_nothing(name, reentrant):
    model = t5(name=name).train()
    labels = target()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**source(), labels=labels).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert any("relative_bias" in name for name in gradients[0])
    for key, gradient in gradients[0].items():
        # Reentrant checkpoints add a tensor's gradients up in another order.
        assert torch.equal(gradients[1][key], gradient) or reentrant, key
    assert_gradients_close(*reversed(gradients))


# Half precision


def test_float16_stays_finite_where_activations_are_large(tmp_path):
    model = t5(name="t5-v1.1")
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            for layer in stack.layers:
                layer.mlp.down_proj.weight.mul_(60_000)
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=torch.float16)
    kinds = {name: parameter.dtype for name, parameter in half.named_parameters()}
    for name, kind in kinds.items():
        assert kind == (torch.float32 if "down_proj" in name else torch.float16), name
    with torch.no_grad():
        outputs = half(**source(), decoder_input_ids=target(), output_hidden_states=True)
        large = max(state.abs().max() for state in outputs.decoder_hidden_states)
    assert large > 60_000
    assert outputs.logits.isfinite().all()
    half.generate(**source(), max_new_tokens=5)
    # A bfloat16 model has the range that it needs.
    assert {p.dtype for p in type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).parameters()} == {
        torch.bfloat16
    }


def test_a_quantized_down_projection_gets_its_input_as_it_is():
    class Int8(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
            self.seen = []

        def forward(self, states):
            self.seen.append(states.dtype)
            return states.new_zeros(*states.shape[:-1], 48)

    model = t5().half()
    for layer in model.model.encoder.layers:
        layer.mlp.down_proj = Int8(layer.mlp.down_proj)
    with torch.no_grad():
        model(**source(), decoder_input_ids=target())
    assert {kind for layer in model.model.encoder.layers for kind in layer.mlp.down_proj.seen} == {torch.float16}


def test_bfloat16_chooses_the_same_tokens():
    model = t5(num_hidden_layers=3)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    given, ids = source(lengths=(30,) * 16), target(16, 30)
    with torch.no_grad():
        wide = model(**given, decoder_input_ids=ids).logits
        narrow = copy.deepcopy(model).bfloat16()(**given, decoder_input_ids=ids).logits
    gap = wide.topk(2).values.diff(dim=-1).abs()[..., 0]
    clear = gap > gap.median() / 10  # where two tokens are all but equal, any rounding decides
    assert clear.float().mean() > 0.8
    same = (wide.argmax(-1) == narrow.argmax(-1))[clear].float().mean()
    assert same >= 0.99


# Embeddings


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_resized_and_saved_as_they_are_tied(tmp_path, shared, tied):
    model = t5(share_embeddings=shared, tie_word_embeddings=tied)

    def check(model):
        body, head = model.model, model.lm_head
        assert (body.decoder.embed_tokens.weight is body.encoder.embed_tokens.weight) is shared
        assert (head.weight is body.decoder.embed_tokens.weight) is tied
        return body.encoder.embed_tokens.weight.shape[0], head.weight.shape[0]

    assert check(model) == (VOCAB, VOCAB)
    with torch.no_grad():
        wanted = model(**source(), decoder_input_ids=target()).logits
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    assert check(model) == (VOCAB + 3, VOCAB + 3)
    assert model.model.decoder.embed_tokens.weight.shape[0] == VOCAB + 3
    assert model.config.vocab_size == VOCAB + 3
    assert model.model.encoder.config.vocab_size == model.model.decoder.config.vocab_size == VOCAB + 3
    new = target() * 0 + VOCAB + 2
    with torch.no_grad():
        found = model(**source(), decoder_input_ids=target()).logits
        model(input_ids=new, decoder_input_ids=new)
    assert_close(found[..., :VOCAB], wanted)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    check(again)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_frozen_embeddings_and_the_head_are_found_by_name():
    model = t5()
    assert model.get_input_embeddings() is model.model.encoder.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    assert model.get_encoder() is model.model.encoder
    assert model.get_decoder() is model.model.decoder
    table = nn.Embedding(VOCAB, 48)
    model.set_input_embeddings(table)
    assert model.model.encoder.embed_tokens is model.model.decoder.embed_tokens is table


# Heads


def test_a_row_is_judged_at_its_last_end_token():
    model = t5(cls=BlockformerEncoderDecoderForSequenceClassification, num_labels=3)
    ids = torch.tensor([[5, 6, 1, 7, 1, 0, 0], [8, 9, 10, 11, 12, 13, 14]])
    mask = (ids != 0).long()
    with torch.no_grad():
        found = model(ids, mask).logits
        states = model.model(ids, mask, model.shift_right(ids)).last_hidden_state
        expected = model.score(torch.tanh(model.dense(torch.stack((states[0, 4], states[1, 6])))))
        assert_close(found, expected)
        assert_close(model(ids, mask).logits[:1], model(ids[:1, :5]).logits)
    loss = model(ids, mask, labels=torch.tensor([2, 0])).loss
    assert_close(loss, nn.functional.cross_entropy(model(ids, mask).logits, torch.tensor([2, 0])))


def test_answers_are_spans_over_the_source():
    model = t5(cls=BlockformerEncoderDecoderForQuestionAnswering)
    given = source()
    outputs = model(**given, start_positions=torch.tensor([1, 2, 3]), end_positions=torch.tensor([4, 3, 50]))
    assert outputs.start_logits.shape == outputs.end_logits.shape == (3, 11)
    outputs.loss.backward()
    assert model.qa_outputs.weight.grad.any()


# What is refused


def test_calls_that_cannot_be_right_are_refused():
    model, given, ids = t5(), source(), target()
    with pytest.raises(ValueError, match="exactly one of decoder_input_ids"):
        model(**given, decoder_input_ids=ids, decoder_inputs_embeds=torch.randn(3, 7, 48))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(decoder_input_ids=ids)
    with pytest.raises(ValueError, match=r"holds the token 97"):
        model(**given, decoder_input_ids=ids * 0 + VOCAB)
    with pytest.raises(ValueError, match="attention_mask covers 10 tokens"):
        model(given["input_ids"], given["attention_mask"][:, :10], decoder_input_ids=ids)
    with pytest.raises(ValueError, match="labels holds 97"):
        model(**given, decoder_input_ids=ids, labels=ids * 0 + VOCAB)
    for names in (["decoder_start_token_id"], ["pad_token_id"]):
        bare = t5(**dict.fromkeys(names))
        with pytest.raises(ValueError, match="set decoder_start_token_id and pad_token_id"):
            bare(**given, labels=ids)
    with pytest.raises(ValueError, match=r"decoder_start_token_id|bos_token_id"):
        t5(decoder_start_token_id=None).generate(**given, max_new_tokens=2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"decoder_layers": 0}, "decoder_layers"),
        ({"decoder_intermediate_size": 0}, "decoder_intermediate_size must be a positive integer"),
        ({"decoder_intermediate_size": 10**12}, "intermediate_size"),
        ({"decoder_start_token_id": VOCAB}, "decoder_start_token_id"),
        ({"share_embeddings": "yes"}, "share_embeddings"),
        ({"decoder_layer_types": ["full_attention"] * 9}, "decoder_layer_types must list one type for each"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"is_decoder": True}, "is_decoder"),
        ({"decoder_norm_placement": "post"}, "must both be 'post', or neither"),
        ({"decoder_layer": 3}, "Did you mean 'decoder_layers'"),
        ({"position_type": "rotary", "relative_bias_per_layer": True}, "relative_bias_per_layer"),
        ({"relative_bias_per_layer": 1}, "relative_bias_per_layer must be true or false"),
        ({"initializer_range": 0.0}, "initializer_range"),
    ],
)
def test_settings_that_contradict_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        preset("t5", **{**SMALL, **settings})


@pytest.mark.parametrize("name", ["t5", "t5-v1.1", "mt5", "umt5"])
def test_a_preset_survives_json(tmp_path, name):
    config = preset(name, **SMALL, decoder_layers=3)
    config.save_pretrained(tmp_path)
    again = BlockformerEncoderDecoderConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.get_text_config(decoder=True).num_hidden_layers == 3
    assert again.num_hidden_layers == 2
    assert again.get_text_config(decoder=True).num_hidden_layers == 3
    assert again.get_text_config() is again
    model = BlockformerEncoderDecoderModel(again)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 3)
    shared = name != "umt5"
    assert (model.encoder.relative_bias is not None) is shared
    assert (model.encoder.layers[1].self_attn.relative_bias is None) is shared
    assert all(layer.cross_attn.relative_bias is None for layer in model.decoder.layers)


def test_fresh_weights_are_drawn_as_t5_draws_them():
    settings = {"vocab_size": 500, "num_hidden_layers": 2}
    ours = BlockformerEncoderDecoderForConditionalGeneration(preset("t5", **settings))
    theirs = T5ForConditionalGeneration(T5Config(vocab_size=500, num_layers=2))
    pairs = {
        "model.encoder.embed_tokens": "shared",
        "lm_head": "lm_head",
        "model.encoder.relative_bias.embedding": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "model.decoder.layers.1.mlp.down_proj": "decoder.block.1.layer.2.DenseReluDense.wo",
        **{
            f"model.decoder.layers.1.cross_attn.{name}_proj": f"decoder.block.1.layer.1.EncDecAttention.{name}"
            for name in "qkvo"
        },
    }
    for mine, other in pairs.items():
        found, expected = ours.get_submodule(mine).weight.std(), theirs.get_submodule(other).weight.std()
        assert found.item() == pytest.approx(expected.item(), rel=0.15), mine


# What others do with a model


def test_the_auto_class_and_a_plain_round_trip(tmp_path):
    model = t5()
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_layers_on_the_disk(tmp_path):
    model = t5()
    model.save_pretrained(tmp_path / "model")
    wanted = model.generate(**source(), max_new_tokens=8, num_beams=2, do_sample=False)
    places = {"model.encoder": "cpu", "model.decoder": "cpu", "lm_head": "cpu"}
    places |= {"model.encoder.layers.1": "disk", "model.decoder.layers": "disk"}
    places = {
        "model.encoder.embed_tokens": "cpu",
        "model.decoder.embed_tokens": "cpu",
        "lm_head": "cpu",
        **{f"model.{side}.{name}": "cpu" for side in ("encoder", "decoder") for name in ("relative_bias", "norm")},
        "model.encoder.layers.0": "cpu",
        "model.encoder.layers.1": "disk",
        "model.decoder.layers": "disk",
    }
    offloaded = type(model).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk")
    assert offloaded.model.decoder.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert torch.equal(offloaded.generate(**source(), max_new_tokens=8, num_beams=2, do_sample=False), wanted)


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_lora(tmp_path, targets):
    peft = pytest.importorskip("peft")
    model = t5()
    with torch.no_grad():
        wanted = model(**source(), decoder_input_ids=target()).logits
    settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=targets)
    adapted = peft.get_peft_model(copy.deepcopy(model), settings)
    with torch.no_grad():
        assert_close(adapted(**source(), decoder_input_ids=target()).logits, wanted)
    adapted(**source(), labels=target()).loss.backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert any("cross_attn.q_proj" in name for name in trained)
    assert all("lora" in name for name in trained)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    optimizer.step()
    written = adapted.generate(**source(), max_new_tokens=6, do_sample=False)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    assert torch.equal(again.generate(**source(), max_new_tokens=6, do_sample=False), written)


def test_every_public_name():
    for target_class in BlockformerEncoderDecoderConfig.auto_classes.values():
        assert hasattr(blockformer, target_class.rpartition(".")[2])


def test_a_head_on_a_checkpoint_without_one_starts_with_a_fixed_bias_of_zero(tmp_path):
    """The bias is a buffer: what is not drawn anew after loading is whatever the memory held."""
    settings = {name: value for name, value in SMALL.items() if not name.startswith("relative")}
    BlockformerEncoderDecoderModel(preset("bart", **settings)).save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        ours = BlockformerEncoderDecoderForConditionalGeneration.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(ours.logits_bias, torch.zeros(VOCAB))


def test_dummy_inputs_have_a_target(pair):
    """Exporters and pruners run a model with them."""
    ours, theirs = pair
    given = ours.dummy_inputs
    assert given.keys() <= theirs.dummy_inputs.keys()
    assert_close(ours(**given).logits, theirs(**given).logits)


def test_it_has_no_encoder_of_images_or_sound():
    sizes = {"vocab_size": 31, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    theirs = T5ForConditionalGeneration(T5Config(**sizes))
    names = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    ours = blockformer.BlockformerEncoderDecoderForConditionalGeneration(preset("t5", **names, num_attention_heads=2))
    for model in (theirs, ours):
        assert model.get_encoder() is model.base_model.encoder
        for kind in ("image", "audio"):
            assert model.get_encoder(modality=kind) is model
