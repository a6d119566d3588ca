"""OLMo (Groeneveld et al., 2024), OLMo 2 and OLMo 3 (OLMo team, 2024 and 2025).

OLMo has layer norms without weights, and may clip queries, keys and values. OLMo 2 has norms after the sub-layers, and
one on all queries and on all keys; OLMo 3 has windows, too.
"""

from .fields import HeadDim, WindowByLayer
from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, MLP, OUTPUT_NORMS, Q_AND_K_NORM, LlamaLikeFamily
from .rope import RopeByLayerType

BIASES = {"attention_bias": ALL_ATTENTION_BIASES}
OLMO = LlamaLikeFamily(
    "olmo",
    "Olmo",
    layer={**ATTENTION, **MLP},
    outer={"embed_tokens": "embed_tokens"},
    fields={**BIASES, "rms_norm_eps": None, "clip_qkv": "clip_qkv"},
    head_dim=HeadDim(always=False),
)
OLMO2 = LlamaLikeFamily(
    "olmo2",
    "Olmo2",
    layer={**ATTENTION, **MLP, **OUTPUT_NORMS, **Q_AND_K_NORM},
    fields=BIASES,
    head_dim=HeadDim(always=False),
)
OLMO3 = LlamaLikeFamily(
    "olmo3",
    "Olmo3",
    layer={**ATTENTION, **MLP, **OUTPUT_NORMS, **Q_AND_K_NORM},
    fields=BIASES,
    rope=RopeByLayerType(),
    window=WindowByLayer(by_flag=False),
    head_dim=HeadDim(always=False),
)
