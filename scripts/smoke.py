"""Try an installed Blockformer: import, every main command, an exported repo that loads where it cannot be imported.

Runs in the environment under test, from a folder outside the checkout, offline.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

RELOAD = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "blockformer":
            raise ModuleNotFoundError(f"{name} is blocked here on purpose", name=name)

sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

folder, expected = sys.argv[1:]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
saved = torch.load(expected, weights_only=True)
with torch.no_grad():
    logits = model(saved["input_ids"]).logits
torch.testing.assert_close(logits, saved["logits"], rtol=0, atol=1e-6)
assert tokenizer("def f").input_ids == saved["token_ids"].tolist(), "the tokenizer changed on the way"
assert config.model_type == "blockformer_decoder", config.model_type
assert "blockformer" not in sys.modules
"""


def run(*command: object, typed: str = "") -> str:
    """Run a command and return its output; a failure ends the smoke test with that output.

    Args:
        typed: what it reads from its standard input.
    """
    done = subprocess.run([str(part) for part in command], input=typed, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} ... ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def byte_tokenizer():
    """A byte-level tokenizer without merges: 256 bytes and one special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def convert_and_chat(script: Path, tokenizer, folder: Path) -> None:
    """Convert a small official checkpoint there and back, and have the result answer a line."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=300, num_hidden_layers=2, head_dim=16, max_position_embeddings=256, **sizes)
    official, ours, back = (folder / name for name in ("official", "ours", "back"))
    Qwen3ForCausalLM(config).save_pretrained(official)
    tokenizer.save_pretrained(official)
    said = run(script, "convert", official, ours)
    assert "not verified" not in said, said
    run(script, "convert", ours, back, "--to", "official")
    assert (official / "model.safetensors").read_bytes() == (back / "model.safetensors").read_bytes()
    answers = run(script, "chat", ours, "--greedy", "--max-new-tokens", 6, typed="def f\n")
    assert len(answers.strip()) > 0, "chat wrote nothing"


def main() -> None:
    import torch

    import blockformer

    location = Path(blockformer.__file__).parent
    assert "site-packages" in location.parts, f"imported from {location}, not from the installed wheel"
    import blockformer.conversion

    script = Path(sys.executable).parent / "blockformer"
    help_text = run(script, "--help")
    assert all(name in help_text for name in ("convert", "inspect", "export", "demo")), help_text

    torch.manual_seed(0)
    config = blockformer.preset(
        "qwen3",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = blockformer.BlockformerDecoderForCausalLM(config).eval()
    tokenizer = byte_tokenizer()
    input_ids = torch.randint(0, 256, (2, 12))
    with tempfile.TemporaryDirectory() as folder:
        repo, expected = Path(folder) / "repo", Path(folder) / "expected.pt"
        blockformer.export_model(model, repo, tokenizer=tokenizer)
        with torch.no_grad():
            logits = model(input_ids).logits
        token_ids = torch.tensor(tokenizer("def f").input_ids)
        torch.save({"input_ids": input_ids, "logits": logits, "token_ids": token_ids}, expected)
        run(sys.executable, "-I", "-c", RELOAD, repo, expected)
        print(run(script, "inspect", repo).splitlines()[0])
        print(run(script, "inspect", repo, "--html", repo.parent / "page.html", "--text", "def f"))
        assert (repo.parent / "page.html").stat().st_size > 10_000
        convert_and_chat(script, tokenizer, Path(folder))
        run(script, "demo", "--quick", "--output", Path(folder) / "demo")
    print("smoke test passed: import, export, remote-code reload, inspect, convert, chat, demo")


if __name__ == "__main__":
    main()
