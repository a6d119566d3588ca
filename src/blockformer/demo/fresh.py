"""Load a published repo where `blockformer` cannot be imported, check it, and stream text from it.

Run by its path in its own process: `python fresh.py REPO EXPECTED PROMPT MAX_NEW_TOKENS`. EXPECTED is a
`torch.save` of `input_ids` [B, T], `logits` [B, T, V] and `generated` [B, T + N], as the model gave them before it was
published.
Exits non-zero when anything differs; standard output only holds the streamed text.
"""

from __future__ import annotations

import sys
from pathlib import Path


class Refuse:
    """An import finder that refuses one package, installed or not."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"{name} is out of reach in this process, on purpose", name=name)


def main(repo: str, expected_file: str, prompt: str, max_new_tokens: str) -> None:
    """Load, compare, stream; the arguments are the command's."""
    sys.meta_path.insert(0, Refuse("blockformer"))
    # a script's own folder is first on the path; the files next to this one must not be importable either
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, TextStreamer

    config = AutoConfig.from_pretrained(repo, trust_remote_code=True)
    if config.model_type != "blockformer_decoder":
        raise SystemExit(f"unexpected model type {config.model_type!r}")
    model = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True).eval()
    backbone = AutoModel.from_pretrained(repo, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)

    expected = torch.load(expected_file, weights_only=True)
    input_ids, generated = expected["input_ids"], expected["generated"]
    with torch.no_grad():
        logits = model(input_ids).logits
        hidden = backbone(input_ids).last_hidden_state
    difference = (logits - expected["logits"]).abs().max().item()
    if difference > 1e-5 * max(1.0, expected["logits"].abs().max().item()):
        raise SystemExit(f"the reloaded model's logits differ by {difference:.3g}")
    if hidden.shape != (*input_ids.shape, config.hidden_size):
        raise SystemExit(f"AutoModel returned hidden states of shape {tuple(hidden.shape)}")
    new_tokens = generated.shape[1] - input_ids.shape[1]
    again = model.generate(input_ids, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    if not torch.equal(again, generated):
        raise SystemExit("the reloaded model's greedy text differs")

    torch.manual_seed(0)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    inputs = tokenizer(prompt, return_tensors="pt")
    model.generate(
        **inputs, do_sample=True, temperature=0.7, top_p=0.95, max_new_tokens=int(max_new_tokens), streamer=streamer
    )
    if any(name.partition(".")[0] == "blockformer" for name in sys.modules):
        raise SystemExit("blockformer was imported after all")


if __name__ == "__main__":
    main(*sys.argv[1:])
