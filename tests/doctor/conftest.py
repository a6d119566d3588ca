import pytest

from blockformer.conversion import convert

from ..conversion.oracles import official_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the model in the official layout and one in ours."""
    home = tmp_path_factory.mktemp("models")
    official_folder(home / "official", "qwen3", tie_word_embeddings=False)
    convert(home / "official", home / "ours", verify=False)
    return home
