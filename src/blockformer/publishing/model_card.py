"""The model card of a repo, its `README.md`."""

import json
import re
from collections.abc import Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any

import torch
from huggingface_hub import ModelCardData
from transformers import PretrainedConfig

from ..declared_fields import axes_of, is_idle
from ..files.sizes import format_size
from ..files.tokenizers import has_tokenizer
from ..model.axes import BLOCKS
from ..model.release import VERSION
from .repo_code import ABOUT_THE_FILE, MODEL, code_files, full_auto_map

# What a model class is for: the ending of its name -> the Hub's pipeline tag.
TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForMultipleChoice": "multiple-choice",
    "ForConditionalGeneration": "text2text-generation",
    "Model": "feature-extraction",
}

STATE_DTYPES = {"float32": 4, "bfloat16": 2}
WITHOUT = "import torch\nfrom transformers import "


def write_card(
    folder: str | PathLike[str],
    config: PretrainedConfig,
    *,
    origin: str = "",
    base_model: str | None = None,
    parity: str = "",
    parameters: int | None = None,
    front: Mapping[str, str | list[str]] | None = None,
    left_out: Mapping[str, list[str]] | None = None,
) -> Path:
    """Write a repo's model card, `README.md`, from the template in `model_cards/`.

    Args:
        folder: the repo, whose generation settings and tokenizer the card speaks of.
        config: the model's config, with `architectures` set.
        origin: a sentence on where the weights come from.
        base_model: the Hub id of the checkpoint they come from.
        parity: what a comparison with the official implementation measured.
        parameters: their number.
        front: entries for the Hub that the source's card has: license, languages, data.
        left_out: reason -> names of files of the source that the repo does not have.
    """
    architecture = (config.architectures or ["BlockformerDecoderForCausalLM"])[0]
    entries: dict[str, Any] = {**(front or {}), **({"base_model": base_model} if base_model else {})}
    serving = [auto for auto, code in full_auto_map(config).items() if code.endswith(f".{architecture}")]
    usual = [auto for auto in serving if auto != "AutoModelForPreTraining"]  # which loads what others load, too
    auto_class = next(iter(usual + serving), "AutoModel")
    task = next((tag for ending, tag in TASKS.items() if architecture.endswith(ending)), "feature-extraction")
    reads = has_tokenizer(Path(folder))
    generation = _generation(Path(folder))
    text = resources.files("blockformer.model_cards").joinpath("template.md").read_text(encoding="utf-8")
    card = Template(text).substitute(
        front=ModelCardData(library_name="transformers", pipeline_tag=task, tags=["blockformer"], **entries).to_yaml(),
        architecture=architecture,
        auto_class=auto_class,
        imports=f"from transformers import {auto_class}, AutoTokenizer" if reads else f"{WITHOUT}{auto_class}",
        use=_usage("AutoModel" if getattr(config, "bidirectional", False) else auto_class, reads),
        origin=(origin or "The model was made with Blockformer, not converted.") + _left_out(left_out or {}),
        parity=parity or "Not compared with another implementation.",
        parameters=(f"{parameters:,}" if parameters else "see the weights") + _state_of(config),
        settings=_table(_settings(config)),
        generation=_table(generation) if generation else "The library's defaults.",
        code=_code_of(config),
    )
    path = Path(folder) / "README.md"
    path.write_text(card, encoding="utf-8")
    return path


def with_code_of(card: str, config: PretrainedConfig) -> str:
    """A Blockformer card with this release's section on the code; a card without such a section is unchanged."""
    return re.sub(r"(?<=^## Code\n\n).*?(?=\n*(^#|\Z))", lambda _: _code_of(config), card, count=1, flags=re.M | re.S)


