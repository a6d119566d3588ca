"""What repos of the museum compute, before and after they are saved again, natively or by their own code.

Arguments: "native" or "own code", a file for the logits, and the repos' folders.
"""

import json
import platform
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoTokenizer


def where() -> list[str]:
    """What the last bit of a result depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cpu = [platform.machine(), name, torch.backends.cpu.get_cpu_capability()]
    return [*cpu, torch.__version__, transformers.__version__]


def load(folder: Path, trust: bool) -> torch.nn.Module:
    """The model of the class that a repo names."""
    config = json.loads((folder / "config.json").read_text())
    auto = next(auto for auto, code in config["auto_map"].items() if code.endswith("." + config["architectures"][0]))
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=trust).eval()


@torch.no_grad()
def answers(folder: Path, prompts: list[str], new_tokens: int, trust: bool = False) -> dict:
    """The logits of a padded batch, without those of padding, and the greedy text where the model writes."""
    model, tokenizer = load(folder, trust), AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    tokenizer.padding_side = "left" if model.can_generate() else "right"  # a pooled head reads the first token
    batch = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    text = None
    if model.can_generate():
        ids = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
        text = tokenizer.batch_decode(ids, skip_special_tokens=True)
    sides = {"decoder_input_ids": batch["input_ids"]} if model.config.is_encoder_decoder else {}
    logits = model(**batch, **sides).logits
    if logits.dim() == 3:
        logits = logits[batch["attention_mask"].bool()]
    return {"model": model, "tokenizer": tokenizer, "logits": logits.contiguous(), "text": text}


def main(way: str, file: str, *folders: str) -> None:
    if way == "native":
        import blockformer  # noqa: F401 # which the Auto classes know from here on
    torch.set_num_threads(1)
    trust, logits, texts = way == "own code", {}, {}
    for folder in map(Path, folders):
        expected = json.loads((folder / "expected.json").read_text())
        again = folder.with_name(f"{folder.name}-again-{way.replace(' ', '-')}")
        key = f"{folder.parent.name}/{folder.name}"
        for name, place in ((key, folder), (f"{key} again", again)):
            found = answers(place, expected["prompts"], expected["new_tokens"], trust)
            logits[name], texts[name] = found["logits"], found["text"]
            origin = type(found["model"]).__module__.partition(".")[0]
            assert origin == ("blockformer" if way == "native" else "transformers_modules"), origin
            if place is folder:
                found["model"].save_pretrained(again)
                found["tokenizer"].save_pretrained(again)
    assert ("blockformer" in sys.modules) == (way == "native")
    save_file(logits, file)
    print(json.dumps({"text": texts, "where": where()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
