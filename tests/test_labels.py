"""Which labels count: all but -100, as in the official classes, so that `Trainer` divides by what was summed."""

import copy

import pytest
import torch
import transformers
from pairs import assert_close, assert_gradients_close
from test_training import arguments, gradients_of, logged_losses
from transformers import Trainer

import blockformer

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40, "initializer_range": 0.3, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0,
}  # fmt: skip
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "init_std": 0.3, "dropout": 0.0}
BART |= {"decoder_start_token_id": 2}
QWEN = {"num_key_value_heads": 2, "head_dim": 8}
OFFICIAL = {
    "Qwen3ForCausalLM": QWEN,
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 40, "embd_pdrop": 0.0}
    | {"attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "Qwen3ForTokenClassification": {**QWEN, "num_labels": VOCAB},
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {"type_vocab_size": 1},
    "BertForTokenClassification": {"num_labels": VOCAB},
    "BertForPreTraining": {},
    "BartForConditionalGeneration": BART,
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    | {"dropout_rate": 0.0, "decoder_start_token_id": 1},
    "ElectraForPreTraining": {"embedding_size": 32},
}
BY_MASK = {"ElectraForPreTraining"}  # this class leaves padding out by the mask
ROWS = 8


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    """A function from an official class's name to a small model of it and ours of the same weights."""
    made = {}

    def pair(name):
        if name not in made:
            torch.manual_seed(0)
            official = getattr(transformers, name)
            theirs = official(official.config_class(**SIZES | OFFICIAL[name])).eval()
            folder = tmp_path_factory.mktemp(name)
            theirs.save_pretrained(folder)
            made[name] = blockformer.from_official(folder).eval(), theirs
        return copy.deepcopy(made[name])

    return pair


