"""Write a model as ONNX, for batches and texts of any size, and compare it in ONNX Runtime with PyTorch.

    pip install onnx onnxscript onnxruntime
    python examples/export_onnx.py my-encoder encoder.onnx      # a repo of ours, or an official checkpoint

What is written gives the hidden states or logits of whole texts. There is no key/value cache in it, so generating means
calling it again for each token: it suits encoders, classifiers and scoring.
"""

import argparse
import importlib.util
import inspect

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedModel

AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}


def load(source: str) -> PreTrainedModel:
    """The model of a folder or Hub id with the head that it was saved with."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=True)
    name = (config.architectures or [""])[0]
    auto = next((auto for ending, auto in AUTO_CLASSES.items() if name.endswith(ending)), None)
    loader = getattr(transformers, auto) if auto else AutoModel
    return loader.from_pretrained(source, trust_remote_code=True).eval()


def inputs(model: PreTrainedModel, rows: int, length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens [rows, length], the last row padded at its end, and tokens for a decoder that has an encoder."""
    vocab = model.config.vocab_size
    ids, mask = torch.randint(3, vocab, (rows, length)), torch.ones(rows, length, dtype=torch.long)
    mask[-1, length - padding :] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.randint(3, vocab, (rows, length // 2 + 1))
    return found


def arguments(model: PreTrainedModel) -> tuple[dict, dict]:
    """What the model is traced with, and the names of the sizes that stay open."""
    example = inputs(model, rows=2, length=7, padding=2)  # a size of 1 would be taken for a constant
    sizes: dict = {name: {0: "rows", 1: "length"} for name in example}
    if "decoder_input_ids" in sizes:
        sizes["decoder_input_ids"] = {0: "rows", 1: "target_length"}
    fixed = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return {**example, **fixed}, {**sizes, **dict.fromkeys(fixed)}


def export(model: PreTrainedModel, path: str) -> None:
    """Write a model as ONNX with the inputs of `inputs`, their sizes left open."""
    # The exporter takes sdpa's kernels apart, after which a result may lie in memory otherwise than the trace expects.
    model.set_attn_implementation("eager")
    traced, sizes = arguments(model)
    program = torch.onnx.export(model, (), kwargs=traced, dynamic_shapes=sizes, dynamo=True, verbose=False)
    program.save(path)


def largest_difference(model: PreTrainedModel, path: str) -> float:
    """ONNX Runtime's results on batches of other sizes compared with PyTorch's: the largest difference of a real token.

    It is a share of the largest result.
    """
    import onnxruntime

    session, worst = onnxruntime.InferenceSession(path), 0.0
    for rows, length, padding in ((3, 11, 4), (1, 23, 0)):
        batch = inputs(model, rows, length, padding)
        found = torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})[0])
        with torch.no_grad():
            wanted = model(**batch)[0]
        difference = (found - wanted).abs()
        if found.shape[:2] == batch["attention_mask"].shape:  # outputs at padding do not matter
            difference = difference[batch["attention_mask"].bool()]
        worst = max(worst, (difference.max() / wanted.abs().max()).item())
    return worst


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a folder or Hub id, ours or an official one")
    parser.add_argument("path", help="the file to write")
    options = parser.parse_args()
    if absent := [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"not installed: {', '.join(absent)}; pip install {' '.join(absent)}")
    torch.manual_seed(0)
    model = load(options.source)
    export(model, options.path)
    difference = largest_difference(model, options.path)
    print(f"{options.path}: {difference:.1e} of the largest result differs from PyTorch's")
    if difference > 1e-4:
        raise SystemExit("that is more than rounding")


if __name__ == "__main__":
    main()
