"""Train a small encoder-decoder to translate English number and date phrases to Chinese.

    python examples/train_translation.py --output translator
    python examples/train_translation.py --output translator --preset t5
    python examples/train_translation.py --output mix --set qk_norm=true position_type=rotary num_key_value_heads=2

"three hundred and five" becomes 三百零五, "March 5th, 2021" becomes 2021年3月5日. The phrases are made by rule
(`blockformer.demo.phrases`), a tenth of all answers is held out, and an answer counts only if every character is right.
The saved repo is then loaded in a fresh process without this package and translates in a batch.

The default is the original Transformer (Vaswani et al., 2017), small; any other encoder-decoder preset will do, and
`--set` changes any field of its config: the last command makes a mix that no family has. With matplotlib installed,
`cross-attention.svg` in the repo shows which characters look at which words (`attention_picture.py`).
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

import blockformer
from blockformer.demo.cross_attention import draw_or_say_why_not
from blockformer.demo.elsewhere import run_elsewhere
from blockformer.demo.phrases import pairs
from blockformer.files.atomic import mark
from blockformer.presets import PRESETS

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
BY_HAND = (
    "three hundred and five",
    "March 5th, 2021",
    "one million and ten",
    "31 December 1999",
    "ninety-nine thousand",
)
PICTURED = ("March 5th, 2021", "three hundred and six thousand and fifty")
PAD, END = "<pad>", "</s>"
BATCH = 96
ENCODER_DECODERS = tuple(
    name for name, (config_class, _) in PRESETS.items() if config_class is blockformer.BlockformerEncoderDecoderConfig
)


def make_tokenizer(texts) -> PreTrainedTokenizerFast:
    """Words, single digits and single Chinese characters as tokens; ends every text with `</s>`."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"[a-z]+|\d|[^a-z\d]"), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=[PAD, END, "<unk>"]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token="<unk>")


class Rows(torch.utils.data.Dataset):
    """Tokenized pairs; rows of a batch are padded together later."""

    def __init__(self, entries, tokenizer):
        sources, targets = zip(*entries, strict=True)
        self.inputs = tokenizer(list(sources))["input_ids"]
        self.labels = tokenizer(list(targets))["input_ids"]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.inputs[index], "labels": self.labels[index]}


@torch.inference_mode()
def translate(model, tokenizer, texts, num_beams: int = 1, batch: int = 128) -> list[str]:
    """Translate texts of any length together."""
    answers = []
    starts = range(0, len(texts), batch)
    for start in tqdm(starts, "translating", unit="batch", disable=len(starts) < 2):
        inputs = tokenizer(list(texts[start : start + batch]), padding=True, return_tensors="pt").to(model.device)
        written = model.generate(**inputs, max_new_tokens=40, do_sample=False, num_beams=num_beams)
        answers += tokenizer.batch_decode(written, skip_special_tokens=True)
    return answers


def exact_match(model, tokenizer, entries) -> tuple[float, list[tuple[str, str, str]]]:
    """Share of answers with every character right, and the wrong ones: (source, wanted, written)."""
    written = translate(model, tokenizer, [source for source, _ in entries])
    wrong = [(source, wanted, got) for (source, wanted), got in zip(entries, written, strict=True) if wanted != got]
    return 1 - len(wrong) / len(entries), wrong


RELOAD = """
import json, sys, torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
folder, texts = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(texts, padding=True, return_tensors="pt")
written = model.generate(**inputs, max_new_tokens=40, do_sample=False)
print(json.dumps(tokenizer.batch_decode(written, skip_special_tokens=True)))
"""


def translate_elsewhere(repo: Path, texts) -> list[str]:
    """Translate with the saved repo in a fresh process that cannot import this package."""
    return run_elsewhere(RELOAD, repo, json.dumps(list(texts)))