def _state_of(config: PretrainedConfig) -> str:
    """What the layers with a state say of its size, after the number of parameters; empty without such layers."""
    kinds = BLOCKS["layer_types"]
    with torch.device("meta"):
        layers = [
            kinds[kind].cls(config, number, True)
            for number, kind in enumerate(getattr(config, "layer_types", None) or ())
            if kind in kinds
        ]
    parts = [part for layer in layers for part in layer.modules() if hasattr(part, "state_bytes")]
    sizes = {dtype: sum(part.state_bytes(size) for part in parts) for dtype, size in STATE_DTYPES.items()}
    said = " or ".join(f"{format_size(size)} in {dtype}" for dtype, size in sizes.items())
    return f". Layers with a state keep {said} of a text, however long it is" if parts else ""


def _code_of(config: PretrainedConfig) -> str:
    files = ", ".join(f"`{name}`" for name in code_files(config))
    own = "".join(
        f"\n\n**`{name}` is its author's, not Blockformer's**: read it before you load the repo. SHA-256 `{digest}`."
        for name, digest in (getattr(config, "blocks", None) or {}).items()
        if not (MODEL / name).exists()
    )
    return (
        own.lstrip()
        + "\n\n" * bool(own)
        + (
            f"Blockformer {VERSION}: {files}. `blockformer verify <this repo>` says whether they are the files of that "
            "release, unmodified, and whether anything else in the repo could run."
        )
    )


def _left_out(reasons: Mapping[str, list[str]]) -> str:
    """A paragraph that names the files of the source which are not here."""
    if not reasons:
        return ""
    lines = [f"- {reason}: {', '.join(map(_code, names[:20]))}{_more(names)}" for reason, names in reasons.items()]
    return "\n".join(["", "", "These files of the source are not here:", "", *lines])


def _more(names: list[str]) -> str:
    return f" and {len(names) - 20} more (all in `conversion.json`)" if len(names) > 20 else ""


def _code(name: str) -> str:
    return "`" + "".join(letter if letter.isprintable() and letter != "`" else "?" for letter in name[:200]) + "`"


def _usage(auto_class: str, has_tokenizer: bool) -> str:
    if not has_tokenizer:
        writes = auto_class in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
        call = "print(model.generate(input_ids, max_new_tokens=40))" if writes else "outputs = model(input_ids)"
        return f"input_ids = torch.tensor([[5, 6, 7, 8]])  # this repo has no tokenizer\n{call}"
    return f"tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)\n{_with_tokenizer(auto_class)}"


def _with_tokenizer(auto_class: str) -> str:
    if auto_class == "AutoModelForCausalLM":
        return (
            'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"
        )
    if auto_class == "AutoModelForSeq2SeqLM":
        return (
            'inputs = tokenizer(["three hundred and five"], padding=True, return_tensors="pt")\n'
            "print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=40), skip_special_tokens=True))"
        )
    return 'outputs = model(**tokenizer("Once upon a time", return_tensors="pt"))'


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a config that say what the model is, by their groups, long lists cut short.

    Those that have no effect next to the others are left out, and so are the library's own that are as usual.
    """
    fields, usual = config.to_dict(), PretrainedConfig().to_dict()
    hidden = {*ABOUT_THE_FILE, "id2label", "label2id", "is_decoder", "is_encoder_decoder"}
    ours = axes_of(config)
    others = [name for name in sorted(fields) if name not in ours and fields[name] != usual.get(name)]
    shown = [name for name in (*(name for name in ours if not is_idle(name, fields)), *others) if name not in hidden]
    kept = {name: fields[name] for name in shown if fields.get(name) is not None}
    kinds = kept.get("layer_types")
    if kinds:
        kept["layer_types"] = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return kept


def _generation(folder: Path) -> dict[str, Any]:
    """The generation settings of a repo that differ from the library's defaults."""
    path = folder / "generation_config.json"
    settings = json.loads(path.read_bytes()) if path.exists() else {}
    hidden = ("transformers_version", "_from_model_config")
    return {name: value for name, value in settings.items() if name not in hidden}


def _table(entries: Mapping[str, Any]) -> str:
    rows = [f"| `{name}` | {_cell(value)} |" for name, value in entries.items()]
    return "\n".join(["| field | value |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")[:200]
