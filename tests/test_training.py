"""Training: the loss and the steps of transformers' own models, accumulated, resumed, checkpointed."""

import copy
import logging

import pytest
import torch
from pairs import (
    VOCAB,
    assert_as_exact,
    assert_close,
    assert_gradients_close,
    in_float64,
    left_padded,
    model,
    official_copy,
    official_name,
    pair,
    token_ids,
)
from torch.nn import functional
from transformers import (
    DataCollatorForLanguageModeling,
    DynamicCache,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.trainer_pt_utils import LabelSmoother

import blockformer
from blockformer.training import chunked_loss

MILD = {"initializer_range": 0.2}
SMALL = {"initializer_range": 0.1, "num_hidden_layers": 2}


def gradients_of(a_model, loss):
    a_model.zero_grad()
    loss.backward()
    return {
        official_name(name): parameter.grad.clone()
        for name, parameter in a_model.named_parameters()
        if parameter.grad is not None
    }


def uneven_rows(lengths=(17, 3, 11, 2, 8, 5, 13, 4)):
    """Rows of one width, of which only the first so many tokens have labels."""
    rows = []
    for seed, length in enumerate(lengths):
        ids = token_ids(1, 18, seed=seed)[0]
        mask = (torch.arange(18) < length).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return rows


def arguments(folder, **settings):
    defaults = {"per_device_train_batch_size": 8, "max_steps": 1, "learning_rate": 0.5, "optim": "sgd", "seed": 3}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "logging_steps": 1}
    plain = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "dataloader_pin_memory": False}
    return TrainingArguments(output_dir=str(folder), **{**defaults, **quiet, **plain, **settings})


def trained(a_model, folder, rows=None, **settings):
    """The trainer after its run."""
    trainer = Trainer(a_model, arguments(folder, **settings), train_dataset=uneven_rows() if rows is None else rows)
    trainer.train()
    return trainer


def logged_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# The loss


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_of_transformers(tied):
    ours, theirs = pair(tie_word_embeddings=tied, **MILD)
    row = torch.utils.data.default_collate(uneven_rows())
    loss, their_loss = ours(**row).loss, theirs(**row).loss
    assert_close(loss, their_loss)
    assert_gradients_close(gradients_of(ours, loss), gradients_of(theirs, their_loss))


@pytest.mark.parametrize("prepared", [False, True])
def test_a_loss_function_of_the_user_is_called_as_by_transformers(prepared, monkeypatch):
    """It is set as `model.loss_function`, gets the labels as they came, and shifts them itself."""
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS", 1)
    seen = []

    def focal(logits, labels, vocab_size, **others):
        seen.append(sorted(others))
        logits, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        losses = functional.cross_entropy(logits.float(), labels, reduction="none")
        return ((1 - torch.exp(-losses)) ** 2 * losses).sum() / others.get("num_items_in_batch", 1)

    models = pair(**MILD)
    for a_model in models:
        a_model.train().loss_function = focal
    if prepared:
        models[0].prepare_for_training()
    row = torch.utils.data.default_collate(uneven_rows())
    for counted in ({}, {"num_items_in_batch": 7}):
        loss, their_loss = (a_model(**row, **counted).loss for a_model in models)
        assert_close(loss, their_loss)
        assert seen[-2] == seen[-1] == list(counted)
        assert_gradients_close(*(gradients_of(*each) for each in zip(models, (loss, their_loss), strict=True)))


def test_the_loss_is_divided_by_the_items_of_the_whole_step():
    ours, theirs = pair(**MILD)
    ids = token_ids(2, 9)
    mean, total = ours(ids, labels=ids).loss, ours(ids, labels=ids, num_items_in_batch=1).loss
    assert_close(total, 16 * mean)
    for items in (5, torch.tensor(40)):
        assert_close(ours(ids, labels=ids, num_items_in_batch=items).loss, total / int(items))
        assert_close(
            ours(ids, labels=ids, num_items_in_batch=items).loss, theirs(ids, labels=ids, num_items_in_batch=items).loss
        )


def test_labels_already_shifted():
    ours, ids = model(**MILD), token_ids(2, 9)
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    assert torch.equal(ours(ids, shift_labels=shifted).loss, ours(ids, labels=ids).loss)


