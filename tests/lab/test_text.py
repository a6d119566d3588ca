"""An experiment's text: files, a data set, the standard library; own tokenizers and given ones."""

import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from blockformer.data.corpus import CorpusError
from blockformer.data.text_files import TextError
from blockformer.lab.experiment import Data, LabError
from blockformer.lab.experiment_file import read_experiment
from blockformer.lab.text import Text

from .experiments import write_experiment


class Rows:
    """As much of a data set as is read."""

    column_names = ["id", "story"]

    def __getitem__(self, column):
        assert column == "story"
        return ["", *(f"story {number} " * 400 for number in range(40)), "story 0 " * 400]


@pytest.fixture
def datasets(monkeypatch):
    """A package of that name that notes what it is asked for."""
    asked = []
    module = types.ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = lambda **given: asked.append(given) or Rows()
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_a_data_set_is_read_row_by_row_up_to_the_bytes(datasets):
    data = Data(dataset={"path": "stories", "name": "small", "column": "story"}, max_bytes=50_000, held_out_share=0.1)
    corpus = Text(data).corpus
    assert datasets == [{"path": "stories", "name": "small", "split": "train"}]
    assert 50_000 <= corpus.train_bytes + corpus.held_out_bytes < 55_000
    assert len({file.text for file in (*corpus.train, *corpus.held_out)}) == len(corpus.train) + len(corpus.held_out)
    with pytest.raises(LabError, match="no column 'text'; it has id, story"):
        Text(Data(dataset={"path": "stories"}))


def test_without_the_package_a_data_set_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LabError, match="pip install datasets"):
        Text(Data(dataset={"path": "stories"}))


def test_a_given_tokenizer_brings_its_vocabulary(tiny_tokenizer, tmp_path):
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_experiment(tmp_path, data={"tokenizer": str(tmp_path / "tokenizer")}, base={"vocab_size": 300})
    with pytest.raises(LabError, match="vocab_size comes from data: tokenizer"):
        read_experiment(path)
    path.write_text(path.read_text().replace("  vocab_size: 300\n", ""))
    experiment = read_experiment(path)
    config = experiment.runs()[0].config
    assert config.vocab_size == len(tiny_tokenizer)
    assert config.eos_token_id == tiny_tokenizer.eos_token_id
    text = Text(experiment.data)
    held_out = "".join(file.text for file in text.corpus.held_out)
    end = tiny_tokenizer.eos_token
    ids = text.tokens(config.vocab_size).held_out
    assert ids[0] == ids[-1] == tiny_tokenizer.eos_token_id
    assert tiny_tokenizer.decode(ids).replace(end, "") == held_out


def test_the_digest_knows_the_text_and_its_split(tmp_path):
    experiment = read_experiment(write_experiment(tmp_path))
    digest = Text(experiment.data).digest
    assert Text(read_experiment(write_experiment(tmp_path)).data).digest == digest
    other = read_experiment(write_experiment(tmp_path, data={"held_out_share": 0.3})).data
    assert Text(other).digest != digest


def test_too_little_text_is_told(tmp_path):
    experiment = read_experiment(write_experiment(tmp_path, data={"sequence_length": 5000}))
    with pytest.raises(LabError, match="too little text for rows of 5,000 tokens"):
        Text(experiment.data).tokens(300)
    with pytest.raises(LabError, match="fewer than vocab_size \\(40,000\\)"):
        Text(experiment.data).tokens(40_000)
    with pytest.raises(TextError, match="only"):
        Text(Data(files=(str(tmp_path / "tiny.yaml"),)))
    with pytest.raises(CorpusError):
        Text(Data(max_bytes=1000))
