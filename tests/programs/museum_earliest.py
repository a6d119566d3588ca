"""What the museum's earliest repos compute, before and after they are saved again, natively or by their own code.

Arguments: "native" or "own code", a file for logits and greedy ids, the folder of the inputs, and the repos' folders.
"""

import json
import sys
from pathlib import Path

import torch
from museum_repo import load, where
from safetensors.torch import load_file, save_file


@torch.no_grad()
def answers(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The logits, and the greedy ids where the model writes, with and without a cache."""
    found = {"logits": model(**inputs).logits}
    if model.can_generate():
        ids = inputs["input_ids"]
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        found |= {"ids": model.generate(ids, **how), "uncached ids": model.generate(ids, **how, use_cache=False)}
    return found


def main(way: str, file: str, museum: str, *folders: str) -> None:
    if way == "native":
        import blockformer  # noqa: F401 # which the Auto classes know from here on
    torch.set_num_threads(1)
    results = {}
    for folder in map(Path, folders):
        inputs = load_file(Path(museum, folder.name, "expected.safetensors"))
        del inputs["logits"]
        again = folder.with_name(f"{folder.name}-again")
        for place in (folder, again):
            model = load(place, trust=way == "own code")
            origin = type(model).__module__.partition(".")[0]
            assert origin == ("blockformer" if way == "native" else "transformers_modules"), origin
            results |= {f"{place.name} {what}": each for what, each in answers(model, inputs).items()}
            if place is folder:
                model.save_pretrained(again)
    assert ("blockformer" in sys.modules) == (way == "native")
    save_file(results, file)
    print(json.dumps(where()))


if __name__ == "__main__":
    main(*sys.argv[1:])
