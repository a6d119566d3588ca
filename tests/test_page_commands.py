"""The commands on the pages: each is there, has the options it is shown with, and runs on small models."""

import re
import shlex

import pytest
import torch
import transformers
from awq_layout import state_of
from safetensors.torch import save_file
from test_docs import FENCE, ROOT, markdown_files, page_outputs
from typer.main import get_command

from blockformer.cli import app, main

PLAIN, LOW_BIT = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-14B-AWQ"


def commands(path):
    """The command lines of a page, from its blocks and its prose: (program, arguments)."""
    text = path.read_text(encoding="utf-8")
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "console")]
    for line in "\n".join(blocks).splitlines() + re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        found = re.match(r"(?:\$ |.*\| )?(blockformer|python) (.+)", line)
        if found:
            yield found[1], shlex.split(found[2].replace("\\", ""), comments=True)


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_on_a_page_is_there_and_has_these_options(path):
    group = get_command(app)
    for program, arguments in commands(path):
        if program == "blockformer":
            while arguments[0] == "--block":
                del arguments[:2]
            if arguments[0].isalpha() and arguments[0].islower():  # not `blockformer COMMAND`
                command = group.commands[arguments[0]]
                words = [*arguments[1:], "VALUE"]  # which an option that is only named, such as `--map`, lacks
                command.make_parser(command.context_class(command)).parse_args(words)
        elif arguments[0].endswith(".py") and "/" in arguments[0] and not arguments[0].startswith("llama.cpp"):
            folder = (ROOT / arguments[0]).parent
            source = "".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
            assert (ROOT / arguments[0]).is_file()
            options = [each.partition("=")[0] for each in arguments if re.match(r"--\w", each)]
            assert not [option for option in options if f'"{option}"' not in source], arguments


def test_an_option_that_a_command_does_not_have_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\nblockformer convert SRC DST --two official\n```\n", encoding="utf-8")
    with pytest.raises(Exception, match="No such option: --two"):
        test_every_command_on_a_page_is_there_and_has_these_options(page)


@pytest.fixture(scope="module")
def hub_names(tmp_path_factory):
    """A folder with small Qwen3 models under the names that the pages take from the Hub."""
    home = tmp_path_factory.mktemp("hub")
    tokenizer = transformers.AutoTokenizer.from_pretrained(page_outputs.small_chat_model(home / "tokenizer"))
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "eos_token_id": 256, "pad_token_id": 256}
    for name, layers in ((PLAIN, 28), (LOW_BIT, 2)):
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**sizes, num_hidden_layers=layers, tie_word_embeddings=name == PLAIN)
        model = transformers.Qwen3ForCausalLM(config)
        if name == LOW_BIT:
            model = model.half()
            config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
            config.quantization_config |= {"zero_point": True, "modules_to_not_convert": None}
            config.dtype = torch.float16
            config.save_pretrained(home / name)
            low, _ = state_of(model, 32)
            low = {key: tensor.contiguous() for key, tensor in low.items()}
            save_file(low, home / name / "model.safetensors", {"format": "pt"})
        else:
            model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    return home


def status_of(arguments):
    try:
        main(arguments)
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "count"), {"reshaping": 5, "retrieval": 1, "see-inside": 3, "quantization": 4}.items()
)
def test_the_commands_of_a_page_run(page, count, hub_names, tmp_path, monkeypatch):
    """One after the other in one folder, as a reader types them, with small models under the names of the Hub."""
    (tmp_path / "Qwen").symlink_to(hub_names / "Qwen")
    monkeypatch.chdir(tmp_path)
    lines = [
        arguments for _, arguments in commands(ROOT / "docs" / f"{page}.md") if arguments[1:2] in ([PLAIN], [LOW_BIT])
    ]
    assert len(lines) == count
    for arguments in lines:
        assert not status_of(arguments), arguments