def batch_for(name, side="right", labelled="everywhere"):
    """Rows of uneven lengths with labels everywhere, only on "real" tokens, or "nowhere"."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(12) < torch.tensor([4, 6, 12, 3, 5, 7, 9, 12])[:, None]).long()
    mask = mask if side == "right" else mask.flip(-1)
    ids = torch.randint(3, VOCAB, (ROWS, 12), generator=generator).masked_fill(mask == 0, 1)
    labels = ids % 2 if name in BY_MASK else ids
    if labelled != "everywhere":
        labels = labels.masked_fill(mask == 0 if labelled == "real" else mask >= 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if "Conditional" in name:
        batch |= {"decoder_input_ids": ids.roll(1, 1), "decoder_attention_mask": mask}
    if name == "BertForPreTraining":
        batch["next_sentence_label"] = torch.arange(ROWS) % 2
    return batch


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("name", "side", "labelled"),
    [(name, "right", "everywhere") for name in OFFICIAL]
    + [(name, "right", "real") for name in OFFICIAL if name not in BY_MASK]
    + [
        (f"Qwen3For{task}", "left", which)
        for task in ("CausalLM", "TokenClassification")
        for which in ("everywhere", "real")
    ],
)
def test_the_loss_is_that_of_the_official_class(name, side, labelled, training, pairs_of):
    """On padding too, whose states are computed where a label needs them."""
    ours, theirs = (model.train(training) for model in pairs_of(name))
    batch = batch_for(name, side, labelled)
    found, expected = ours(**batch).loss, theirs(**batch).loss
    assert_close(found, expected)
    if labelled == "everywhere" and name not in BY_MASK:
        assert abs(found - ours(**batch_for(name, side, "real")).loss) > 1e-2


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "BertForTokenClassification", "BertForPreTraining", "BartForConditionalGeneration"]
)
def test_the_loss_of_a_double_model_is_double(name, pairs_of):
    ours, theirs = (model.double() for model in pairs_of(name))
    batch = batch_for(name)
    torch.testing.assert_close(ours(**batch).loss, theirs(**batch).loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_the_loss_of_numbers_is_double_in_a_double_model(problem, tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=3, problem_type=problem)
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).double()
    ids, labels = torch.randint(3, VOCAB, (4, 9)), torch.rand(4, 3).round().double()
    expected = theirs.double()(ids, labels=labels).loss
    for given in (labels, labels.float()):
        torch.testing.assert_close(ours(ids, labels=given).loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OFFICIAL)
def test_trainer_reports_the_mean_over_what_was_summed(name, pairs_of, tmp_path):
    """Whole, and accumulated over uneven batches: labels on padding are in the sum and in the divisor."""
    ours, _ = pairs_of(name)
    batch = batch_for(name)
    rows = [{key: column[row] for key, column in batch.items()} for row in range(ROWS)]
    expected = ours(**batch).loss.item()
    for pieces in (1, 4):
        settings = {"per_device_train_batch_size": ROWS // pieces, "gradient_accumulation_steps": pieces}
        trainer = Trainer(copy.deepcopy(ours), arguments(tmp_path, **settings), train_dataset=rows)
        trainer.train()
        if pieces == 1 or name not in BY_MASK | {"BertForPreTraining"}:  # which weigh means by labels
            assert logged_losses(trainer)[0] == pytest.approx(expected, rel=1e-4)
    assert Trainer(ours, arguments(tmp_path)).evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_number_of_minus_100_is_a_target_of_a_regression(tmp_path):
    """`Trainer` does not count it, so it may not be divided by that count."""
    settings = {**QWEN, "num_labels": 1, "problem_type": "regression"}
    config = {key: value for key, value in SIZES.items() if "dropout" not in key}
    torch.manual_seed(0)
    ours = blockformer.BlockformerDecoderForSequenceClassification(blockformer.preset("qwen3", **config, **settings))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (4, 9), generator=generator)
    rows = [
        {"input_ids": row, "labels": torch.tensor(label)}
        for row, label in zip(ids, [1.0, -100.0, 3.0, -100.0], strict=True)
    ]
    expected = ours.eval()(ids, labels=torch.stack([row["labels"] for row in rows])).loss.item()
    found = Trainer(ours, arguments(tmp_path, per_device_eval_batch_size=4)).evaluate(rows)["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-5)
    alone = Trainer(ours, arguments(tmp_path, per_device_eval_batch_size=1)).evaluate(rows)["eval_loss"]
    assert alone == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in OFFICIAL if name not in BY_MASK])
def test_a_batch_without_labels_is_left_out_of_an_evaluation(name, pairs_of, tmp_path):
    ours, theirs = pairs_of(name)
    batch, nowhere = batch_for(name), batch_for(name, labelled="nowhere")
    rows = [{key: given[key][row] for key in given} for given in (batch, nowhere) for row in range(ROWS)]
    found = Trainer(ours, arguments(tmp_path, per_device_eval_batch_size=ROWS)).evaluate(rows)["eval_loss"]
    assert found == pytest.approx(theirs(**batch).loss.item(), rel=1e-5)
    with torch.no_grad():
        assert ours(**nowhere).loss.isnan()


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_batch_without_labels_teaches_nothing(name, pairs_of):
    ours, _ = pairs_of(name)
    batch = batch_for(name, labelled="nowhere")
    items = 5 if name == "BertForPreTraining" else None  # whose next sentences have labels of their own
    loss = ours.train()(**batch, num_items_in_batch=items).loss
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients_of(ours, loss).values())


def test_probabilities_of_one_label_need_deberta_s_loss(tmp_path):
    """As the page on coming from transformers says: the official class takes floats for these."""
    sizes = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    more = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0}
    config = transformers.DebertaV2Config(**sizes, **more, pooler_hidden_size=32, num_labels=3)
    torch.manual_seed(0)
    theirs = transformers.DebertaV2ForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    ours.loss_function = lambda logits, labels, **named: torch.nn.functional.cross_entropy(logits, labels)
    ids, labels = torch.randint(3, VOCAB, (4, 9)), torch.rand(4, 3).softmax(-1)
    assert_close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss)


def test_a_span_outside_of_the_text():
    config = blockformer.preset("bert", **{key: value for key, value in SIZES.items() if "dropout" not in key})
    ours, nowhere = blockformer.BlockformerEncoderForQuestionAnswering(config), torch.tensor([99, 99])
    given = {"input_ids": torch.full((2, 5), 7), "start_positions": nowhere, "end_positions": nowhere}
    assert ours(**given).loss == 0
    with torch.no_grad():
        assert ours.eval()(**given).loss.isnan()


CLASSIFIERS = ["TokenClassification", "SequenceClassification"]
SMOOTHED = {
    "Decoder": ["CausalLM", *CLASSIFIERS],
    "Encoder": ["MaskedLM", *CLASSIFIERS, "NextSentencePrediction", "MultipleChoice", "PreTraining"],
    "EncoderDecoder": ["ConditionalGeneration", "SequenceClassification"],
}
PRESETS = {"Decoder": "qwen3", "Encoder": "bert", "EncoderDecoder": "bart"}


def fresh(topology, task, **settings):
    config = {key: value for key, value in SIZES.items() if "dropout" not in key} | settings
    config |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    config |= {"decoder_start_token_id": 2} if topology == "EncoderDecoder" else {}
    torch.manual_seed(0)
    return getattr(blockformer, f"Blockformer{topology}For{task}")(
        blockformer.preset(PRESETS[topology], **config)
    ).eval()


@pytest.mark.parametrize(("topology", "task"), [(each, task) for each, tasks in SMOOTHED.items() for task in tasks])
def test_label_smoothing_is_honoured(topology, task):
    """It spreads a share of each label evenly over the classes."""
    ours = fresh(topology, task, num_labels=3)
    ids = torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(0))
    batch, labels = (
        {"input_ids": ids},
        ids if task in ("CausalLM", "MaskedLM", "PreTraining", "ConditionalGeneration") else ids % 3,
    )
    if task in ("SequenceClassification", "NextSentencePrediction", "MultipleChoice"):
        labels = ids[:, 0] % 2
    if task == "MultipleChoice":
        batch = {"input_ids": torch.stack([ids.roll(turn, 0) for turn in range(3)], dim=1)}
    if task == "SequenceClassification" and topology == "EncoderDecoder":
        ids[:, -1] = 2
    batch |= {"next_sentence_label": ids[:, 0] % 2} if task == "PreTraining" else {}
    output = ours(**batch, labels=labels, label_smoothing=0.2)

    def smoothed(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.2)

    if task == "PreTraining":
        own = smoothed(output.seq_relationship_logits, batch["next_sentence_label"])
        expected = smoothed(output.prediction_logits, labels) + own
    elif task == "CausalLM":
        expected = smoothed(output.logits[:, :-1], labels[:, 1:])
    else:
        expected = smoothed(output.logits, labels)
    assert_close(output.loss, expected)
    assert abs(output.loss - ours(**batch, labels=labels).loss) > 1e-3


@pytest.mark.parametrize(
    ("topology", "task", "settings"),
    [
        ("Encoder", "SequenceClassification", {"num_labels": 1}),
        ("Decoder", "SequenceClassification", {"num_labels": 3, "problem_type": "multi_label_classification"}),
        ("Encoder", "ReplacedTokenDetection", {}),
        ("Encoder", "QuestionAnswering", {}),
        ("Decoder", "QuestionAnswering", {}),
        ("EncoderDecoder", "QuestionAnswering", {}),
    ],
)
def test_label_smoothing_is_refused_where_it_means_nothing(topology, task, settings):
    ours, ids = fresh(topology, task, **settings), torch.full((2, 5), 7)
    labels = torch.ones(2, 5, dtype=torch.long) if "Token" in task else torch.zeros(2, settings.get("num_labels", 1))
    given = {"labels": labels}
    if task == "QuestionAnswering":
        given = {"start_positions": torch.tensor([1, 1]), "end_positions": torch.tensor([2, 2])}
    with pytest.raises(ValueError, match="needs labels of one class"):
        ours(ids, **given, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("name", "side"),
    [(name, "right") for name in OFFICIAL if name not in BY_MASK]
    + [("Qwen3ForCausalLM", "left"), ("GPT2LMHeadModel", "left")],
)
def test_what_embeddings_learn_from_padding(name, side, pairs_of):
    """In most official classes the padding token's own learns nothing, and counts in no norm of gradients."""
    batch, gradients = batch_for(name, side), []
    if side == "left":
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for model in pairs_of(name):
        model(**batch).loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    assert_close(*gradients)


