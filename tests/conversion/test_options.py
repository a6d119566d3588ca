"""Nothing that a caller gives disappears: each option is followed, refused by name, or named in a warning."""

import ast
import inspect
import json
import re
import shutil
import textwrap
import warnings
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.auto_factory import _BaseAutoModelClass

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.for_search import convert_for_search
from blockformer.conversion.loading import load_any
from blockformer.conversion.options import OPTIONS, OWN
from blockformer.conversion.reshaped import convert_reshaped
from blockformer.model.pretrained_model import BlockformerPreTrainedModel
from blockformer.summary import summarize

from .oracles import edit_config, in_our_names, official_folder, stored

FUNCTIONS = {
    "convert": convert,
    "convert_reshaped": convert_reshaped,
    "convert_for_search": convert_for_search,
    "export_folder": export_folder,
    "from_official": from_official,
    "load_any": load_any,
    "summarize": summarize,
    "verify": blockformer.verify,
}


def names_in(function):
    """The names that a function takes: by its signature, popped from its keyword arguments, in its lists of names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    positional = {"cls", "pretrained_model_name_or_path", "model_args", "kwargs"}
    found = set(inspect.signature(function).parameters) - positional
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.fullmatch(r"kwargs\.(pop|get)", ast.unparse(node.func)):
            found |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
        if isinstance(node, ast.List):
            found |= {each.value for each in node.elts if isinstance(each, ast.Constant)}
    return found


def test_each_option_of_from_pretrained_is_in_the_table():
    theirs = names_in(transformers.PreTrainedModel.from_pretrained.__func__)
    theirs |= names_in(_BaseAutoModelClass.from_pretrained.__func__)
    assert {"subfolder", "variant", "mirror", "local_files_only", "code_revision", "token", "device_map"} <= theirs
    assert sorted(theirs - OPTIONS.keys()) == []


def test_the_options_of_each_function_are_those_of_its_signature():
    assert FUNCTIONS.keys() == OWN.keys()
    for name, function in FUNCTIONS.items():
        named = [each.name for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD]
        own = set(named) - {"src", "dst", "source", "repo", "revision", "output_loading_info"}
        assert own == set(OWN[name]), name


def weights_like(folder, seed):
    """The tensors of a folder, others."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.2
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A Llama with four models in it: by default, as a variant, pickled, in a subfolder. Each has other weights."""
    folder = tmp_path_factory.mktemp("many") / "source"
    official_folder(folder, "llama", vocab_size=61, hidden_size=32, intermediate_size=48, max_position_embeddings=64)
    save_file(weights_like(folder, 1), folder / "model.fp16.safetensors", {"format": "pt"})
    torch.save(weights_like(folder, 2), folder / "pytorch_model.bin")
    (folder / "best/of/all").mkdir(parents=True)
    shutil.copy(folder / "config.json", folder / "best/of/all")
    save_file(weights_like(folder, 3), folder / "best/of/all/model.safetensors", {"format": "pt"})
    return folder


CHOICES = [
    {"variant": "fp16"},
    {"use_safetensors": False},
    {"subfolder": "best/of/all"},
    {"subfolder": "best/of/all/"},
]
IDS = torch.arange(8)[None]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_weights_that_are_chosen_are_read_by_every_function(many, tmp_path, choice, tiny_tokenizer):
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(many, **choice)(IDS).logits
        assert_close(from_official(many, **choice)(IDS).logits, wanted)
        report = convert(many, tmp_path / "ours", **choice)
        assert report.parity.passed
        assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")(IDS).logits, wanted)
        assert_close(load_any(many, **choice)[0](IDS).logits, wanted)
        convert_reshaped(many, tmp_path / "shaped", layers=[0, 1], **choice)
        assert_close(from_official(tmp_path / "shaped")(IDS).logits, wanted)
    assert summarize(many, subfolder=choice.get("subfolder")).parameters
    left_out = [name for names in report.left_out.values() for name in names]
    assert ("model.safetensors" in left_out) == ("subfolder" not in choice)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_same_choices_are_made_in_our_layout(many, tmp_path, choice):
    ours = tmp_path / "ours"
    convert(many, ours, verify=False)
    target = ours / choice.get("subfolder", "")
    shutil.copytree(ours, tmp_path / "copy")
    weights = weights_like(ours, 4)
    if "subfolder" in choice:
        shutil.copytree(tmp_path / "copy", target)
    if "use_safetensors" in choice:
        torch.save(weights, target / "pytorch_model.bin")
    else:
        name = "model.fp16.safetensors" if "variant" in choice else "model.safetensors"
        save_file(weights, target / name, {"format": "pt"})
    assert torch.equal(from_official(ours, **choice).lm_head.weight, weights["lm_head.weight"])
    report = convert(ours, tmp_path / "back", to_official=True, verify="quick", **choice)
    assert report.parity.passed
    assert torch.equal(load_file(tmp_path / "back/model.safetensors")["lm_head.weight"], weights["lm_head.weight"])
    export_folder(ours, tmp_path / "repo", **choice)
    assert torch.equal(load_file(tmp_path / "repo/model.safetensors")["lm_head.weight"], weights["lm_head.weight"])


def test_a_variant_in_shards_is_read_by_its_index(many, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(many, variant="fp16")
    model.save_pretrained(tmp_path / "source", variant="bf16", max_shard_size="20KB")
    assert (tmp_path / "source/model.safetensors.index.bf16.json").exists()
    assert torch.equal(from_official(tmp_path / "source", variant="bf16").lm_head.weight, model.lm_head.weight)
    with pytest.raises(ConversionError, match=r"no weights; .*with variant='bf16' \(--variant bf16\) others are read"):
        from_official(tmp_path / "source")
    report = convert(many, tmp_path / "ours", verify=False)
    assert {"model.fp16.safetensors", "pytorch_model.bin"} <= {
        each for names in report.left_out.values() for each in names
    }


@pytest.fixture
def hub(many, monkeypatch):
    """A Hub with the folder in it: what it was asked for, and with which options."""
    asked = []

    def fetch(hub_id, allow_patterns=None, **how):
        asked.append((tuple(allow_patterns or ()), tuple(sorted((name, str(value)) for name, value in how.items()))))
        return str(many)

    def info(api, hub_id, **how):
        asked.append(("info", api.token, how["revision"]))
        names = [path.relative_to(many).as_posix() for path in many.rglob("*") if path.is_file()]
        return SimpleNamespace(sha="c0ffee", siblings=[SimpleNamespace(rfilename=name, size=1) for name in names])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    return asked


def test_of_a_hub_repo_only_the_subfolder_is_fetched(hub):
    from_official("ann/many", subfolder="best/of/all")
    patterns = [pattern for names, _ in hub[1:] for pattern in names]
    assert sorted(patterns) == ["best/of/all/config.json", "best/of/all/model.safetensors"]
    hub.clear()
    from_official("ann/many", variant="fp16", force_download=True, revision="v1")
    assert hub[0] == ("info", None, "v1")
    assert [names for names, _ in hub[1:]][-1] == ("model.fp16.safetensors",)
    assert all({("force_download", "True"), ("revision", "c0ffee")} <= set(how) for _, how in hub[1:])
    with pytest.raises(ConversionError, match=r"has no subfolder 'worst'"):
        from_official("ann/many", subfolder="worst")


def test_local_files_only_does_not_ask_the_hub(hub, monkeypatch):
    from_official("ann/many", local_files_only=True, cache_dir="there")
    assert [each[0] for each in hub] == [()]
    assert set(hub[0][1]) == {("local_files_only", "True"), ("cache_dir", "there")}

    def missing(*arguments, **how):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    for read in (from_official, summarize, load_any, blockformer.verify):
        with pytest.raises(ConversionError, match=r"local_files_only|not fetched"):
            read("ann/many", local_files_only=True)


class Reached(Exception):
    """The class is asked to load, with these options."""


GIVEN = {
    "revision": "v1",
    "token": "secret",
    "cache_dir": "there",
    "subfolder": "best/of/all",
    "variant": "fp16",
    "use_safetensors": False,
    "local_files_only": True,
    "force_download": True,
    "dtype": "bfloat16",
    "torch_dtype": "float16",
    "config": "config.json",
    "output_loading_info": True,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "device_map": "cpu",
    "max_memory": {"cpu": 1},
    "offload_folder": "{tmp}/x",
    "offload_buffers": True,
    "quantization_config": {"quant_method": "hqq"},
    "ignore_mismatched_sizes": True,
    "generation_config": GenerationConfig(max_new_tokens=3),
    "add_pooling_layer": False,
    "distributed_config": "x",
    "tp_plan": "auto",
    "tp_size": 2,
    "device_mesh": "x",
    "state_dict": {},
    "key_mapping": {"a": "b"},
    "gguf_file": "x.gguf",
    "proxies": {"https": "x"},
    "weights_only": False,
    "fusion_config": {"x": True},
    "adapter_kwargs": {"x": 1},
    "adapter_name": "x",
    "use_kernels": True,
    "kernel_config": {},
    "allow_all_kernels": True,
    "use_auth_token": "x",
    "use_flash_attention_2": True,
    "load_in_8bit": True,
    "load_in_4bit": True,
    "trust_remote_code": True,
    "code_revision": "x",
    "low_cpu_mem_usage": True,
    "offload_state_dict": True,
    "disable_mmap": True,
    "tqdm_class": object,
    "resume_download": True,
    "from_tf": True,
    "from_flax": True,
    "mirror": "x",
    "_fast_init": False,
    "_commit_hash": "x",
    "_from_auto": True,
    "_from_pipeline": "x",
}
"""Option -> a value that asks for something."""


def test_nothing_that_is_given_disappears(hub, tmp_path, monkeypatch):
    load = BlockformerPreTrainedModel.from_pretrained.__func__

    def spy(cls, folder, **how):
        model = load(cls, folder, **{name: how[name] for name in ("config", "state_dict", "dtype")})
        rest = {name: value for name, value in how.items() if name not in ("config", "state_dict")}
        raise Reached(sorted((name, str(value)) for name, value in rest.items()), model)

    monkeypatch.setattr(BlockformerPreTrainedModel, "from_pretrained", classmethod(spy))

    def outcome(**given):
        """Everything that can be seen of a call."""
        hub.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                from_official("ann/many", **given)
            except Reached as reached:
                how, model = reached.args
                seen = (how, str(model.dtype), float(model.lm_head.weight.detach().double().sum()), list(hub))
            except ConversionError as error:
                seen = str(error)
        return seen, [str(each.message) for each in caught]

    plain = outcome()
    assert outcome() == plain
    assert GIVEN.keys() == OPTIONS.keys()
    for name, value in GIVEN.items():
        given = value.format(tmp=tmp_path) if isinstance(value, str) else value
        seen, told = outcome(**{name: given})
        assert seen != plain[0] or any(name in each for each in told), name
        assert not isinstance(seen, str) or name in seen, seen
        if OPTIONS[name].use == "refused":
            assert isinstance(seen, str)
        for neutral in OPTIONS[name].neutral if OPTIONS[name].use not in ("argument", "model") else (None,):
            seen, told = outcome(**{name: neutral})
            assert told == plain[1], name
            assert not isinstance(seen, str), name


SHOWN = {"output_hidden_states": True, "output_attentions": True}


def test_fields_of_the_config_are_set_on_it(many, tmp_path):
    convert(many, tmp_path / "ours", verify=False)
    for folder in (many, tmp_path / "ours"):
        model = from_official(folder, use_cache=False, pad_token_id=7, attention_dropout=0.25, num_labels=5, **SHOWN)
        theirs = AutoModelForCausalLM.from_pretrained(many, **SHOWN)
        with torch.no_grad():
            outputs, wanted = model(IDS), theirs(IDS)
        assert outputs.past_key_values is None
        assert_close(outputs.hidden_states[1], wanted.hidden_states[1])
        assert_close(outputs.attentions[1], wanted.attentions[1])
        assert (model.config.attention_dropout, model.config.num_labels) == (0.25, 5)
        assert (model.generation_config.pad_token_id, model.generation_config.use_cache) == (7, False)
        assert from_official(folder).config.pad_token_id is None
        other, info = from_official(folder, hidden_act="relu", output_loading_info=True)
        assert not info["missing_keys"]
        assert not torch.allclose(other(IDS).logits, wanted.logits)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fewer_layers_are_the_first_ones(tmp_path, family):
    """The list of layer types follows their number, also where types differ."""
    official_folder(tmp_path, family, vocab_size=61)
    with torch.no_grad():
        ours, theirs = (
            load(tmp_path, num_hidden_layers=1)(IDS).logits
            for load in (from_official, AutoModelForCausalLM.from_pretrained)
        )
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"use_cahe": False}, "Did you mean 'use_cache'"),
        ({"device_maps": "cpu"}, "Did you mean 'device_map'"),
        ({"subfoldr": "x"}, "Did you mean 'subfolder'"),
        ({"attn_pdrop": 0.1}, "called 'attention_dropout' here"),
        ({"rope_scaling": {"factor": 2.0}}, "called 'rope_parameters' here"),
        ({"temperature": 0.5}, "generation_config=GenerationConfig"),
        ({"use_cache": "no"}, "use_cache must be true or false"),
        ({"hidden_size": 64}, "with your hidden_size"),
        ({"variant": "../x"}, "variant must be a part"),
        ({"subfolder": "../x"}, "subfolder must be a folder inside"),
        ({"subfolder": "/x"}, "subfolder must be a folder inside"),
        ({"subfolder": "nowhere"}, "has no subfolder 'nowhere'"),
        ({"variant": "bf16"}, "leave out variant and use_safetensors to read model.safetensors"),
        ({"use_safetensors": "no"}, "use_safetensors must be True or False, not 'no'"),
        ({"local_files_only": True, "force_download": True}, "contradict each other"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(many, given, named):
    with pytest.raises(ConversionError, match=named):
        from_official(many, **given)


def test_an_encoder_is_loaded_without_its_pooler(tmp_path):
    """As the cards of embedders tell, whose vectors need none."""
    official_folder(tmp_path / "source", "bert", "BertModel")
    convert(tmp_path / "source", tmp_path / "ours", verify=False)
    for folder in (tmp_path / "source", tmp_path / "ours"):
        model = from_official(folder, add_pooling_layer=False)
        assert model.pooler is None
        assert from_official(folder, add_pooling_layer=None).pooler is not None
        with torch.no_grad():
            wanted = AutoModel.from_pretrained(tmp_path / "source", add_pooling_layer=False)(IDS)[0]
            assert_close(model(IDS)[0], wanted)
    official_folder(tmp_path / "head", "bert", "BertForSequenceClassification")
    with pytest.raises(ConversionError, match="add_pooling_layer means nothing for BlockformerEncoderForSequenceClass"):
        from_official(tmp_path / "head", add_pooling_layer=False)


def test_a_head_for_other_labels_is_drawn_as_by_transformers(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForSequenceClassification", num_labels=3, pad_token_id=0)
    with pytest.raises(ConversionError, match=r"with your num_labels[\s\S]*ignore_mismatched_sizes=True"):
        from_official(tmp_path / "source", num_labels=4)
    model = from_official(tmp_path / "source", num_labels=4, ignore_mismatched_sizes=True)
    assert model(IDS).logits.shape == (1, 4)


def test_a_head_that_does_not_generate_refuses_settings_of_generation(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForSequenceClassification", num_labels=3, pad_token_id=0)
    with pytest.raises(ConversionError, match="generation_config means nothing for"):
        from_official(tmp_path / "source", generation_config=GenerationConfig())


@pytest.mark.parametrize(
    "function", ["convert", "convert_reshaped", "export_folder", "load_any", "summarize", "verify"]
)
def test_options_of_another_function_are_refused(many, tmp_path, function):
    target = (tmp_path / "x",) if function in ("convert", "convert_reshaped", "export_folder") else ()
    for given, named in [
        ({"device_map": "cpu"}, "device_map, which is one of from_official"),
        ({"gguf_file": "x"}, "gguf_file is not supported"),
        ({"revison": "x"}, "Did you mean 'revision'"),
        ({"topology": "encoder"}, "which is one of convert_reshaped"),
    ]:
        if next(iter(given)) not in OWN[function]:
            with pytest.raises(ConversionError, match=named):
                FUNCTIONS[function](many, *target, **given)
    for name in ("force", "strict_finite"):
        if name in OWN[function]:
            with pytest.raises(ConversionError, match=f"{name} must be True or False, not 'no'"):
                FUNCTIONS[function](many, *target, **{name: "no"})
    assert not (tmp_path / "x").exists()


def test_choices_of_weights_are_refused_where_none_are_read(many, tmp_path):
    with pytest.raises(ConversionError, match="variant='fp16' would change nothing"):
        summarize(many, variant="fp16")
    with pytest.raises(ConversionError, match=r"subfolder.*would change nothing"):
        blockformer.verify(many, subfolder="best/of/all")
    with pytest.raises(ConversionError, match="qwen3: a preset, which has no revision"):
        summarize("qwen3", revision="v1")
    with pytest.raises(ConversionError, match=r"only a config\.json, which has no subfolder"):
        summarize(many / "config.json", subfolder="best")
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "weights.pt").touch()
    with pytest.raises(ConversionError, match="a weight file, which has no variant"):
        from_official(tmp_path / "weights.pt", family="article-gpt", config=tmp_path / "settings.json", variant="fp16")


@pytest.mark.parametrize(
    ("said", "has"), [("bfloat16", torch.float32), ("float32", torch.float16), (None, torch.float16)]
)
def test_without_a_dtype_every_function_takes_that_of_config_json(tmp_path, said, has):
    official_folder(tmp_path / "source", "llama", dtype=has)
    edit_config(tmp_path / "source", dtype=said)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "source").dtype
    note = [f"config.json: dtype is {said}, but the weights are {str(has)[6:]}"] if said else []

    def notes_on(notes):
        return [each[each.index("config.json: dtype") :].partition(";")[0] for each in notes if ": dtype is" in each]

    def loaded(folder, **given):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = from_official(folder, **given)
        return {parameter.dtype for parameter in model.parameters()}, notes_on([str(each.message) for each in caught])

    report = convert(tmp_path / "source", tmp_path / "ours", verify=False)
    assert notes_on(report.notes) == note
    assert stored(tmp_path / "ours") == in_our_names(stored(tmp_path / "source"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype == theirs
    assert notes_on(export_folder(tmp_path / "ours", tmp_path / "repo").notes) == note
    back = convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify=False)
    assert notes_on(back.notes) == note
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "back")]
    assert configs[0] == configs[1]
    for folder in (tmp_path / "source", tmp_path / "ours"):
        assert loaded(folder) == loaded(folder, dtype="auto") == ({theirs}, note)
        assert loaded(folder, dtype=has) == ({has}, [])
        assert loaded(folder, torch_dtype="float16") == ({torch.float16}, [])
