"""Give a model low-bit weights and save it; or compare the ways to do so in size, speed and error.

    python examples/quantize.py qwen3 qwen3-int8 --method torchao-int8
    python examples/quantize.py --compare                                  # random weights, Qwen3-0.6B width, 6 layers
    python examples/quantize.py --compare --model gpt --text held-out.txt  # a model of yours, with its perplexity

The libraries are torchao, bitsandbytes and optimum-quanto (`pip install torchao ...`); a comparison leaves out the ways
whose library is missing.
"""

import argparse
import gc
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.utils import logging

import blockformer

CONTEXT, PROMPT = 128, 256


def _torchao(bits: int, can_save: bool = True):
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    if bits == 8:
        return TorchAoConfig(Int8WeightOnlyConfig())
    if can_save:
        return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

    return TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size=32))


def _bitsandbytes(bits: int):
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    # Doubly quantized scales: with plain ones, what is saved after a forward pass on a CPU is wrong (0.50.2).
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )


# Name -> the package, the config, whether transformers can save what it makes.
METHODS = {
    "torchao-int8": ("torchao", lambda: _torchao(8), True),
    "torchao-int4": ("torchao", lambda: _torchao(4, can_save=False), False),
    "torchao-int4-unpacked": ("torchao", lambda: _torchao(4), True),
    "bitsandbytes-int8": ("bitsandbytes", lambda: _bitsandbytes(8), True),
    "bitsandbytes-nf4": ("bitsandbytes", lambda: _bitsandbytes(4), True),
    "quanto-int8": ("optimum.quanto", lambda: QuantoConfig(weights="int8"), False),
    "quanto-int4": ("optimum.quanto", lambda: QuantoConfig(weights="int4"), False),
}
PLAIN = ["float32", "bfloat16", "bfloat16, prepared"]
COLUMNS = "weights | on disk, MB | in memory, MB | tokens/s | prefill, ms | logit error | same argmax | perplexity"


def main() -> int:
    """Quantize, compare, or measure one way for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a model to quantize: a folder or a Hub id")
    parser.add_argument("target", nargs="?", type=Path, help="the folder to save it in")
    parser.add_argument("--method", choices=[name for name, (*_, saves) in METHODS.items() if saves])
    parser.add_argument("--compare", action="store_true", help="print a table of all installed methods")
    parser.add_argument("--ways", nargs="+", choices=[*PLAIN, *METHODS], default=[*PLAIN, *METHODS], metavar="WAY")
    parser.add_argument("--model", type=Path, help="with --compare: a folder (default: random weights)")
    parser.add_argument("--text", type=Path, help="with --compare and --model: a text for the perplexity")
    parser.add_argument("--rounds", type=int, default=5, help="with --compare: number of timings; the best counts")
    parser.add_argument("--tiny", action="store_true", help="with --compare: a tiny model, to try the code")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "SCRATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.measure:
        print(json.dumps(measure(*options.measure, options.model, options.text, options.rounds)))
    elif options.compare:
        compare(options)
    elif options.source and options.target and options.method:
        quantize(options.source, options.target, options.method)
    else:
        parser.error("give SOURCE, TARGET and --method, or --compare")
    return 0


def missing(name: str) -> str:
    """What to install for a way, in a sentence; empty if it is there."""
    package = METHODS.get(name, ("",))[0]
    if not package or importlib.util.find_spec(package.partition(".")[0]):
        return ""
    return f"{name} needs {package}, which is not installed: pip install {package.replace('.', '-')}"


def load(folder: str | Path, name: str):
    """A model of bfloat16 (or as the name says) with the weights that the name says."""
    package, make, _ = METHODS.get(name, (None, None, None))
    if package is None:
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return model.prepare_for_inference() if "prepared" in name else model
    settings = {"quantization_config": make(), "dtype": torch.bfloat16, "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


def quantize(source: str, target: Path, name: str) -> None:
    """Quantize a model, save it with its tokenizer, if it has one."""
    if sentence := missing(name):
        sys.exit(sentence)
    load(source, name).save_pretrained(target)
    if (Path(source) / "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(source).save_pretrained(target)
    print(f"{target}: {_weight_bytes(target) / 1e6:,.1f} MB of weights")


def compare(options) -> None:
    """Print a Markdown table; each line is measured in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if folder is None:
            folder = Path(scratch) / "random"
            _random_model(options.tiny).save_pretrained(folder)
        lines, names = {}, list(dict.fromkeys(["float32", *options.ways]))
        for index, name in enumerate(names, 1):
            if sentence := missing(name):
                print(sentence, file=sys.stderr)
                continue
            command = [sys.executable, __file__, "--measure", name, scratch, "--model", folder]
            command += ["--rounds", str(options.rounds), *(["--text", options.text] if options.text else [])]
            print(f"{index} of {len(names)}: {name}", file=sys.stderr)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                continue
            lines[name] = json.loads(done.stdout.splitlines()[-1])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.model or 'random weights'}\n")
    print(f"| {COLUMNS} |")
    print("|" + "---|" * (COLUMNS.count("|") + 1))
    for name, line in lines.items():
        print(_row(name.replace("-", " ", 1), line))


