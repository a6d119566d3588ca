"""A small tokenizer as a repo's files, and the text that it is trained on."""

import functools
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = "argparse textwrap string shutil pathlib logging/__init__ statistics random collections/__init__".split()
SENTENCES = (
    "A small boat sails along the quiet river, and the children wave from the bridge.",
    "Ein kleines Boot fährt über den Fluss; die Kinder grüßen von der Brücke.",
    "Une élève naïve boit un café près de la forêt, où le garçon l'attend déjà.",
    "El niño soñó que mañana llovería en la montaña. ¿Verdad?",
    "小船在河上慢慢地走。孩子们在桥上看。",
    "小さな船が川を下る。子どもたちは橋から手を振る。",
    "Маленькая лодка плывёт по тихой реке, дети машут с моста.",  # noqa: RUF001
    "The answer is 42, the ratio 3.14159, and the year 2026.",
)


@dataclass(frozen=True)
class Words:
    """A tokenizer.

    Attributes:
        files: file name -> content; bytes and text are written as they are, anything else as JSON.
        ids: the id of each token.
    """

    files: Mapping[str, Any]
    ids: Mapping[str, int]

    @property
    def size(self) -> int:
        return max(self.ids.values()) + 1


@functools.cache
def lines() -> tuple[str, ...]:
    """Lines of the standard library's sources, with sentences of several languages among them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    code = [line for name in MODULES for line in (folder / f"{name}.py").read_text(encoding="utf-8").splitlines()]
    return (*(line[:300] for line in code[:5000] if line.strip()), *SENTENCES * 30)


def special(content: str, **more: Any) -> dict[str, Any]:
    """A special token as JSON files spell it."""
    off = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, **off, **more}


def added_tokens_decoder(ids: Mapping[str, int], plain: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entry of newer `tokenizer_config.json` files; those in `plain` are not special."""
    ordered = sorted(ids.items(), key=lambda each: each[1])
    return {str(index): {**special(token), "special": token not in plain} for token, index in ordered}
