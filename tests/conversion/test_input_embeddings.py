"""The embedding module of every family: what it looks up, and what a model makes of vectors in its place."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from pairs import assert_close

import blockformer
from blockformer.conversion.families.registry import FAMILIES

from .oracles import official_model
from .rows import Row, model_of
from .test_decoder_families import FIRST as DECODERS
from .test_decoder_families import SIZES as DECODER_SIZES
from .test_encoder_decoder_families import FIRST as ENCODER_DECODERS
from .test_encoder_decoder_families import LIKE_BART
from .test_encoder_families import FIRST as ENCODERS
from .test_encoder_families import SIZES as ENCODER_SIZES
from .test_gemma_embeddings import second
from .test_privacy_filter import filter_model
from .test_t5gemma2 import whole_model

IN_EMBEDDING = {name for name, family in FAMILIES.items() if family.settings.scales_in_embedding}
TOKENS_ONLY = {"falcon_h1", "fsmt", "gemma4_text", "marian"}
"""Their layers read the tokens too, or what they look up is scaled and nothing else; FSMT's is not causal without."""


def theirs_of(family):
    """A small official model, its token vectors scaled where its class can do so in the embedding."""
    scales = {"scale_embedding": True} if family in IN_EMBEDDING else {}
    if family in DECODERS:
        return model_of(DECODERS[family], DECODER_SIZES | scales)
    if family in ENCODERS:
        head = next(head for head in FAMILIES[family].heads if head.writes_text)
        return model_of(ENCODERS[family], ENCODER_SIZES, head, **({"is_decoder": True} if head.is_decoder else {}))
    if family in ENCODER_DECODERS:
        return model_of(ENCODER_DECODERS[family], LIKE_BART, **scales)
    if family.endswith("-decoder"):
        return model_of(Row(family), LIKE_BART, **scales)
    return official_model(family, **scales)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*the official router draws experts at random", "ignore:.*stay there, and")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedding_and_vectors_in_its_place(family, tmp_path):
    """The module's output in float32 and bfloat16, and the numbers that follow from vectors that it has not made."""
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("older classes of some families scale elsewhere")
    others = {
        "embedding_gemma2_text": lambda: second(tmp_path),
        "t5gemma2": whole_model,
        "openai_privacy_filter": filter_model,
    }
    theirs = others[family]() if family in others else theirs_of(family)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    ids = torch.arange(5, 21)[None]
    vectors = [model.get_input_embeddings()(ids) for model in (ours, theirs)]
    assert torch.equal(*vectors)
    halves = [copy.deepcopy(model.get_input_embeddings()).bfloat16() for model in (ours, theirs)]
    assert torch.equal(*(embedding(ids) for embedding in halves))
    if family in TOKENS_ONLY:
        return
    inputs = {"inputs_embeds": vectors[0] + torch.rand(vectors[0].shape)}
    if theirs.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :7]
    assert_close(*(model(**inputs)[0] for model in (ours, theirs)))