def measure(name: str, scratch: str, folder: Path, text: Path | None, rounds: int) -> dict:
    """Size, speed and error of one way; the logits of float32 stay in the scratch folder for the others."""
    ids = _ids(folder, text)
    before = _tensor_bytes()
    model = load(folder, name)
    result: dict = {"disk": None}
    if METHODS.get(name, (None, None, True))[2]:
        with tempfile.TemporaryDirectory() as place:
            model.save_pretrained(place)
            result["disk"] = _weight_bytes(Path(place))
    with torch.no_grad():
        logits = model(ids).logits.float()
    result["memory"] = _tensor_bytes() - before - logits.nbytes
    result["perplexity"] = _perplexity(logits, ids) if text else None
    path = Path(scratch) / "exact-logits.pt"
    if name == "float32":
        torch.save(logits, path)
    else:
        exact = torch.load(path, weights_only=True)
        result["error"] = ((logits - exact).norm() / exact.norm()).item()
        result["agreement"] = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
    del logits
    result["token"], result["prefill"] = _seconds(model, ids, rounds)
    return result


@torch.no_grad()
def _seconds(model, ids, rounds: int) -> tuple[float, float]:
    """The best times of a decoded token after a short context, and of a prompt."""
    tokens, prefills = [], []
    for _ in range(rounds + 1):
        cache = model(ids[:1, :CONTEXT], use_cache=True, logits_to_keep=1).past_key_values
        for _ in range(8):
            start = time.perf_counter()
            model(ids[:1, :1], past_key_values=cache, logits_to_keep=1)
            tokens.append(time.perf_counter() - start)
        start = time.perf_counter()
        model(ids[:1, :PROMPT], use_cache=True, logits_to_keep=1)
        prefills.append(time.perf_counter() - start)
    return min(tokens), min(prefills[1:])


def _ids(folder: Path, text: Path | None):
    """Tokens [rows, length] of the text, or random ones."""
    config = blockformer.BlockformerDecoderConfig.from_pretrained(folder)
    length = min(PROMPT, config.max_position_embeddings - 8)
    if text is None:
        return torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    rows = min(len(ids) // length, 32)
    if rows == 0:
        raise SystemExit(f"{text} has {len(ids)} tokens; {length} are needed.")
    return ids[: rows * length].view(rows, length)


def _perplexity(logits, ids) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())


def _random_model(tiny: bool):
    """A Qwen3 of the 0.6B width with fewer layers, in bfloat16."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 32768}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    torch.manual_seed(0)
    config = blockformer.preset("qwen3", **sizes, tie_word_embeddings=True)
    return blockformer.BlockformerDecoderForCausalLM(config).to(torch.bfloat16)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _tensor_bytes() -> int:
    """Bytes of all tensors of this process, each storage once; what lies inside a quantized tensor is one of them."""
    gc.collect()
    sizes = {}
    for tensor in (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)):
        if hasattr(tensor, "__tensor_flatten__"):
            continue  # a shell around tensors that are counted themselves
        try:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # oneDNN's own layout
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    sizes.pop(0, None)
    return sum(sizes.values())


def _row(name: str, line: dict) -> str:
    def shown(value, form: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value * scale, form)

    cells = [
        name,
        shown(line["disk"], ",.1f", 1e-6),
        shown(line["memory"], ",.1f", 1e-6),
        f"{1 / line['token']:,.1f}",
        f"{line['prefill'] * 1e3:,.0f}",
        shown(line.get("error"), ".3f"),
        shown(line.get("agreement"), ".1%"),
        shown(line["perplexity"], ".2f"),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
