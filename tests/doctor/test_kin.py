"""Which family a checkpoint without a config is of, by the names of its tensors, also of unusual models."""

import pytest

from blockformer.doctor.kin import kin

from ..conversion.oracles import stored
from ..conversion.rows import model_of
from ..conversion.test_decoder_families import ROWS, SIZES
from ..conversion.test_t5gemma2 import whole_model

# Other norms, experts where the usual model has none, layers in another order.
VARIED = ("falcon", "granitemoehybrid", "nemotron_h", "hunyuan_v1_moe")


@pytest.mark.parametrize("row", [pytest.param(row, id=row.family) for row in ROWS if row.family in VARIED])
def test_other_models_than_the_usual_one(tmp_path, row):
    model_of(row, SIZES).save_pretrained(tmp_path)
    assert (row.family, 1) in kin([*stored(tmp_path)])


def test_more_experts_than_the_usual_model_has():
    names = [
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight" for layer in (0, 40) for expert in (0, 99)
    ]
    assert "mixtral" in [family for family, share in kin([*names, "model.layers.0.block_sparse_moe.gate.weight"])]


def test_a_vision_tower_next_to_the_text(tmp_path):
    whole_model().save_pretrained(tmp_path)
    assert kin([*stored(tmp_path)]) == [("t5gemma2", 1)]
