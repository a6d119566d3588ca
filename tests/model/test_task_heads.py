"""The task heads: they take what the official heads take, and learn the same from a batch whole or in pieces."""

import dataclasses
import inspect
import json
import typing

import pytest
import torch
import transformers
from pairs import assert_close
from sizes import TINY
from test_training import arguments
from transformers import Trainer
from transformers.trainer_utils import set_seed

import blockformer
from blockformer.model.compat import CACHE

VOCAB = 61
DRY = {
    **TINY,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
TOKENS = {"eos_token_id": 1, "decoder_start_token_id": 0}
PRESETS = {"Encoder": "bert", "Decoder": "gpt2", "EncoderDecoder": "bart"}
# Each head with the official classes of the same task.
OFFICIAL = {
    "EncoderModel": "BertModel RobertaModel DistilBertModel ErnieModel",
    "EncoderForMaskedLM": "BertForMaskedLM RobertaForMaskedLM DistilBertForMaskedLM ErnieForMaskedLM",
    "EncoderForPreTraining": "BertForPreTraining ErnieForPreTraining",
    "EncoderForNextSentencePrediction": "BertForNextSentencePrediction ErnieForNextSentencePrediction",
    "EncoderForSequenceClassification": (
        "BertForSequenceClassification RobertaForSequenceClassification ErnieForSequenceClassification"
    ),
    "EncoderForTokenClassification": (
        "BertForTokenClassification DistilBertForTokenClassification ErnieForTokenClassification"
    ),
    "EncoderForQuestionAnswering": "BertForQuestionAnswering RobertaForQuestionAnswering ErnieForQuestionAnswering",
    "EncoderForReplacedTokenDetection": "ElectraForPreTraining",
    "EncoderForMultipleChoice": "BertForMultipleChoice DistilBertForMultipleChoice ErnieForMultipleChoice",
    "DecoderModel": "Qwen3Model GPT2Model BertModel",
    "DecoderForCausalLM": "Qwen3ForCausalLM LlamaForCausalLM GPT2LMHeadModel BertLMHeadModel ErnieForCausalLM",
    "DecoderForSequenceClassification": "Qwen3ForSequenceClassification GPT2ForSequenceClassification",
    "DecoderForTokenClassification": "Qwen3ForTokenClassification GPT2ForTokenClassification",
    "DecoderForQuestionAnswering": "Qwen3ForQuestionAnswering GPT2ForQuestionAnswering",
    "EncoderDecoderModel": "T5Model BartModel MarianModel",
    "EncoderDecoderForConditionalGeneration": "T5ForConditionalGeneration BartForConditionalGeneration MarianMTModel",
    "EncoderDecoderForSequenceClassification": "T5ForSequenceClassification BartForSequenceClassification",
    "EncoderDecoderForQuestionAnswering": "T5ForQuestionAnswering BartForQuestionAnswering",
}
# No columns, and not named by the newer classes.
SWITCHES = {"output_attentions", "output_hidden_states", "return_dict"}
# An official BERT class is an encoder or a decoder, as its config says; ours of an encoder looks at no other encoder.
OF_A_DECODER = {"encoder_hidden_states", "encoder_attention_mask", "past_key_values", "use_cache"}


def make(name, **overrides):
    """A small model with a head, in training mode."""
    torch.manual_seed(0)
    topology = next(each for each in ("EncoderDecoder", "Encoder", "Decoder") if name.startswith(each))
    own = TOKENS if topology == "EncoderDecoder" else {"eos_token_id": 1}
    settings = {**DRY, **own, "num_labels": 3, **overrides}
    if topology == "Decoder":
        settings["bos_token_id"] = 0
    return getattr(blockformer, f"Blockformer{name}")(blockformer.preset(PRESETS[topology], **settings)).train()


def rows_for(name, count=8, length=9, **overrides):
    """Rows of a batch for a head, with its labels."""
    generator = torch.Generator().manual_seed(2)

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    rows = []
    for _ in range(count):
        ids = numbers(2, VOCAB, *((4, length) if "Choice" in name else (length,)))
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "LM" in name or "PreTraining" in name or "Conditional" in name:
            row["labels"] = numbers(2, VOCAB, length)
            row["labels"][: numbers(0, 6, 1)] = -100
        if "PreTraining" in name:
            row["labels"] = torch.where(torch.arange(length) < 4, numbers(2, VOCAB, length), -100)
            row["next_sentence_label"] = numbers(0, 2, 1)[0]
        if "NextSentence" in name:
            row["labels"] = numbers(0, 2, 1)[0]
        if "Choice" in name:
            row["labels"] = numbers(0, 4, 1)[0]
        if "QuestionAnswering" in name:
            row |= {"start_positions": numbers(0, length, 1)[0], "end_positions": numbers(0, length, 1)[0]}
        if "TokenDetection" in name:
            row["labels"] = numbers(-1, 2, length)
            row["labels"][row["labels"] < 0] = -100
        if "TokenClassification" in name:
            row["labels"] = numbers(0, 3, length)
            row["labels"][: numbers(0, 6, 1)] = -100
        if "SequenceClassification" in name:
            problem = overrides.get("problem_type")
            row["labels"] = numbers(0, 3, 1)[0] if problem is None else torch.rand(3, generator=generator)
            if problem == "multi_label_classification":
                row["labels"] = row["labels"].round()
        rows.append(row)
    return rows


def is_trained(name):
    return not name.endswith("Model")


@pytest.mark.versions
@pytest.mark.parametrize("name", OFFICIAL)
def test_forward_says_what_it_returns(name):
    """sentence-transformers reads the fields of an output off the annotation."""
    returned = typing.get_type_hints(getattr(blockformer, f"Blockformer{name}").forward)["return"]
    for output in typing.get_args(returned) or (returned,):
        names = {field.name for field in dataclasses.fields(output)}
        assert names & {"last_hidden_state", "logits", "prediction_logits", "start_logits"}


@pytest.mark.parametrize("name", OFFICIAL)
def test_forward_names_what_the_official_classes_name(name):
    """`Trainer` keeps the columns that it finds in the signature, and drops all others without a word."""
    ours = inspect.signature(getattr(blockformer, f"Blockformer{name}").forward).parameters
    for official in OFFICIAL[name].split():
        theirs = inspect.signature(getattr(transformers, official).forward).parameters
        named = {
            "past_key_values" if key == CACHE else key  # each forward of ours takes both names
            for key, parameter in theirs.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        } - SWITCHES
        if name.startswith("Encoder") and not name.startswith("EncoderDecoder"):
            named -= OF_A_DECODER
        assert named <= set(ours), f"{official}: {sorted(named - set(ours))}"


def test_the_class_for_pre_training_is_the_one_that_made_the_weights(tmp_path, fresh):
    ids, found = torch.arange(3, 9)[None], {}
    others = {"EncoderForMaskedLM": {"type_vocab_size": 1}, "EncoderDecoderForConditionalGeneration": {}}
    others["DecoderForCausalLM"] = {}
    for name in ("EncoderForPreTraining", "EncoderForReplacedTokenDetection", *others):
        model = make(name, **others.get(name, {})).eval()
        blockformer.export_model(model, tmp_path / name)
        again = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / name)
        assert type(again) is type(model)
        assert type(transformers.AutoModelForPreTraining.from_config(again.config)) is type(model)
        sides = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        found[name] = model(ids, **sides)[0].flatten().tolist()
    assert type(transformers.AutoModelForTextEncoding.from_pretrained(tmp_path / "EncoderForMaskedLM")) is (
        blockformer.BlockformerEncoderModel
    )
    bert = blockformer.preset("bert", **DRY)
    assert type(transformers.AutoModelForPreTraining.from_config(bert)).__name__ == "BlockformerEncoderForPreTraining"
    script = """
import json, torch
from transformers import AutoModelForPreTraining
found = {}
for name in sys.argv[2:]:
    model = AutoModelForPreTraining.from_pretrained(f"{sys.argv[1]}/{name}", trust_remote_code=True).eval()
    assert type(model).__name__ == f"Blockformer{name}", type(model)
    ids = torch.arange(3, 9)[None]
    sides = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    found[name] = model(ids, **sides)[0].flatten().tolist()
print(json.dumps(found))
"""
    elsewhere = json.loads(fresh(script, tmp_path, *found, folder=tmp_path))
    for name, numbers in found.items():
        assert_close(torch.tensor(elsewhere[name]), torch.tensor(numbers))