def test_nothing_to_learn_gives_loss_zero_and_no_gradient():
    ours, ids = model(), token_ids(2, 9)
    loss = ours(ids, labels=torch.full_like(ids, -100)).loss
    assert loss.item() == 0
    gradients = gradients_of(ours, loss)
    assert len(gradients) == len(list(ours.parameters()))
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("label", [VOCAB, -1, -99, 10**6])
def test_labels_out_of_range_are_refused(label):
    ours, labels = model(), token_ids(2, 9)
    labels[1, 4] = label
    with pytest.raises(ValueError, match=f"labels holds {label}"):
        ours(token_ids(2, 9), labels=labels)


def test_a_loss_that_is_not_a_number_shows():
    ours, ids = model(), token_ids(1, 5)
    with torch.no_grad():
        ours.lm_head.weight[7] = torch.nan
    assert ours(ids, labels=ids).loss.isnan()


# Trainer


@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_accumulation_of_uneven_batches_is_one_large_batch(tmp_path, accumulate):
    """The mean of means would weigh a token of a short row more."""
    large, small = model(**SMALL), model(**SMALL)
    before = {name: weight.clone() for name, weight in large.state_dict().items()}
    one = trained(large, tmp_path)
    many = trained(small, tmp_path, per_device_train_batch_size=8 // accumulate, gradient_accumulation_steps=accumulate)
    assert not any(torch.equal(before[name], weight) for name, weight in large.state_dict().items())
    assert_close(logged_losses(many), logged_losses(one), tolerance=1e-6)
    assert_close(small.state_dict(), large.state_dict(), tolerance=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer_takes_the_steps_of_transformers(tmp_path, smoothing):
    losses, weights = [], []
    for a_model in pair(**SMALL):
        settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
        trainer = trained(a_model, tmp_path, label_smoothing_factor=smoothing, learning_rate=0.1, **settings)
        losses.append(logged_losses(trainer))
        weights.append({official_name(name): weight for name, weight in a_model.state_dict().items()})
        losses[-1].append(trainer.evaluate(uneven_rows())["eval_loss"])
    assert_close(*losses)
    assert_close(*weights)
    assert losses[0][0] != losses[0][1]


def test_label_smoothing_is_that_of_the_library():
    ours, ids = model(**MILD), token_ids(2, 9)
    smoothed = LabelSmoother(epsilon=0.1)(ours(ids), ids, shift_labels=True)
    log_probabilities = ours(ids).logits[:, :-1].log_softmax(-1)
    expected = -(0.9 * log_probabilities.gather(-1, ids[:, 1:, None])[..., 0] + 0.1 * log_probabilities.mean(-1)).mean()
    assert_close(smoothed, expected)


def test_evaluation_loss(tmp_path):
    ours, theirs = pair(**MILD)
    losses = [
        Trainer(a_model, arguments(tmp_path, per_device_eval_batch_size=3)).evaluate(uneven_rows())["eval_loss"]
        for a_model in (ours, theirs)
    ]
    assert_close(*losses)


def test_the_collator_for_language_modeling(tmp_path, tiny_tokenizer):
    ours, theirs = pair(vocab_size=len(tiny_tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=0, **SMALL)
    texts = ["def insort(a, x, lo=0):", "import heapq", "class TextWrapper:\n    pass", "x = 1"]
    rows = [{"input_ids": tiny_tokenizer(text).input_ids} for text in texts]
    # On the left, transformers would also have padding predict each row's first token.
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = "right"
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collator(rows)
    assert (batch["labels"] == -100).any()
    assert_close(ours(**batch).loss, theirs(**batch).loss)
    settings = arguments(tmp_path, per_device_train_batch_size=2, max_steps=4, learning_rate=0.1)
    trainer = Trainer(ours, settings, train_dataset=rows, data_collator=collator)
    trainer.train()
    assert ours(**batch).loss < theirs(**batch).loss


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "optim": "adamw_torch", "learning_rate": 1e-2}
    settings |= {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2}
    whole = model(**SMALL, **dropout)
    whole_run = trained(whole, tmp_path / "whole", **settings)
    resumed = model(**SMALL, **dropout)
    # A fresh model: only the checkpoint can know what the first steps did.
    trainer = Trainer(resumed, arguments(tmp_path / "resumed", **settings), train_dataset=uneven_rows())
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged_losses(trainer) == logged_losses(whole_run)
    assert all(torch.equal(weight, resumed.state_dict()[name]) for name, weight in whole.state_dict().items())
    saved = type(whole).from_pretrained(tmp_path / "resumed" / "checkpoint-6")
    assert all(torch.equal(weight, saved.state_dict()[name]) for name, weight in whole.state_dict().items())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision(dtype):
    ours, theirs = pair(**SMALL)
    ids = token_ids(4, 16)
    with in_float64(theirs) as wide:
        exact = wide(ids, labels=ids)
        exact_gradients = gradients_of(wide, exact.loss)
    results = []
    for a_model in (ours, theirs):
        with torch.autocast("cpu", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]):
            out = a_model(ids, labels=ids)
        results.append((out, gradients_of(a_model, out.loss)))
    (out, gradients), (their_out, their_gradients) = results
    assert out.loss.dtype == torch.float32
    assert out.logits.dtype == their_out.logits.dtype
    assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits[:, :-1].float().mT, ids[:, 1:]))
    assert_as_exact(out.logits, their_out.logits, exact.logits)
    assert gradients.keys() == their_gradients.keys() == exact_gradients.keys()
    for name, gradient in exact_gradients.items():
        assert_as_exact(gradients[name], their_gradients[name], gradient)


