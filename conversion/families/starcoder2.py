"""StarCoder2 (Lozhkov et al., 2024): layer norms, a network without a gate, one window for every layer."""

from .fields import HeadDim, WindowEverywhere
from .llama_like import ALL_BIASES, ATTENTION, NORMS, LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "starcoder2",
    "Starcoder2",
    layer={**ATTENTION, **NORMS, "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
    fields={
        "rms_norm_eps": None,
        "norm_epsilon": "norm_eps",
        "use_bias": ALL_BIASES,
        "residual_dropout": "hidden_dropout",
        "embedding_dropout": "hidden_dropout",
    },
    window=WindowEverywhere(),
    head_dim=HeadDim(always=False),
)