def test_every_head_is_compared():
    heads = {name.removeprefix("Blockformer") for name in blockformer.__all__ if "Config" not in name}
    assert {name for name in heads if name.startswith(tuple(PRESETS))} == set(OFFICIAL)


@pytest.mark.parametrize(
    ("name", "problem_type"),
    [(name, None) for name in OFFICIAL if is_trained(name)]
    + [
        (name, problem)
        for name in OFFICIAL
        if "SequenceClassification" in name
        for problem in ("regression", "multi_label_classification")
        if "EncoderFor" in name
    ],
)
def test_an_update_does_not_depend_on_the_number_of_pieces(name, problem_type, tmp_path):
    """8 rows at once, and 4 times 2 rows accumulated, are the same step."""
    settings = {} if problem_type is None else {"problem_type": problem_type}
    updates = []
    for pieces in (1, 4):
        model = make(name, **settings)
        before = {key: weight.clone() for key, weight in model.state_dict().items()}
        own = {"per_device_train_batch_size": 8 // pieces, "gradient_accumulation_steps": pieces}
        Trainer(model, arguments(tmp_path, **own), train_dataset=rows_for(name, **settings)).train()
        updates.append({key: weight - before[key] for key, weight in model.state_dict().items()})
    whole, accumulated = updates
    largest = max(change.abs().max() for change in whole.values())
    assert largest > 1e-3
    assert_close(accumulated, whole, at_least=largest.item())  # a weight's own rounding is in its change


@pytest.mark.parametrize("name", OFFICIAL)
def test_embeddings_in_place_of_tokens(name):
    model = make(name).eval()
    batch = torch.utils.data.default_collate(rows_for(name, count=2))
    if name.startswith("EncoderDecoder"):
        batch["decoder_input_ids"] = batch["input_ids"]
    expected = model(**batch)
    embed = model.get_input_embeddings()
    for key, place in (("input_ids", "inputs_embeds"), ("decoder_input_ids", "decoder_inputs_embeds")):
        if key in batch:
            batch[place] = embed(batch.pop(key))
    found = model(**batch)
    for key, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            assert_close(found[key], tensor)


@pytest.mark.parametrize("name", ["EncoderDecoderForSequenceClassification", "EncoderDecoderForQuestionAnswering"])
def test_a_classifier_given_embeddings_alone_says_what_its_decoder_lacks(name):
    model = make(name)
    with pytest.raises(ValueError, match="decoder_inputs_embeds"):
        model(inputs_embeds=torch.zeros(2, 5, 32))


class Segments(torch.utils.data.Dataset):
    """Rows whose class is the segment of one token, or its task; nothing else tells it."""

    def __init__(self, count, column="token_type_ids"):
        generator = torch.Generator().manual_seed(1)
        self.rows = []
        for label in torch.randint(2, (count,), generator=generator):
            ids = torch.randint(3, VOCAB, (8,), generator=generator)
            types = torch.zeros(8, dtype=torch.long)
            types[4:] = label
            self.rows.append({"input_ids": ids, column: types, "labels": label})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize("column", ["token_type_ids", "task_type_ids"])
def test_trainer_passes_the_segments_of_a_sentence_pair_on(tmp_path, column):
    set_seed(0)
    types = {"task_type_vocab_size": 2} if column == "task_type_ids" else {}
    model = make("EncoderForSequenceClassification", num_labels=2, initializer_range=0.1, **types)
    settings = {"optim": "adamw_torch", "learning_rate": 3e-3, "max_steps": 60, "per_device_train_batch_size": 16}
    trainer = Trainer(model, arguments(tmp_path, **settings), train_dataset=Segments(256, column))
    trainer.train()
    output = trainer.predict(Segments(300, column))
    assert (output.predictions.argmax(-1) == output.label_ids).mean() > 0.95


OF_DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("side", ["right", "none"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "DebertaV2"])
def test_padded_question_answering_ends_where_that_of_transformers_ends(family, side, tmp_path):
    """The softmax goes over padding too, so padding must have the states that it has there."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=40, initializer_range=0.3, pad_token_id=1,
        **(OF_DEBERTA if family == "DebertaV2" else {"type_vocab_size": 2}),
        dim=32, hidden_dim=48, n_layers=2, n_heads=4,
    )  # fmt: skip
    theirs = getattr(transformers, f"{family}ForQuestionAnswering")(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).eval()
    ids = torch.randint(3, VOCAB, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if side == "right":
        mask = (torch.arange(11) < torch.tensor([[11], [4], [7]])).long()
        ids = ids.masked_fill(mask == 0, 1)
    batch = {"input_ids": ids, "attention_mask": mask}
    batch |= {"start_positions": torch.tensor([2, 1, 4]), "end_positions": torch.tensor([8, 3, 6])}
    outputs = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs.append([])
        for _ in range(5):
            outputs[-1].append(model(**batch))
            optimizer.zero_grad()
            outputs[-1][-1].loss.backward()
            optimizer.step()
    for found, expected in zip(*outputs, strict=True):
        assert_close(found.loss, expected.loss, tolerance=1e-4)
    assert_close(outputs[0][0].start_logits, outputs[1][0].start_logits)
    assert outputs[1][-1].loss < 0.9 * outputs[1][0].loss


def test_generate_takes_token_types(tmp_path):
    """A BERT decoder's tokens after the prompt have the type of its last one."""
    torch.manual_seed(0)
    own = {**DRY, "type_vocab_size": 2, "eos_token_id": None, "initializer_range": 0.5}
    model = blockformer.BlockformerDecoderForCausalLM(blockformer.preset("bert-decoder", **own)).eval()
    ids = torch.randint(3, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    types, text = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]), ids
    found = model.generate(ids, token_type_ids=types, max_new_tokens=6, do_sample=False)
    for _ in range(6):
        logits = model(text, token_type_ids=types, use_cache=False).logits[:, -1]
        text = torch.cat((text, logits.argmax(-1, keepdim=True)), -1)
        types = torch.cat((types, types[:, -1:]), -1)
    assert torch.equal(found, text)
    assert not torch.equal(found, model.generate(ids, max_new_tokens=6, do_sample=False))


def test_a_fresh_norm_with_factors_of_its_own_is_drawn(tmp_path):
    """Of a head that a checkpoint lacks, a norm that the library does not know: else it is whatever memory holds."""
    settings = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": None, "layer_types": None}
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = blockformer.preset(
        "gemma2", num_attention_heads=4, classifier_transform=True, **settings, **sizes, **tokens
    )
    blockformer.BlockformerDecoderModel(config).save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        model = blockformer.BlockformerDecoderForTokenClassification.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(model.classifier_transform.norm.weight, torch.zeros(32))