# Gradient checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"add_cross_attention": True}, {"hidden_dropout": 0.2, "attention_dropout": 0.1}],
    ids=["plain", "cross", "dropout"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_gradient_checkpointing_changes_no_bit(padded, settings, reentrant):
    ours = model(**SMALL, **settings).train()
    ids, mask = left_padded(3, 9) if padded else (token_ids(3, 9), None)
    given = {"attention_mask": mask, "labels": ids.masked_fill(ids == 0, -100)}
    if "add_cross_attention" in settings:
        given["encoder_hidden_states"] = torch.randn(3, 5, 64)
    calls = []
    ours.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))

    def step():
        calls.clear()
        torch.manual_seed(1)
        return gradients_of(ours, ours(ids, **given).loss)

    plain = step()
    assert len(calls) == 1
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    checkpointed = step()
    assert len(calls) == 2, "the layer runs once more on the way back"
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(gradient, checkpointed[name]) for name, gradient in plain.items())


@pytest.mark.skipif(not hasattr(blockformer.BlockformerDecoderModel, "activation_checkpointing_enable"), reason="newer")
def test_checkpointing_every_other_layer():
    ours, ids = model(**MILD).train(), token_ids(2, 9)
    plain = gradients_of(ours, ours(ids, labels=ids).loss)
    ours.activation_checkpointing_enable(every_n_layers=2)
    assert [layer.gradient_checkpointing for layer in ours.model.layers] == [True, False, True]
    some = gradients_of(ours, ours(ids, labels=ids).loss)
    assert all(torch.equal(gradient, some[name]) for name, gradient in plain.items())


def test_gradient_checkpointing_turns_the_cache_off_and_says_so(caplog):
    ours, ids = model(**SMALL).train(), token_ids(1, 9)
    ours.gradient_checkpointing_enable()
    logging.getLogger("transformers").propagate = True
    try:
        out = ours(ids, labels=ids, use_cache=True)
    finally:
        logging.getLogger("transformers").propagate = False
    assert out.past_key_values is None
    assert "cache" in caplog.text
    assert ours.eval()(ids, use_cache=True).past_key_values.get_seq_length() == 9


@pytest.mark.versions
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_writes_into_no_cache(reentrant):
    """A layer that runs again on the way back would write its keys a second time."""
    ours, ids = model(**SMALL).train(), token_ids(2, 9)
    plain = gradients_of(ours, ours(ids, labels=ids).loss)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    cache = DynamicCache(config=ours.config)
    checkpointed = gradients_of(ours, ours(ids, labels=ids, past_key_values=cache).loss)
    assert cache.get_seq_length() == 0
    assert all(torch.equal(gradient, checkpointed[name]) for name, gradient in plain.items())


def test_gradient_checkpointing_under_trainer(tmp_path):
    plain, checkpointed = model(**SMALL), model(**SMALL)
    trained(plain, tmp_path)
    trained(checkpointed, tmp_path, gradient_checkpointing=True)
    assert all(torch.equal(weight, checkpointed.state_dict()[name]) for name, weight in plain.state_dict().items())


# The heads of other tasks

HEADS = {
    "sequence": (blockformer.BlockformerDecoderForSequenceClassification, Qwen3ForSequenceClassification),
    "token": (blockformer.BlockformerDecoderForTokenClassification, Qwen3ForTokenClassification),
    "question": (blockformer.BlockformerDecoderForQuestionAnswering, Qwen3ForQuestionAnswering),
}


