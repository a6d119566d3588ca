"""Write small repos and a `Trainer` checkpoint as the installed release writes them, with what they compute.

`tests/test_museum.py` reads them with every later release. Run it before a release, and again after any change of what
the release in the making writes: `python tests/museum/make.py`. It replaces `tests/museum/<release>/`:

- `code.zip` and `manifest.json`: the code that the release writes, once, and which of its files each topology has;
- `tokenizer/`: of single characters, for all repos;
- a folder for each repo: what the release wrote except code and tokenizer; and, from outside, `expected.json` and
  `expected.safetensors`: inputs, logits, greedy text, and where they were computed;
- `trainer/`: a checkpoint after two of five steps, and `run.json`: the data, the settings and the losses of each step.

With `--checkpoint FOLDER` it writes a checkpoint only, by whichever state of the package is imported:
`PYTHONPATH=CLONE/src python tests/museum/make.py --checkpoint tests/museum/2026-11-20/trainer` wrote the one of then.
"""

import argparse
import json
import shutil
import string
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import blockformer

HERE = Path(__file__).parent
LETTERS = "abcdefghijklmnopqrstuvwxyz" + string.ascii_uppercase + " .,-'"
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
SIZES = {
    **TOKENS,
    "vocab_size": 4 + len(LETTERS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.25,
}
# A repo -> its class, the preset, and what it changes.
MIX = {
    "norm_type": "layer_norm",
    "norm_placement": "pre_output",
    "norm_bias": True,
    "num_key_value_heads": 1,
    "attention_bias": True,
    "attention_sinks": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "final_logit_softcapping": 8.0,
}
REPOS = {
    "grouped-heads": ("DecoderForCausalLM", "qwen3", {"num_key_value_heads": 1}),
    "mix": ("DecoderForCausalLM", "qwen3", MIX),
    "4-bit": ("DecoderForCausalLM", "llama", {"linear_bits": 4, "linear_group_size": 8, "initializer_range": 0.1}),
    "pooled-head": ("EncoderForSequenceClassification", "bert", {"num_labels": 3, "max_position_embeddings": 32}),
    "encoder-decoder": (
        "EncoderDecoderForConditionalGeneration",
        "t5-v1.1",
        {
            "decoder_start_token_id": 0,
            "initializer_range": None,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
        },
    ),
}
PROMPTS = ["The cat sat", "a dog"]
NEW_TOKENS = 12
TRAINED = {**SIZES, "hidden_size": 8, "intermediate_size": 16, "head_dim": 4, "num_hidden_layers": 1}
RUN = {
    "max_steps": 5,
    "save_steps": 2,
    "save_total_limit": None,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.05,
    "optim": "adamw_torch",
    "seed": 3,
}


def model_of(kind: str, preset: str, changes: dict) -> torch.nn.Module:
    """A model whose norms and biases differ from their start, so that one that is not read shows."""
    torch.manual_seed(0)
    model = getattr(blockformer, f"Blockformer{kind}")(blockformer.preset(preset, **{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from blockformer.publishing import save_tokenizer

    special = ["<pad>", "</s>", "<s>", "<unk>"]
    words = {token: number for number, token in enumerate([*special, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), special, strict=True))
    save_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names), folder)


def write_code(folder: Path) -> None:
    """The code of all topologies, and the manifest that says which files each has."""
    from blockformer.publishing.repo_code import MODEL, STAND_IN
    from blockformer.trust.manifest import installed

    manifest = installed()
    (folder / "manifest.json").write_text(manifest.text())
    with zipfile.ZipFile(folder / "code.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted({STAND_IN.name}.union(*manifest.topologies.values())):
            archive.writestr(zipfile.ZipInfo(name), (MODEL / name).read_bytes(), zipfile.ZIP_DEFLATED)


def write_repo(folder: Path, tokenizer: Path, model: torch.nn.Module) -> None:
    """A repo and what it computes."""
    from programs.museum_repo import answers, where

    from blockformer.publishing.repo_code import STAND_IN, code_files

    blockformer.export_model(model, folder, tokenizer)
    found = answers(folder, PROMPTS, NEW_TOKENS)
    shared = {path.name for path in tokenizer.iterdir()} | {path.name for path in folder.glob("*.py")}
    for name in (*shared, ".blockformer.json"):
        (folder / name).unlink()
    save_file({"logits": found["logits"]}, folder / "expected.safetensors")
    expected = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "text": found["text"], "where": where()}
    expected["left_out"] = sorted(name for name, path in code_files(model.config).items() if path == STAND_IN)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def model_of_run(run: dict) -> torch.nn.Module:
    """A fresh model for a run, or for a checkpoint of it."""
    torch.manual_seed(1)
    return blockformer.BlockformerDecoderForCausalLM(blockformer.preset("gpt2", **run["config"]))


def write_checkpoint(folder: Path) -> None:
    """A checkpoint in the middle of a run, with dropout, and the losses of the whole run."""
    from programs.museum_run import train

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    rows = torch.randint(4, TRAINED["vocab_size"], (12, 6), generator=torch.Generator().manual_seed(2)).tolist()
    run = {"config": {**TRAINED, **dropout, "max_position_embeddings": 8}, "rows": rows, "arguments": RUN}
    with tempfile.TemporaryDirectory() as scratch:
        losses = train(model_of_run(run), Path(scratch), run)
        checkpoint = shutil.copytree(Path(scratch) / "checkpoint-2", folder / "checkpoint-2")
    for path in checkpoint.iterdir():
        if path.suffix == ".py" or path.name == "training_args.bin":
            path.unlink()
    (folder / "run.json").write_text(json.dumps({**run, "losses": losses}) + "\n")


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER")
    folder = parser.parse_args().checkpoint
    torch.set_num_threads(1)
    if folder is not None:
        write_checkpoint(folder)
        return
    folder = HERE / blockformer.__version__
    shutil.rmtree(folder, ignore_errors=True)
    write_tokenizer(folder / "tokenizer")
    write_code(folder)
    for name, repo in REPOS.items():
        write_repo(folder / name, folder / "tokenizer", model_of(*repo))
    write_checkpoint(folder / "trainer")


if __name__ == "__main__":
    main()
