"""The small models that the clients load: each as a repo of ours and as a checkpoint of transformers' own class.

Usage: python models.py FOLDER [NAME ...]

For each NAME there are then FOLDER/NAME, a repo with its code, and FOLDER/NAME-official, with the same weights and a
tokenizer of the standard library's words.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

import blockformer
from blockformer.conversion import convert

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
DECODER = {"bos_token_id": 0}
PAIR = {"decoder_start_token_id": 1, "bos_token_id": 0}
MODELS = {
    "qwen3": ("qwen3", "DecoderForCausalLM", {"num_key_value_heads": 2, "head_dim": 16, **DECODER}),
    "llama": ("llama", "DecoderForCausalLM", {"num_key_value_heads": 2, **DECODER}),
    "llama-classifier": ("llama", "DecoderForSequenceClassification", {"num_key_value_heads": 2, **DECODER}),
    "llama-reward": ("llama", "DecoderForSequenceClassification", {"num_labels": 1, **DECODER}),
    "gpt2": ("gpt2", "DecoderForCausalLM", DECODER),
    "gpt2-classifier": ("gpt2", "DecoderForSequenceClassification", DECODER),
    "bert": ("bert", "EncoderForMaskedLM", {}),
    "bert-encoder": ("bert", "EncoderModel", {}),
    "bert-classifier": ("bert", "EncoderForSequenceClassification", {}),
    "bert-score": ("bert", "EncoderForSequenceClassification", {"num_labels": 1}),
    "bert-tokens": ("bert", "EncoderForTokenClassification", {}),
    "t5": ("t5", "EncoderDecoderForConditionalGeneration", PAIR),
    "t5-v1.1": ("t5-v1.1", "EncoderDecoderForConditionalGeneration", PAIR),
    "bart": ("bart", "EncoderDecoderForConditionalGeneration", {**PAIR, "max_position_embeddings": 128}),
}
MERGED = ("qwen3", "gpt2", "bert-classifier", "t5-v1.1")
"""The models that have a second one, NAME-2, with other weights."""


def tokenizer(ends: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens over files of the standard library; `ends`: texts end with `</s>`."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("bisect.py", "heapq.py", "textwrap.py")]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<mask>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if ends:
        bpe.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 2)]
        )
    named = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, **named, sep_token="</s>", cls_token="<s>", model_max_length=128,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def make(folder: Path, name: str) -> None:
    """Both folders of a model, if they are not there yet."""
    second = name.endswith("-2")
    preset, class_name, settings = MODELS[name.removesuffix("-2")]
    if (folder / f"{name}-official").exists():
        return
    torch.manual_seed(2 if second else 1)
    # T5 does not scale its scores: with larger weights each step of training multiplies rounding some hundred times.
    spread = 0.05 if preset.startswith("t5") else 0.2
    dropout = {} if preset in ("qwen3", "llama") else NO_DROPOUT
    config = blockformer.preset(preset, **{**SIZES, **dropout, **settings})
    model = getattr(blockformer, f"Blockformer{class_name}")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=spread)
    text = tokenizer(ends=not class_name.startswith("DecoderFor"))
    blockformer.export_model(model, folder / name, tokenizer=text, force=True)
    convert(
        folder / name, folder / f"{name}-official", to_official=True, family=preset.partition("-v")[0], verify=False
    )


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names or [*MODELS, *(f"{name}-2" for name in MERGED)]:
        make(folder, name)


if __name__ == "__main__":
    main()
