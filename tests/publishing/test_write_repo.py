"""One folder through every door that writes a repo: each says the same of it, and forgets nothing."""

import json
import shutil

import pytest
import torch

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.reshaped import convert_reshaped
from blockformer.files import side_files
from blockformer.publishing.repo_code import EXTRA_CODE

from ..conversion.oracles import edit_config, edit_tensors, entries_of, official_folder
from ..conversion.test_convert_faults import a_hub_with

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def reshaped(src, dst, **options):
    """All layers are kept, so that the same is written."""
    return convert_reshaped(src, dst, layers=[0, 1], **options)


def way_back(src, dst, **options):
    return convert(src, dst, to_official=True, verify=False, **options)


def from_memory(src, dst, **options):
    return blockformer.export_model(from_official(src), dst, **options)


OF_OURS = {"export": export_folder, "reshape": reshaped}
ALL = {**OF_OURS, "convert": way_back, "export_model": from_memory}


@pytest.fixture
def ours(tmp_path):
    official_folder(tmp_path / "src", "llama")
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    return tmp_path / "ours"


def refusals(doors, src, folder, **options):
    """What each door says, which leaves nothing behind."""
    said = set()
    for name, door in doors.items():
        with pytest.raises(ConversionError) as refused:
            door(src, folder / "out" / name, **options)
        said.add(str(refused.value))
        assert not (folder / "out").exists()
    return said


@pytest.mark.parametrize("door", ["convert", *OF_OURS])
def test_report_and_card_name_what_is_not_carried(tmp_path, ours, door):
    src = tmp_path / "src" if door == "convert" else ours
    (src / "weights.onnx").write_bytes(b"x")
    doors = {"convert": lambda src, dst: convert(src, dst, verify=False), **OF_OURS}
    report = doors[door](src, tmp_path / "dst")
    assert report.left_out["the model in another format"] == ["weights.onnx"]
    assert "`weights.onnx`" in (tmp_path / "dst/README.md").read_text()
    assert not report.has_tokenizer


def test_reports_count_what_was_written(tmp_path, ours):
    found = [door(ours, tmp_path / name) for name, door in OF_OURS.items()]
    assert len({(each.tensors, each.nbytes, *each.dtypes) for each in found}) == 1
    assert found[0].seconds > 0


@pytest.mark.parametrize("door", ["convert", *OF_OURS])
def test_the_last_step_is_told(tmp_path, ours, door):
    steps = []
    {**OF_OURS, "convert": way_back}[door](ours, tmp_path / "dst", progress=lambda step, *_: steps.append(step))
    assert steps[-1] == "putting the folder into place"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"force": "no"}, "force must be True or False, not 'no'"),
        ({"max_shard_size": "5 apples"}, "max_shard_size '5 apples': needs a size such as"),
    ],
)
def test_options_are_judged_alike(tmp_path, ours, options, message):
    (said,) = refusals(ALL, ours, tmp_path, **options)
    assert said.startswith(message)


def test_sizes_that_one_door_takes_all_take(tmp_path, ours):
    for name, door in ALL.items():
        door(ours, tmp_path / name, max_shard_size="0.1 MiB")
        assert len(list((tmp_path / name).glob("model-*-of-*.safetensors"))) > 1


def test_values_that_are_not_finite_are_told_alike(tmp_path, ours):
    edit_tensors(ours, lambda all_: {**all_, "model.norm.weight": all_["model.norm.weight"].fill_(float("nan"))})
    count = entries_of(ours)["hidden_size"]
    line = f"'model.norm.weight': {count} of {count} in float32"
    for name, door in OF_OURS.items():
        (note,) = [each for each in door(ours, tmp_path / name).notes if "NaN" in each]
        assert note.endswith(line)
    with pytest.warns(UserWarning, match=f"NaN or infinite values .*\n.*{line}"):
        from_memory(ours, tmp_path / "saved")
    (said,) = refusals(OF_OURS, ours, tmp_path, strict_finite=True)
    assert said == f"{ours}: NaN or infinite values:\n  {line}"


def test_weights_that_a_library_has_quantized_are_refused_alike(tmp_path, ours):
    edit_config(ours, quantization_config=BITSANDBYTES)
    edit_tensors(ours, **{"model.layers.0.self_attn.q_proj.weight.absmax": torch.zeros(4, dtype=torch.uint8)})
    (said,) = refusals({**OF_OURS, "convert": way_back}, ours, tmp_path)
    assert "quantized by 'bitsandbytes', which only loading reads" in said


def test_a_tokenizer_whose_copy_gives_other_ids_is_refused_alike(tmp_path, tiny_tokenizer, monkeypatch):
    official_folder(tmp_path / "src", "llama", tokenizer=tiny_tokenizer)
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    for name, door in OF_OURS.items():
        assert "tokenizers give the same ids" in door(tmp_path / "ours", tmp_path / name).notes
    monkeypatch.setattr(side_files, "rewritten", lambda settings, original: ({**settings, "model_max_length": 5}, []))
    (said,) = refusals(OF_OURS, tmp_path / "ours", tmp_path)
    assert "differs from the source's in lengths and sides" in said


def test_cards_name_the_repo_that_was_read(tmp_path, ours, monkeypatch):
    a_hub_with(monkeypatch, ours)
    for name, door in OF_OURS.items():
        door("somebody/model", tmp_path / name)
        assert "base_model: somebody/model" in (tmp_path / name / "README.md").read_text()


def test_code_of_the_release_stays_with_the_model(tmp_path, ours):
    ((name, path),) = EXTRA_CODE.items()
    (ours / name).parent.mkdir()
    shutil.copyfile(path, ours / name)
    for door, write in OF_OURS.items():
        write(ours, tmp_path / door)
        assert (tmp_path / door / name).read_bytes() == path.read_bytes()


def test_the_record_of_an_earlier_conversion_is_carried_as_it_is(tmp_path, ours):
    text = (ours / "conversion.json").read_text()
    (ours / "conversion.json").write_text(json.dumps(json.loads(text)))  # in another form
    export_folder(ours, tmp_path / "exported")
    assert (tmp_path / "exported/conversion.json").read_bytes() == (ours / "conversion.json").read_bytes()
    convert_reshaped(ours, tmp_path / "reshaped", layers=[0])
    assert not (tmp_path / "reshaped/conversion.json").exists()