def field_and_value(text: str) -> tuple[str, object]:
    """`FIELD=VALUE` of the command line; the value is JSON, or else a plain string."""
    field, equals, value = text.partition("=")
    if not (field and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    try:
        return field, json.loads(value)
    except json.JSONDecodeError:
        return field, value


def make_config(preset: str, tokenizer, **overrides) -> blockformer.BlockformerEncoderDecoderConfig:
    """A preset with small sizes and the special tokens of this tokenizer.

    The decoder starts with whatever it starts with in the preset, padding (T5, Marian) or the end token (BART); with
    mBART, whose last label says the language, that last label is the end token here.

    Raises:
        ValueError: a field that the config refuses.
    """
    theirs = blockformer.preset(preset)
    starts_with_end = theirs.decoder_starts_with_last_label or theirs.decoder_start_token_id == theirs.eos_token_id
    settings = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id if starts_with_end else tokenizer.pad_token_id,
    }
    return blockformer.preset(preset, **{**settings, **overrides})


def train(config, tokenizer, rows: Rows, folder: Path, arguments):
    """A trained model in evaluation mode.

    Raises:
        FloatingPointError: a loss that is not finite, with its step.
    """
    model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(config)
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=BATCH,
            learning_rate=arguments.learning_rate,
            adam_beta2=0.98,
            lr_scheduler_type="cosine",
            warmup_steps=min(arguments.warm_up, arguments.steps // 4),
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=arguments.seed,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        callbacks=[blockformer.StopOnNonFiniteLoss()],
    )
    trainer.train()
    return model.eval()


def main(command_line=None) -> None:
    """Train, judge, save, reload elsewhere, show, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the repo to make")
    parser.add_argument("--preset", default="transformer-base", choices=ENCODER_DECODERS, help="preset to train")
    parser.add_argument(
        "--set",
        type=field_and_value,
        action="extend",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of the config to change; a value is JSON or a plain word",
    )
    parser.add_argument("--steps", type=int, default=2000, help=f"optimizer steps of {BATCH} pairs (default: 2000)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak (default: 0.002)")
    parser.add_argument("--warm-up", type=int, default=200, help="warm-up steps (default: 200)")
    parser.add_argument("--pairs", type=int, default=100_000, help="training pairs (default: 100000)")
    parser.add_argument("--held-out", type=int, default=1000, help="held-out pairs (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order (default: 0)")
    parser.add_argument("--force", action="store_true", help="replace the folder")
    arguments = parser.parse_args(command_line)

    console = Console()
    set_seed(arguments.seed)
    entries, held_out = pairs(arguments.pairs), pairs(arguments.held_out, seed=1, held_out=True)
    assert not {target for _, target in entries} & {target for _, target in held_out}
    tokenizer = make_tokenizer(text for pair in entries for text in pair)
    try:
        config = make_config(arguments.preset, tokenizer, **dict(arguments.set))
    except ValueError as error:
        parser.error(str(error))
    start, busy = time.perf_counter(), time.process_time()
    model = train(config, tokenizer, Rows(entries, tokenizer), arguments.output.parent, arguments)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    score, wrong = exact_match(model, tokenizer, held_out)
    blockformer.export_model(model, arguments.output, tokenizer=tokenizer, force=arguments.force)

    console.print(
        f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, trained in {seconds:.0f} s "
        f"({busy:.0f} s of CPU): [bold]{score:.1%}[/] of {len(held_out):,} held-out phrases translated exactly"
    )
    for source, wanted, got in wrong[:5]:
        console.print(f"  wrong: {source}: wanted {wanted}, written {got}")
    here, elsewhere = translate(model, tokenizer, BY_HAND), translate_elsewhere(arguments.output, BY_HAND)
    table = Table("English", "Chinese", "beam 4", "reloaded in a fresh process")
    for row in zip(BY_HAND, here, translate(model, tokenizer, BY_HAND, num_beams=4), elsewhere, strict=True):
        table.add_row(*row)
    console.print(table)
    console.print(draw_or_say_why_not(model, tokenizer, PICTURED, arguments.output / "cross-attention.svg"))
    mark(arguments.output)  # the picture is ours, too: --force may replace it
    if here != elsewhere:
        sys.exit("the reloaded model does not write what the trained one wrote")


if __name__ == "__main__":
    main()
