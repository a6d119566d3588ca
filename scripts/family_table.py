"""Write the tables of docs/supported.md and its Chinese twin, each preset as its fields that differ from the defaults
and published sizes; and the number of families in the READMEs.

Usage: python scripts/family_table.py
"""

import math
import re
from pathlib import Path

import blockformer
from blockformer.conversion.families import index
from blockformer.model.axes import axes

DOCS = Path(__file__).resolve().parent.parent / "docs"
GROUPS = ("norm", "positions", "attention", "feed-forward", "embeddings", "head")
"""The groups of fields that say what a model computes; sizes, tokens and training are left out."""
SIZES = frozenset("num_attention_heads num_key_value_heads head_dim max_position_embeddings".split())
IDLE = ({"full_attention"}, {"sparse"}, {"dense"})
"""Lists that say what is so anyway."""
TOPOLOGIES = ("decoder", "encoder", "encoder_decoder")
COLUMNS = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size "
    "max_position_embeddings"
).split()
"""What the table of published sizes shows."""
AMONG = "Llama, Qwen3, Gemma 3, Mistral, DeepSeek-V3, gpt-oss, Phi-3, GPT-2, BERT, ModernBERT, T5, BART"
READMES = {
    "README.md": f"{{}} families, among them {AMONG} and Marian ([every name](docs/supported.md)).",
    "README.zh-CN.md": f"{{}} 个家族\uff0c其中有 {AMONG.replace(', ', '、')} 和 Marian"
    "\uff08[全部名字](docs/zh/supported.md)\uff09。",
}
"""README -> its sentence with the number of the families, between two comments."""
MARKED = re.compile(r"(<!-- families -->\n).*?(<!-- end of families -->)", re.S)
PAGES = ("supported.md", "zh/supported.md")
SETTINGS = re.compile(r"(?<=<!-- settings -->\n).*(?=<!-- end of settings -->)", re.S)
"""The part of a page that holds the tables of presets."""
TABLE = re.compile(r"(^\|.*\n)(?:^\|.*\n)+", re.M)
"""A table, and its header by itself."""


def shown(config, name: str, value) -> str:
    """A value as a reader has it: factors of the width as such, one item of each kind of a list."""
    if isinstance(value, float) and not value.is_integer():
        for factor, text in ((config.hidden_size**0.5, "√C"), (config.hidden_size**-0.5, "1/√C")):
            if math.isclose(value, factor):
                return text
    if name == "rope_parameters":
        ropes = value.values() if "rope_type" not in value else [value]
        parts = [f"{rope['rope_theta']:,.0f}" for rope in ropes]
        part = next((rope["partial_rotary_factor"] for rope in ropes if "partial_rotary_factor" in rope), 1)
        return f"θ {' / '.join(dict.fromkeys(parts))}" + (f", part {part:g}" if part < 1 else "")
    if isinstance(value, list):
        kinds = [str(each).removesuffix("_attention").lower() for each in value]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def rows(topology: str) -> list[list[str]]:
    """A row for each preset of a topology: its name, and a cell for each group."""
    made = []
    for name, (config_class, _) in blockformer.PRESETS.items():
        if config_class.model_type != f"blockformer_{topology}":
            continue
        config, declared = blockformer.preset(name), axes(config_class)
        usual = config_class()
        cells = {group: [] for group in GROUPS}
        for field, axis in declared.items():
            value = getattr(config, field)
            follows = field == "norm_bias" and value is (config.norm_type == "layer_norm")
            follows = follows or (isinstance(value, list) and set(value) in IDLE)
            if axis.group not in cells or field in SIZES or value is None or follows:
                continue
            if value != getattr(usual, field):
                cells[axis.group].append(f"`{field}` {shown(config, field, value)}")
        made.append([f"`{name}`", *(", ".join(cells[group]) for group in GROUPS)])
    return made


def published() -> list[list[str]]:
    """A row for each published size."""
    made = []
    for name in blockformer.presets.SIZES:
        config = blockformer.preset(name)
        made.append([f"`{name}`", *(f"{getattr(config, field):,}" for field in COLUMNS)])
    return made


def written(text: str) -> str:
    """A page with its settings as the code has them, three tables of families and one of sizes; their headers stay."""
    tables = []
    for cells in (*map(rows, TOPOLOGIES), published()):
        lines = [["---"] * len(cells[0]), *cells]
        tables.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    return SETTINGS.sub(lambda part: TABLE.sub(lambda found: found[1] + tables.pop(0), part[0]), text)


def with_sentence(text: str, sentence: str) -> str:
    """A README with its sentence of the families."""
    count = sum(not name.endswith("-decoder") for name in index.NAMES)
    filled = sentence.format(count)
    return MARKED.sub(lambda found: f"{found[1]}{filled}\n{found[2]}", text)


def main() -> None:
    for name, sentence in READMES.items():
        path = DOCS.parent / name
        path.write_text(with_sentence(path.read_text(encoding="utf-8"), sentence), encoding="utf-8")
    for name in PAGES:
        path = DOCS / name
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
