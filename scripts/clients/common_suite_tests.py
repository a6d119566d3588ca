"""Testers for transformers' common model tests: each kind of model twice, ours and theirs, same sizes, same inputs.

Run by `common_suite.py`, which says in COMMON_SUITE where the source archive of transformers lies.
"""

import json
import os
import sys
import unittest.mock
from pathlib import Path

sys.path.insert(0, os.environ["COMMON_SUITE"])

import pytest
import torch
import transformers
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from tests.test_training_mixin import TrainingTesterMixin
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import blockformer
from blockformer.model.configuration_blockformer import BlockformerConfig
from blockformer.model.pretrained_model import BlockformerPreTrainedModel
from tests import test_modeling_common

BATCH, LENGTH, WIDTH, LAYERS, HEADS, INNER, VOCAB, POSITIONS = 13, 7, 32, 2, 4, 37, 99, 512
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": POSITIONS,
}
QWEN3 = {"num_key_value_heads": 2, "head_dim": 8, **SPECIAL}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
BERT = {**SIZES, "type_vocab_size": 16}
TWO_STACKS = {**SPECIAL, "eos_token_id": 1, "decoder_start_token_id": 0}
KINDS = {
    # kind: (our preset, its settings, what follows "Blockformer"), (their config, its settings, names of classes)
    "bert": (
        ("bert", BERT, "Encoder"),
        ("BertConfig", BERT, "BertModel BertForMaskedLM BertForPreTraining BertForNextSentencePrediction "
         "BertForMultipleChoice BertForSequenceClassification BertForTokenClassification BertForQuestionAnswering"),
    ),
    "gpt2": (
        ("gpt2", {**SIZES, **SPECIAL}, "Decoder"),
        ("GPT2Config", {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": INNER,
                        "n_positions": POSITIONS, **SPECIAL},
         "GPT2Model GPT2LMHeadModel GPT2ForSequenceClassification GPT2ForTokenClassification "
         "GPT2ForQuestionAnswering"),
    ),
    "qwen3": (
        ("qwen3", {**SIZES, **QWEN3}, "Decoder"),
        ("Qwen3Config", {**SIZES, **QWEN3}, "Qwen3Model Qwen3ForCausalLM Qwen3ForSequenceClassification "
         "Qwen3ForTokenClassification Qwen3ForQuestionAnswering"),
    ),
    "qwen3_moe": (
        ("qwen3_moe", {**SIZES, **QWEN3, **EXPERTS}, "Decoder"),
        ("Qwen3MoeConfig", {**SIZES, **QWEN3, **EXPERTS}, "Qwen3MoeModel Qwen3MoeForCausalLM "
         "Qwen3MoeForSequenceClassification Qwen3MoeForTokenClassification Qwen3MoeForQuestionAnswering"),
    ),
    "t5": (
        ("t5", {**SIZES, **TWO_STACKS, "head_dim": 8}, "EncoderDecoder"),
        ("T5Config", {"vocab_size": VOCAB, "d_model": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "d_ff": INNER,
                      "d_kv": 8, **TWO_STACKS},
         "T5Model T5ForConditionalGeneration T5ForSequenceClassification T5ForQuestionAnswering"),
    ),
    "bart": (
        ("bart", {**SIZES, **TWO_STACKS}, "EncoderDecoder"),
        ("BartConfig", {"vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
                        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER,
                        "decoder_ffn_dim": INNER, "max_position_embeddings": POSITIONS, **TWO_STACKS},
         "BartModel BartForConditionalGeneration BartForSequenceClassification BartForQuestionAnswering"),
    ),
    "bert_decoder": (
        ("bert-decoder", {**BERT, "add_cross_attention": True}, "Decoder"),
        ("BertConfig", {**BERT, "is_decoder": True, "add_cross_attention": True}, "BertModel BertLMHeadModel"),
    ),
}  # fmt: skip
DECODERS = ("gpt2", "qwen3", "qwen3_moe")
TASKS = {
    # What a class is called after its topology, and the library's list of such classes, which its tests go by.
    "Model": "MODEL_MAPPING_NAMES",
    "ForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "ForNextSentencePrediction": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "ForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ForConditionalGeneration": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}


def adapt(suite):
    """What the tests do to a config of any kind, done to ours in the way it allows: it refuses what means nothing.

    Large epsilons: under all names that the library's models use; ours has one. A sliding window: also where no layer
    has one, before the model is saved. Scaled rotary positions: where a config has `rope_parameters`; ours always has
    the field, None where positions are of another kind.
    """
    epsilons, scales = suite.set_config_for_less_flaky_test, suite._config_supports_rope_scaling
    save = PreTrainedModel.save_pretrained

    def set_epsilons(config):
        if isinstance(config, BlockformerConfig):
            config.norm_eps = 1.0
        else:
            epsilons(config)

    def save_without_window(model, *args, **kwargs):
        if "sliding_attention" not in model.config.layer_types:
            model.config.sliding_window = None
        return save(model, *args, **kwargs)

    suite.set_config_for_less_flaky_test = set_epsilons
    suite._config_supports_rope_scaling = lambda config: (
        bool(getattr(config, "rope_parameters", None)) and scales(config)
    )
    BlockformerPreTrainedModel.save_pretrained = save_without_window


adapt(test_modeling_common)


class Tester:
    """What the common tests ask of a model tester: sizes, a config, inputs."""

    __test__ = False
    is_training = True
    batch_size, seq_length, num_choices = BATCH, LENGTH, 4
    encoder_seq_length = decoder_seq_length = key_length = LENGTH
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = VOCAB, WIDTH, LAYERS, HEADS

    def __init__(self, kind, make_config, classes, whole_target):
        self.kind, self.get_config, self.whole_target = kind, make_config, whole_target
        self.causal_lm_class = next((cls for cls in classes if cls.can_generate()), None)

    def prepare_config_and_inputs_for_common(self):
        inputs = {"input_ids": ids_tensor([BATCH, LENGTH], VOCAB - 3) + 3}
        inputs["attention_mask"] = random_attention_mask([BATCH, LENGTH])
        if self.kind == "bert":
            inputs["token_type_ids"] = ids_tensor([BATCH, LENGTH], 16)
        if self.kind in DECODERS:
            inputs["attention_mask"] = torch.tril(torch.ones_like(inputs["input_ids"]))
        if self.kind in ("t5", "bart"):
            inputs["input_ids"][:, -1] = 1  # a classifier of two stacks reads the state at the end token
            inputs["attention_mask"][:, -1] = 1
            inputs["decoder_input_ids"] = ids_tensor([BATCH, LENGTH], VOCAB - 3) + 3
            inputs["decoder_input_ids"][:, -1] = 1
            inputs["decoder_attention_mask"] = random_attention_mask([BATCH, LENGTH])
            if self.whole_target:
                inputs["decoder_attention_mask"].fill_(1)
        if self.kind == "bert_decoder":
            inputs["encoder_hidden_states"] = torch.randn(BATCH, LENGTH, WIDTH)
            inputs["encoder_attention_mask"] = random_attention_mask([BATCH, LENGTH])
        return self.get_config(), inputs


def draw_missing_weights():
    """A context in which our models, like the library's, warn of missing weights and draw them."""
    return unittest.mock.patch.object(
        BlockformerPreTrainedModel, "from_pretrained", vars(PreTrainedModel)["from_pretrained"]
    )


class CommonTests(ModelTesterMixin):
    """The common tests of models and configs for one kind of model on one side."""

    model_tester = None

    def setUp(self):
        # `generate` continues a target with holes in its mask in another way than from its beginning, of either side.
        whole_target = "generate" in self._testMethodName
        self.model_tester = Tester(self.kind, self.make_config, self.all_model_classes, whole_target)

    def test_model_rope_with_partial_rotation(self):
        """As the library has it, where positions are rotary."""
        if not getattr(self.make_config(), "rope_parameters", None):
            self.skipTest("no rotary positions")
        super().test_model_rope_with_partial_rotation()

    def test_can_init_all_missing_weights(self):
        """As the library has it; it loads a checkpoint without weights, which ours refuses."""
        with draw_missing_weights():
            super().test_can_init_all_missing_weights()

    def test_model_weights_reload_no_missing_tied_weights(self):
        """The same."""
        with draw_missing_weights():
            super().test_model_weights_reload_no_missing_tied_weights()

    def test_config(self):
        """The common tests of configs."""
        settings = {name: value for name, value in self.settings.items() if name != "head_dim"}
        ConfigTester(self, config_class=self.config_class, **settings).run_common_tests()

    def prepare_config_and_inputs_for_generate(self, batch_size=2):
        """As the library has it, with the padding of prompts on the left: ours refuse it on the right."""
        config, inputs = super().prepare_config_and_inputs_for_generate(batch_size)
        if not config.is_encoder_decoder:
            inputs["attention_mask"] = inputs["attention_mask"].sort(-1).values
        return config, inputs

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and model_class.__name__.endswith("ForPreTraining"):
            inputs["labels"] = torch.zeros(BATCH, LENGTH, dtype=torch.long)
            inputs["next_sentence_label"] = torch.zeros(BATCH, dtype=torch.long)
        return inputs


def of_ours(topology, kind):
    """Our classes of a topology, entered into the library's lists as its own are."""
    classes = []
    for task, names in TASKS.items():
        found = getattr(blockformer, f"Blockformer{topology}{task}", None)
        if found is not None:
            getattr(modeling_auto, names)[found.config_class.model_type] = found.__name__
            classes.append(found)
    return classes[:2] if kind == "bert_decoder" else classes


def make_test(kind, side, config_class, make_config, settings, classes):
    """One test class, with the generation mixin where a class generates: the suite asks for it."""
    bases = (CommonTests, unittest.TestCase)
    if any(cls.can_generate() for cls in classes):
        bases = (CommonTests, GenerationTesterMixin, unittest.TestCase)
    if kind in DECODERS:
        bases = (*bases[:-1], TrainingTesterMixin, unittest.TestCase)
    body = {
        "kind": kind, "all_model_classes": tuple(classes), "config_class": config_class, "settings": settings,
        "make_config": staticmethod(make_config), "is_encoder_decoder": kind in ("t5", "bart"),
        "additional_model_inputs": ["encoder_hidden_states"] if kind == "bert_decoder" else [],
        # The test leaves out models from before 2023, by their copyright line; ours has none.
        "test_can_init_all_missing_weights_before_2023": side == "ours",
        "__module__": __name__,
    }  # fmt: skip
    return type(f"{kind}_{side}_Test", bases, body)


for _kind, ((_preset, _our_settings, _topology), (_config, _their_settings, _names)) in KINDS.items():
    _our_classes = of_ours(_topology, _kind)
    _their_config = getattr(transformers, _config)
    for _side, *_arguments in (
        ("ours", _our_classes[0].config_class, lambda p=_preset, s=_our_settings: blockformer.preset(p, **s),
         _our_settings, _our_classes),
        ("theirs", _their_config, lambda c=_their_config, s=_their_settings: c(**s), _their_settings,
         [getattr(transformers, name) for name in _names.split()]),
    ):  # fmt: skip
        globals()[f"{_kind}_{_side}_Test"] = make_test(_kind, _side, *_arguments)


class Recorder:
    """Writes what each test said to COMMON_SUITE_REPORT; a failed subtest fails its test."""

    def __init__(self):
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report):
        name, is_subtest = report.nodeid.rpartition("::")[2], hasattr(report, "context")
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = str(crash.message if crash else report.longrepr).strip().splitlines() or [""]
            if self.outcomes.get(name, "works").startswith(("works", "skipped")):
                self.outcomes[name] = lines[0][:160]
        elif report.skipped and not is_subtest:
            self.outcomes.setdefault(name, f"skipped: {report.longrepr[2].removeprefix('Skipped: ')[:120]}")
        elif report.when == "call" and not is_subtest:
            self.outcomes.setdefault(name, "works")

    def pytest_sessionfinish(self):
        Path(os.environ["COMMON_SUITE_REPORT"]).write_text(json.dumps(self.outcomes))


if __name__ == "__main__":
    # Not with this project's settings of pytest, and without its conftest.
    own = ["-c", os.devnull, "--rootdir", os.environ["COMMON_SUITE"], "-p", "no:cacheprovider", "--noconftest"]
    sys.exit(pytest.main([*own, __file__, *sys.argv[1:]], plugins=[Recorder()]))