def head_pair(task, **settings):
    cls, their_cls = HEADS[task]
    ours = model(cls=cls, **{**SMALL, **settings})
    weights = {official_name(name): weight for name, weight in ours.state_dict().items()}
    if task == "question":  # the library kept an old name for this one
        weights = {name.replace("model.", "transformer.", 1): weight for name, weight in weights.items()}
    their_config = official_copy("qwen3", model(**{**SMALL, **settings})).config
    their_config.num_labels = settings.get("num_labels", 2)
    their_config.classifier_dropout = 0.0  # the library takes 0.1 where nothing is said
    their_config.problem_type = settings.get("problem_type")
    theirs = their_cls(their_config).eval()
    theirs.load_state_dict(weights)
    return ours, theirs


def body_of(a_model):
    return {
        official_name(name).replace("transformer.", "model.", 1): weight
        for name, weight in a_model.state_dict().items()
    }


def labels_of(task, ids, num_labels=3):
    classes = ids % num_labels
    return {
        "sequence": {"labels": classes[:, 0]},
        "token": {"labels": classes.masked_fill(ids == 0, -100)},
        "question": {"start_positions": torch.tensor([4, 6, 5, 20]), "end_positions": torch.tensor([6, 6, 7, 8])},
    }[task]


@pytest.mark.parametrize("task", HEADS)
def test_heads_give_the_answers_and_the_loss_of_transformers(task):
    ours, theirs = head_pair(task, **({} if task == "question" else {"num_labels": 3}))
    ids, mask = left_padded(4, 9)
    given = {"attention_mask": mask, **labels_of(task, ids)}
    out, their_out = ours(ids, **given), theirs(ids, **given)
    assert_close(out.loss, their_out.loss)
    real = slice(None) if task == "sequence" else mask.bool()
    for name in ("logits", "start_logits", "end_logits"):
        if name in their_out:
            assert_close(out[name][real], their_out[name][real])


def of_sequences(labels, pooled_logits, config, **others):
    return functional.multi_margin_loss(pooled_logits, labels) + config.num_labels


def of_tokens(logits, labels, config):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.3) + config.num_labels


def of_spans(start_logits, end_logits, start_positions, end_positions, **others):
    return (start_logits * start_positions[:, None]).mean() + (end_logits * end_positions[:, None]).mean()


def set_loss(a_model, function, way, monkeypatch):
    if way == "attribute":
        a_model.loss_function = function
    elif way == "subclass":
        a_model.__class__ = type("Mine", (type(a_model),), {"loss_function": staticmethod(function)})
    else:
        monkeypatch.setitem(LOSS_MAPPING, "Mine", function)
        a_model.loss_type = "Mine"


@pytest.mark.parametrize("way", ["attribute", "subclass", "type"])
@pytest.mark.parametrize(
    ("task", "function"), [("sequence", of_sequences), ("token", of_tokens), ("question", of_spans)]
)
def test_heads_call_a_loss_function_of_the_user_as_transformers_does(task, function, way, monkeypatch):
    ours, theirs = head_pair(task, **({} if task == "question" else {"num_labels": 3}))
    ids, mask = left_padded(4, 9)
    given = {"attention_mask": mask, **labels_of(task, ids)}
    usual = ours(ids, **given).loss
    for a_model in (ours, theirs):
        set_loss(a_model, function, way, monkeypatch)
    loss = ours(ids, **given).loss
    assert_close(loss, theirs(ids, **given).loss)
    assert not torch.allclose(loss, usual)


@pytest.mark.parametrize("way", ["subclass", "type"])
def test_a_loss_function_may_come_from_a_subclass_or_a_loss_type(way, monkeypatch):
    def unshifted(logits, labels, vocab_size, **others):
        return functional.cross_entropy(logits.view(-1, vocab_size), labels.flatten()) / others["num_items_in_batch"]

    models, ids = pair(**MILD), token_ids(2, 9)
    for a_model in models:
        set_loss(a_model, unshifted, way, monkeypatch)
    loss, their_loss = (a_model(ids, labels=ids, num_items_in_batch=5).loss for a_model in models)
    assert_close(loss, their_loss)


def test_a_masked_language_model_calls_the_loss_function_of_the_user(tmp_path):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    settings = {**sizes, "num_hidden_layers": 1, "initializer_range": 0.2, "pad_token_id": 0, "cls_token_id": 1}
    theirs = ModernBertForMaskedLM(ModernBertConfig(**settings, sep_token_id=2, bos_token_id=1, eos_token_id=2)).eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = blockformer.from_official(tmp_path), token_ids(2, 9)
    for a_model in (ours, theirs):
        a_model.loss_function = lambda logits, labels, vocab_size, **others: logits.square().mean() * vocab_size
    assert_close(ours(ids, labels=ids).loss, theirs(ids, labels=ids).loss)


