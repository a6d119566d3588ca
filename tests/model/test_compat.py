"""What the code needs of its libraries: private names are listed, and a repo says what a release lacks."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from pairs import assert_close, token_ids
from sizes import TINY
from torch import nn

import blockformer
from blockformer import engine
from blockformer.model import compat
from blockformer.publishing import code_files

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = re.compile(r"_[A-Za-z]\w*")
PUBLIC_BY_CONVENTION = {"_asdict", "_fields", "_replace"}  # of named tuples


def modules():
    """(path, import name) of every module of the package."""
    for folder, package in ((ROOT / "src/blockformer", "blockformer"), (ROOT / "conversion", "blockformer.conversion")):
        for path in sorted(folder.rglob("*.py")):
            parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"]
            yield path, ".".join([package, *parts])


def members_of(node):
    """The private names that a class defines: methods, class attributes, attributes of self."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                yield ast.unparse(target)


def of_a_library(owner, name):
    """Whether a class takes a name over from a base class that is a library's."""
    bases = [base for base in inspect.getmro(owner) if not base.__module__.startswith("blockformer")]
    attributes = set().union(*(vars(base) for base in bases), vars(nn.Module()) if nn.Module in bases else ())
    return name in attributes


def private_names():
    """name -> the files that use it, of the private names of libraries in the whole package."""
    used, defined, taken_over = {}, set(), {}
    for path, module in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
                defined |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", ".get", ".pop")):
                names = [word.value for word in node.args if isinstance(getattr(word, "value", None), str)]
            elif isinstance(node, ast.Compare) and isinstance(getattr(node.left, "value", None), str):
                names = [node.left.value]  # "_name" in vars(module)
            elif isinstance(node, ast.Subscript) and isinstance(getattr(node.slice, "value", None), str):
                names = [node.slice.value]  # vars(module)["_name"]
            else:
                names = []
            for name in names:
                used.setdefault(name, set()).add(path.name)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            if isinstance(node, ast.ClassDef) and (owner := getattr(importlib.import_module(module), node.name, None)):
                for name in members_of(node):
                    if PRIVATE.fullmatch(name) and of_a_library(owner, name):
                        taken_over.setdefault(name, set()).add(path.name)
    found = {name: files for name, files in used.items() if PRIVATE.fullmatch(name) and name not in defined}
    for name, files in taken_over.items():
        found[name] = found.get(name, set()) | files
    return {name: files for name, files in found.items() if name not in PUBLIC_BY_CONVENTION}


def test_every_private_name_of_a_library_is_listed_in_compat():
    """They may go in any release: the docstrings of compat and of engine say what happens then."""
    lines = re.findall(r"^- (`.*?):\s", compat.__doc__ + engine.__doc__, re.M | re.S)
    listed = {name for line in lines for name in re.findall(r"`(_\w+)`", line)}
    found = private_names()
    assert not {name: files for name, files in found.items() if name not in listed}, "not listed"
    assert not listed - set(found), "listed, and not used"


def test_all_that_a_repo_imports_from_transformers_is_tried_in_compat():
    """Only the classes of outputs are not: there are many, and they have been where they are since transformers 4."""

    def imports(path):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module == "transformers.modeling_outputs":
                continue
            if (node.module or "").partition(".")[0] == "transformers":
                names = {alias.name for alias in node.names} - {"modeling_outputs"}
                yield from ((node.module, name) for name in names)

    tried = set(imports(Path(compat.__file__)))
    presets = map(blockformer.preset, ("qwen3", "bert", "t5", "mixtral", "deepseek_v3"))
    files = {path for config in presets for path in code_files(config).values()}
    for path in files:
        assert set(imports(path)) <= tried, path.name


LOAD = """
import transformers, transformers.cache_utils, transformers.generation, transformers.masking_utils
exec(sys.argv[2])
try:
    transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
    print("loaded")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
NEWER = "transformers.__version__ = '5.99.0'"
GONE = "; del transformers.cache_utils.DynamicLayer"
OLD = "transformers.__version__ = '4.57.1'"


@pytest.mark.versions
def test_a_repo_says_what_a_release_of_transformers_lacks(tmp_path, processes):
    blockformer.preset("qwen3").save_pretrained(tmp_path / "repo")
    said = []
    for fault in ("", NEWER, NEWER + GONE, OLD):
        done = processes.run(LOAD, tmp_path / "repo", fault, folder=tmp_path)
        assert not done.stderr
        said += done.stdout.splitlines()
    as_it_is, newer, gone, old = said
    assert as_it_is == newer == "loaded"
    start = "ImportError: This model's code does not run on transformers"
    assert gone.startswith(f"{start} 5.99.0 (cannot import name 'DynamicLayer'")
    assert old.startswith(f"{start} 4.57.1 (it needs 5.5 at least)")
    assert gone.count(f"pip install 'transformers=={compat.NEWEST}.*'") == old.count(compat.NEWEST + ".*") == 1


@pytest.mark.versions
@pytest.mark.parametrize("name", ["qwen3", "t5"])
def test_a_cache_goes_by_both_of_its_names(name):
    """transformers 5.24 calls `past_key_values` `cache`, in arguments and in outputs."""
    config = blockformer.preset(name, vocab_size=200, initializer_range=0.4, pad_token_id=0, **TINY)
    classes = {"qwen3": "DecoderForCausalLM", "t5": "EncoderDecoderForConditionalGeneration"}
    model = getattr(blockformer, f"Blockformer{classes[name]}")(config).eval()
    ids = token_ids(1, 9)
    source = {"input_ids": ids} if name == "t5" else {}
    reads = "decoder_input_ids" if name == "t5" else "input_ids"
    found = []
    with torch.no_grad():
        for each in ("cache", "past_key_values"):
            output = model(**source, **{reads: ids[:, :8]}, use_cache=True)
            cache = output[compat.CACHE]
            assert cache.get_seq_length() == 8
            found.append(model(**source, **{reads: ids[:, 8:], each: cache}).logits)
        assert torch.equal(*found)
        whole = model(**source, **{reads: ids}).logits
        assert_close(found[0], whole[:, -1:])
        assert torch.equal(model(**source, **{reads: ids}, cache=None).logits, whole)
        assert torch.equal(model(**source, **{reads: ids}, cache=None, past_key_values=None).logits, whole)
        with pytest.raises(ValueError, match="two names for one argument"):
            model(**source, **{reads: ids[:, 8:]}, cache=cache, past_key_values=cache)
