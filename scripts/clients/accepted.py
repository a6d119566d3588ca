"""Where our models and transformers' own differ in other people's tools, and why that is as it should be.

A run of `scripts/clients` fails where anything differs that no entry accepts, and where an entry no longer happens
(`judging.py`). The page of the results, docs/clients.md, takes its reasons from here.
"""

import math
from dataclasses import dataclass

WORKS = "works"


@dataclass(frozen=True)
class Accepted:
    """A difference that is accepted.

    Args:
        tool: a name of `CLIENTS`.
        job: what is done, as the tool's script calls it; in the common suite a test of transformers.
        models: the models with which it differs; in the common suite kinds of models.
        reason: whose fault it is and what it is, as the page says it.
        bound: where both sides work, the largest difference, as a share of the largest number of a result.
        ours: how what our side says begins, where it fails. `theirs` likewise.

    Raises:
        ValueError: no reason or models; a bound that is no number, with a failing side, or missing where both work.
    """

    tool: str
    job: str
    models: tuple[str, ...]
    reason: str
    bound: float | None = None
    ours: str = WORKS
    theirs: str = WORKS

    def __post_init__(self):
        name = f"{self.tool}, {self.job}"
        if not self.reason or not self.models or isinstance(self.models, str):
            raise ValueError(f"{name}: an entry has a reason and a tuple of models")
        both_work = self.ours == self.theirs == WORKS
        if both_work != (self.bound is not None) or (both_work and not (self.bound and math.isfinite(self.bound))):
            raise ValueError(f"{name}: an entry has either a bound, a number, or what a side that fails says")


MISCOUNTED = (
    "transformers: GPT-2's class name does not tell Trainer that its loss shifts the labels, so it counts the first "
    "token of each text too, which nothing predicts, and the losses come out too small"
)
ACCUMULATED = (
    "transformers: these heads say that they divide by the items of a step and do not, so losses and gradients are "
    "as many times too large as there are batches in a step"
)
WRAPPED_HEAD = (
    "PEFT: its merge leaves the head wrapped (`score.modules_to_save`), so the saved model has no head; transformers "
    "draws one at random with a warning, Blockformer refuses to"
)
TYPES_BY_NAME = "PEFT: it only knows the attention of Llama, Mistral and GPT-2, by their model types"
LONGER_LOGITS = "PEFT: prompts lengthen the logits, but not the labels"
OTHER_HEADS = "PEFT: it assumes that a head has hidden_size / heads channels, which need not be so in T5"
FORMER_NAME = (
    "PEFT: 0.21 looks for an argument `past_key_values`, which the classes of transformers 5.24 call `cache`; ours "
    "take both names"
)
FUSED = "transformers: its GPT-2 has queries, keys and values in one tensor, and this method is not linear"
WRONG_BATCH = "ValueError: Expected input batch_size (56) to match target batch_size (40)."
WRONG_LABELS = "ValueError: pass 56 int64 labels, one per prediction, not 40 of torch.int64."
HEADS = ("llama-classifier", "bert", "bert-classifier", "bert-tokens", "t5", "bart")

