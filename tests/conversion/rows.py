"""Rows of settings of official families, and what their tests do with each."""

import copy
import inspect
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version

from blockformer.conversion import convert
from blockformer.conversion.families.bert_like import OLD_NORMS
from blockformer.conversion.families.registry import FAMILIES

from .oracles import (
    assert_loads_as,
    assert_same_state,
    assert_verified,
    in_official_names,
    labels_of,
    randomize_biases_and_norms,
    stored,
    there_and_back,
)


class Row(NamedTuple):
    """A model of a family.

    Attributes:
        family: the official model type.
        settings: of its config, beyond `SIZES` and over them.
        shards: whether its weights are stored in several files.
    """

    family: str
    settings: dict[str, Any] = {}
    shards: bool = False


def parameters(rows):
    """The rows as parameters of a test, those after the first of a family as `exhaustive`."""
    made = []
    for index, row in enumerate(rows):
        number = sum(each.family == row.family for each in rows[:index])
        marks = [pytest.mark.exhaustive] if number else []
        made.append(pytest.param(row, id=f"{row.family}-{number}", marks=marks))
    return made


def family_of(row):
    if row.family not in FAMILIES:
        pytest.skip(f"transformers {transformers.__version__} has no {row.family}")
    return FAMILIES[row.family]


def skip_what_an_older_release_cannot(row):
    """Skip a row whose official class reads its own config wrongly in the oldest releases."""
    version = Version(transformers.__version__)
    one_type = len({*row.settings.get("layer_types", ())}) == 1
    if version < Version("5.11"):
        by_type = row.family in ("gemma3_text", "modernbert", "modernbert-decoder")
        # Of OLMo 3 they know one set of rotary parameters only; others they mix up unless each type has a layer.
        if row.family == "olmo3" or (by_type and one_type):
            pytest.skip(f"transformers {version} mixes up the rotary parameters of layer types")
    if version < Version({"deepseek_v2": "5.15", "deepseek_v3": "5.6"}.get(row.family, "5.5")):
        pytest.skip(f"transformers {version} has errors in its {row.family}")
    if version < Version("5.23") and row.settings.get("num_kv_shared_layers"):
        pytest.skip(f"transformers {version} has keys that nothing reads in its gemma4_text")
    if version < Version("5.6") and row.settings.get("n_group", 1) > 1:
        pytest.skip(f"transformers {version} has errors in its groups of experts")
    if version < Version("5.10") and row.family == "gemma3_text" and "rope_parameters" in row.settings:
        pytest.skip(f"transformers {version} mixes up the rotary parameters of layer types")


def model_of(row, usual, head=None, **more):
    """The official model of a row over those of the usual settings that its class has, its biases random too."""
    family = family_of(row)
    skip_what_an_older_release_cannot(row)
    name = family.heads[0].official if head is None else head.official
    labels = labels_of(name)
    names = set(family.settings.meanings)
    known = set(inspect.signature(family.settings.official_class.__init__).parameters) | names
    sizes = {**usual, **labels, **row.settings, **more}
    sizes = {**in_official_names(row.family, sizes), **sizes}
    settings = {key: value for key, value in sizes.items() if key in known or key in {**row.settings, **labels, **more}}
    torch.manual_seed(0)
    model = getattr(transformers, name)(family.settings.official_class(**settings)).eval()
    parts = (model.config, getattr(model.config, "encoder", None), getattr(model.config, "decoder", None))
    if any(getattr(part, "attn_logit_softcapping", None) is not None for part in parts):
        model.set_attn_implementation("eager")  # older releases forget the cap otherwise
    randomize_biases_and_norms(model, spread=0.2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)
        if buffer_name.endswith("layer_scalar"):
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model


@torch.no_grad()
def assert_embeds_as(folder, theirs):
    """The embedding of a folder's model looks up what the official one does, and trains the same rows."""
    ours = transformers.AutoModel.from_pretrained(folder).get_input_embeddings()
    theirs = copy.deepcopy(theirs.get_input_embeddings())
    assert ours.padding_idx == theirs.padding_idx
    ids = torch.arange(theirs.num_embeddings)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(ours.to(dtype)(ids), theirs.to(dtype)(ids))


def assert_there_and_back(folder, row, theirs, computed=()):
    """Convert a model and back, with and without a memory of its source, bit for bit; gives the folder of ours.

    Both models are compared on the way in, and on the way out without that memory; with it, all tensors and entries of
    the config are the source's. Tensors whose names end in `computed` are made by the official class itself
    where they are missing.
    """
    src, dst, back = (folder / name for name in ("src", "dst", "back"))
    theirs.save_pretrained(src, max_shard_size="20KB" if row.shards else "5GB")
    assert len(list(src.glob("*.safetensors"))) > row.shards
    report = there_and_back(folder, verify="full")
    assert report.family == row.family
    if Version(transformers.__version__) >= Version("5.23"):  # older classes of some families scale elsewhere
        assert_embeds_as(dst, theirs)
    assert_loads_as(back, theirs)
    (dst / "conversion.json").unlink()
    assert_verified(convert(dst, folder / "fresh", to_official=True, family=row.family, verify="quick"))
    # transformers 5.23 saves ESM's norms under the names of its first checkpoints.
    todays = {OLD_NORMS.to_class(name): tensor for name, tensor in stored(src).items()}
    left = {name: tensor for name, tensor in todays.items() if not name.endswith(tuple(computed))}
    assert stored(folder / "fresh") == left
    fresh = type(theirs).from_pretrained(folder / "fresh")
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if computed and name.endswith(tuple(computed)):
                fresh.state_dict()[name].copy_(tensor)
    assert_same_state(fresh, theirs)
    return dst