def test_gradients_of_labels_on_padding(pairs_of):
    ours, theirs = pairs_of("BertForMaskedLM")
    batch, gradients = batch_for("BertForMaskedLM"), []
    for model in (ours, theirs):
        found = gradients_of(model, model(**batch).loss)
        gradients.append(sorted((tuple(each.shape), each.norm().item()) for each in found.values()))
    assert_gradients_close(*({place: torch.tensor(norm) for place, (_, norm) in enumerate(each)} for each in gradients))


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": 50}])
def test_a_loss_that_the_user_sets_takes_the_place_of_the_models(items, pairs_of):
    """As in the official class, it gets the labels as they are passed, which may be anything."""

    def distance(logits, labels, vocab_size, **items):
        assert vocab_size == VOCAB
        return (logits[:, :-1] - labels[:, 1:]).square().sum() / items.get("num_items_in_batch", 7)

    batch, losses, gradients = batch_for("Qwen3ForCausalLM"), [], []
    labels = torch.randn(*batch["input_ids"].shape, VOCAB, generator=torch.Generator().manual_seed(0))
    for model in pairs_of("Qwen3ForCausalLM"):
        assert "loss" not in model(batch["input_ids"], **items)
        model.loss_function = distance
        losses.append(model(**batch | {"labels": labels}, **items).loss)
        gradients.append(gradients_of(model, losses[-1]))
    assert_close(*losses)
    assert_gradients_close(*gradients)