TOOLS = (
    Accepted("trainer", "Trainer, whole batches", ("gpt2",), MISCOUNTED, bound=0.08),
    Accepted("trainer", "Trainer, gradient checkpointing", ("gpt2",), MISCOUNTED, bound=0.08),
    Accepted("trainer", "Trainer, accumulated batches", ("gpt2",), MISCOUNTED, bound=0.08),
    Accepted("trainer", "Trainer, accumulated batches", HEADS, ACCUMULATED, bound=0.76),
    Accepted(
        "peft", "adaption prompt", ("llama", "gpt2"), TYPES_BY_NAME,
        ours="ValueError: Unsupported model type for adaption prompt: 'blockformer_decoder'.",
    ),
    Accepted(
        "peft", "LN tuning", ("llama-classifier", "gpt2-classifier", "bert-classifier", "bert-tokens"), WRAPPED_HEAD,
        ours="WeightsError: weights of ", theirs="AssertionError: Tensor-likes are not close!",
    ),
    Accepted("peft", "prompt tuning", ("bert-tokens",), LONGER_LOGITS, ours=WRONG_LABELS, theirs=WRONG_BATCH),
    Accepted("peft", "p-tuning", ("bert-tokens",), LONGER_LOGITS, ours=WRONG_LABELS, theirs=WRONG_BATCH),
    Accepted(
        "peft", "prefix tuning", ("llama-classifier", "gpt2-classifier", "bert-classifier", "bert-tokens"), FORMER_NAME,
        theirs="ValueError: Model does not support past key values which are required for prefix tuning.",
    ),
    Accepted(
        "peft", "prefix tuning", ("t5",), OTHER_HEADS,
        theirs="RuntimeError: Sizes of tensors must match except in dimension 2. Expected size 16 but got size 64",
    ),
    Accepted("mergekit", "slerp", ("gpt2",), FUSED, bound=0.03),
    Accepted("mergekit", "ties", ("gpt2",), FUSED, bound=0.25),
)  # fmt: skip
ONE_CLASS = "ours: one class has layers with and without experts, and these tests assume that it has them"
TURNED = "ours: rotary tables are laid out to save a negation in each layer"
ONE_FIELD = "ours: a model without a window has `sliding_window=None`, and no second field says so"
NO_INPUTS_EMBEDS = "transformers: the official classifiers of T5 and BART refuse inputs_embeds"
PARTS_BESIDE = "transformers: the official T5 keeps its parts next to the head"
NAMED_TWICE = "transformers: its config has `num_experts` under a second name, by which it is saved"

NOT_ANNOTATED = "ours: `**kwargs` of `forward` have no annotation, by which this test knows what a model records"
NO_CROSS_CACHE = "transformers: `generate` makes a cache for its BERT decoder that has no place for an encoder's states"
DENSE = ("gpt2", "qwen3", "bert_decoder")

SUITE = (
    *(
        Accepted(
            "common-suite", f"test_eager_matches_batched_and_grouped_inference_{number}", DENSE, ONE_CLASS,
            ours="AssertionError: Expected 'mock' to have been called.", theirs="skipped: ",
        )
        for number in ("0_fp16", "1_fp32", "2_bf16")
    ),
    Accepted(
        "common-suite", "test_output_router_logits_from_config", DENSE, ONE_CLASS,
        ours="AttributeError: 'CausalLMOutputWithCrossAttentions' object has no attribute 'router_logits'",
        theirs="skipped: ",
    ),
    Accepted(
        "common-suite", "test_model_rope_scaling_frequencies", ("qwen3", "qwen3_moe"), TURNED,
        ours="AssertionError: The values for attribute 'shape' do not match: torch.Size([1, 1, 10, 8])",
    ),
    Accepted(
        "common-suite", "test_sliding_window_mask", ("qwen3", "qwen3_moe"), ONE_FIELD,
        ours="skipped: Model does not support sliding window mask",
    ),
    Accepted(
        "common-suite", "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions",
        ("bert", "t5", "bart", "bert_decoder"), NOT_ANNOTATED, ours="skipped: Model does not support output_attentions",
    ),
    *(
        Accepted(
            "common-suite", f"test_{test}", ("bert_decoder",), NO_CROSS_CACHE,
            theirs="AttributeError: 'DynamicCache' object has no attribute 'is_updated'",
        )
        for test in (
            "assisted_decoding_matches_greedy_search_0_random", "assisted_decoding_matches_greedy_search_1_same",
            "assisted_decoding_sample", "beam_sample_generate", "beam_search_generate",
            "beam_search_generate_dict_outputs_use_cache", "generate_continue_from_past_key_values",
            "generate_from_inputs_embeds_0_greedy", "generate_from_inputs_embeds_1_beam_search",
            "generate_methods_with_logits_to_keep", "generate_with_and_without_position_ids", "greedy_generate",
            "greedy_generate_dict_outputs_use_cache", "sample_generate",
        )
    ),
    Accepted("common-suite", "test_config", ("qwen3_moe",), NAMED_TWICE, theirs="KeyError: 'num_experts'"),
    Accepted("common-suite", "test_inputs_embeds", ("t5", "bart"), NO_INPUTS_EMBEDS, theirs="NotImplementedError: "),
    Accepted("common-suite", "test_model_base_model_prefix", ("t5",), PARTS_BESIDE, theirs="AssertionError: "),
)  # fmt: skip

ACCEPTED = (*TOOLS, *SUITE)
