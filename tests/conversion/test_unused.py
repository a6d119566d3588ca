"""Settings that an official class makes nothing of: the note names these and no others."""

import pytest

from blockformer.conversion.families.registry import FAMILIES
from blockformer.conversion.families.unused import without_effect

USED = [
    ("modernbert", {"global_rope_theta": 50.0}),
    ("modernbert", {"global_rope_theta": 160000.0}),  # which the class takes anyway
    ("modernbert", {"local_rope_theta": None}),
    ("modernbert", {"global_attn_every_n_layers": 2}),
    ("gemma3_text", {"rope_local_base_freq": 50.0}),
    ("gemma3_text", {"sliding_window_pattern": 6}),
    ("bert", {"num_labels": 50}),
    ("bert", {"num_labels": 2}),
    ("llama", {"rope_theta": 5e5}),
]


@pytest.mark.parametrize(("name", "entries"), USED)
def test_an_entry_under_an_older_name_is_used(name, entries):
    config = {"model_type": name, "strange": 3, **entries}
    assert FAMILIES[name].settings.unused(config) == ["strange"]
    assert "'strange'" in FAMILIES[name].settings.unused_note(config)[0]


def test_thousands_of_entries_take_a_few_builds():
    family, built = FAMILIES["bert"], []

    def build(entries):
        built.append(entries)
        return family.settings.official_config(entries)

    entries = {f"strange_{index}": index for index in range(3000)} | {"num_labels": 7}
    left = without_effect(build, entries, list(entries))
    assert len(left) == 3000
    assert "num_labels" not in left
    assert len(built) < 60
