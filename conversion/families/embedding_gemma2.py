"""The text model of EmbeddingGemma 2 (Gemma team, 2026): layers of Gemma 4 that see a whole text.

Its layers take a projection of the first layer's input, and no vector of the token. Its window is a number of tokens to
each side. It ends in a projection of the states.
"""

from ..rules.table import Rule
from ..values import Computed, RopeByLayerType
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .gemma import SCALE
from .gemma4 import LAYER_INPUTS, STRUCTURE, Heads, last_is_full, strange_layers
from .shared import ATTENTION, FOUR_NORMS, MLP, OUTER, Q_AND_K_NORM, fields_without

FAMILY = Family(
    "embedding_gemma2_text",
    "EmbeddingGemma2TextModel",
    structure={**STRUCTURE, "bidirectional": True, "token_input_table": False},
    names=DecoderNames(
        layer={
            **ATTENTION,
            **Q_AND_K_NORM,
            **MLP,
            **FOUR_NORMS,
            **{f"ple_block.{theirs}": ours for theirs, ours in LAYER_INPUTS.items()},
        },
        outer={
            **OUTER,
            "ple.per_layer_model_projection": "token_inputs.projection",
            "ple.per_layer_projection_norm": "token_inputs.norm",
            "embedding_projection": "final_projection",
        },
        more_rules=lambda config: [Rule("layer_scalar", "end.scale")],
    ),
    settings=DecoderSettings(
        usual=fields_without("num_key_value_heads", "tie_word_embeddings"),
        fields={
            "hidden_size_per_layer_input": "hidden_size_per_layer_input",
            "embedding_dim": "final_projection_size",
        },
        head_dim=Heads(says_shared=False),
        rope=RopeByLayerType(),
        computed=[SCALE, Computed(writer=last_is_full)],
        not_none=["hidden_size_per_layer_input", "final_projection_size"],
        contradictions=strange_layers,
        extra_fields=["per_layer_config", "global_head_dim", "num_global_key_value_heads"],
        reads_whole=False,
    ),
    scales_in_embedding="rounded",
)