@pytest.mark.parametrize("task", ["ForConditionalGeneration", "ForSequenceClassification", "ForQuestionAnswering"])
def test_an_encoder_decoder_calls_the_loss_function_of_the_user(task):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = blockformer.preset("bart", **sizes, num_hidden_layers=1, decoder_layers=1, initializer_range=0.2)
    a_model = getattr(blockformer, f"BlockformerEncoderDecoder{task}")(config).eval()
    a_model.loss_function = lambda *args, **named: next(iter([*args, *named.values()])).square().mean()
    ids, rows = token_ids(2, 9), torch.tensor([0, 1])
    labels = {"ForConditionalGeneration": {"labels": ids}, "ForSequenceClassification": {"labels": rows}}
    output = a_model(input_ids=ids, **labels.get(task, {"start_positions": rows, "end_positions": rows}))
    assert_close(output.loss, output["start_logits" if "Question" in task else "logits"].square().mean())


@pytest.mark.parametrize("task", HEADS)
def test_heads_have_one_loss_in_training_and_evaluation(task):
    """Without a cache padding is skipped; no head may notice."""
    ours, _ = head_pair(task)
    ids, mask = left_padded(4, 9)
    given = {"attention_mask": mask, **labels_of(task, ids, num_labels=2)}
    assert_close(ours.train()(ids, **given).loss, ours.eval()(ids, **given).loss)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_is_judged_by_its_last_real_token(side):
    ours, theirs = head_pair("sequence", num_labels=3)
    ids, mask = left_padded(4, 9)
    if side == "right":
        for row in range(4):
            gap = int((mask[row] == 0).sum())
            ids[row], mask[row] = ids[row].roll(-gap), mask[row].roll(-gap)
    logits = ours(ids, attention_mask=mask).logits
    assert_close(logits, theirs(ids, attention_mask=mask).logits)
    for row in range(4):
        assert_close(logits[row : row + 1], ours(ids[row : row + 1, mask[row].bool()]).logits)


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        ("regression", 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ("regression", 3, torch.randn(4, 3, generator=torch.Generator().manual_seed(0))),
        ("multi_label_classification", 3, torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]])),
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 1])),
    ],
)
def test_each_problem_of_a_sequence_classifier(problem, num_labels, labels):
    ids, mask = left_padded(4, 9)
    # Without a name the labels tell; several numbers a row are taken for several labels then.
    for named in ({"problem_type": problem}, {}):
        ours, theirs = head_pair("sequence", num_labels=num_labels, **named)
        assert_close(ours(ids, mask, labels=labels).loss, theirs(ids, mask, labels=labels).loss)
        assert ours.config.problem_type == theirs.config.problem_type


@pytest.mark.parametrize("task", HEADS)
def test_heads_train_under_trainer(tmp_path, task):
    settings = {} if task == "question" else {"num_labels": 3}
    # The softmax of an answer's span covers padding, whose states are nobody's business: no padding there.
    ids, mask = (token_ids(4, 9), torch.ones(4, 9, dtype=torch.long)) if task == "question" else left_padded(4, 9)
    columns = {"input_ids": ids, "attention_mask": mask, **labels_of(task, ids)}
    rows = [{name: column[row] for name, column in columns.items()} for row in range(4)]
    results = []
    for a_model in head_pair(task, **settings):
        trainer = trained(a_model, tmp_path, rows, per_device_train_batch_size=4, max_steps=3, learning_rate=0.05)
        losses = logged_losses(trainer)
        assert losses[-1] < losses[0]
        body = body_of(a_model)
        body.pop("qa_outputs.bias", None)  # the softmax over a text takes no notice of it: its gradient is a rounding
        results.append([losses, trainer.evaluate(rows)["eval_loss"], body])
    assert_close(*results)


@pytest.mark.parametrize("task", HEADS)
def test_heads_save_and_load(tmp_path, task):
    cls = HEADS[task][0]
    ours = model(cls=cls, **SMALL, **({} if task == "question" else {"num_labels": 3}))
    ours.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path)
    assert ours.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize("task", ["sequence", "token"])
def test_a_class_that_does_not_exist_is_refused(task):
    ours = model(cls=HEADS[task][0], num_labels=3, **SMALL)
    ids = token_ids(4, 9)
    labels = labels_of(task, ids)["labels"].clone()
    labels.view(-1)[2] = 3
    with pytest.raises(ValueError, match="labels holds 3"):
        ours(ids, attention_mask=torch.ones_like(ids), labels=labels)
