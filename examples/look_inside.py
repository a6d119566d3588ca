"""Look inside a model with TransformerLens: what each attention head is worth to a text.

    pip install transformer-lens
    python examples/look_inside.py my-model "A text that the model continues well."

`my-model` is a repo of a decoder or of a masked language model, of any mix. Each head is taken out by itself; the table
says by how many nats per token the text's loss rises. `bridge` is for your own programs: TransformerLens asks for an
adapter for each architecture, and this one reads a model's modules, so it fits them all.
"""

import argparse
import importlib.util
import sys

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

# TransformerLens's names of a layer's norms: ours in their place.
NORMS = {
    "ln1": ("self_attn_pre_norm", "self_attn_input_norm"),
    "ln1_post": ("self_attn_output_norm", "self_attn_post_norm"),
    "ln2": ("mlp_pre_norm", "mlp_input_norm"),
    "ln2_post": ("mlp_output_norm", "mlp_post_norm"),
}
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
FEED_FORWARD = {"gate": "gate_proj", "in": "up_proj", "out": "down_proj"}


def bridge(model, tokenizer=None):
    """A decoder or a masked language model as TransformerLens's `TransformerBridge`, with its own weights.

    From then on the model belongs to the bridge, with eager attention, whose probabilities the hooks see.
    """
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge import generalized_components as parts
    from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    class Adapter(ArchitectureAdapter):
        """Which module plays which part."""

        # In compatibility mode the weights stay as they are, too: not every norm and residual can be folded.
        supports_fold_ln = supports_center_writing_weights = False

        def prepare_model(self, model):
            """Read the parts off the modules."""
            model.set_attn_implementation("eager")
            config, stack = model.config, model.model
            self.cfg.uses_rms_norm = self.cfg.final_rms = config.norm_type == "rms_norm"
            self.cfg.normalization_type = "RMS" if self.cfg.uses_rms_norm else "LN"
            self.cfg.positional_embedding_type = "rotary" if config.position_type == "rotary" else "standard"
            self.cfg.gated_mlp, self.cfg.attn_only = config.gated_mlp, False
            self.cfg.attention_dir = "causal" if config.is_decoder else "bidirectional"
            self.supports_generation = config.is_decoder
            is_parallel = config.residual in ("parallel", "parallel_shared_norm")
            block = parts.ParallelBlockBridge if is_parallel else parts.BlockBridge
            found = {
                "embed": parts.EmbeddingBridge("model.embed_tokens"),
                "pos_embed": stack.embed_positions and parts.PosEmbedBridge("model.embed_positions"),
                "blocks": block("model.layers", submodules=self.layer_of(stack.layers)),
                "ln_final": stack.norm and self.norm("model.norm"),
                "unembed": parts.UnembeddingBridge("lm_head"),
            }
            self.component_mapping = {name: part for name, part in found.items() if part is not None}

        def layer_of(self, layers):
            """The parts of a layer; a norm may be missing in some."""
            of_attention = {name: parts.LinearBridge(ours) for name, ours in PROJECTIONS.items()}
            of_attention |= {
                name: self.norm(name) for name in ("q_norm", "k_norm") if getattr(layers[0].self_attn, name) is not None
            }
            found = {
                name: self.norm(ours)
                for name, places in NORMS.items()
                for ours in places
                if any(hasattr(layer, ours) for layer in layers)
            }
            found["attn"] = parts.AttentionBridge("self_attn", self.cfg, of_attention)
            if any(hasattr(layer.mlp, "experts") for layer in layers):
                return found | {"mlp": parts.MoEBridge("mlp", self.cfg)}
            linear = {name: parts.LinearBridge(ours) for name, ours in FEED_FORWARD.items()}
            if self.cfg.gated_mlp:
                return found | {"mlp": parts.GatedMLPBridge("mlp", self.cfg, linear)}
            del linear["gate"]
            return found | {"mlp": parts.MLPBridge("mlp", self.cfg, linear)}

        def norm(self, name):
            """A norm that computes as the model's own."""
            return parts.NormalizationBridge(name, self.cfg, use_native_layernorm_autograd=True, optional=True)

    name = type(model).__name__
    ArchitectureAdapterFactory.register_adapter(name, Adapter)
    return build_bridge_from_module(model, name, hf_config=model.config, tokenizer=tokenizer)


@torch.no_grad()
def worth_of_heads(model, tokens, labels) -> torch.Tensor:
    """By how much the loss rises without each head: tokens and labels [1, T] (-100: none) -> [layers, heads]."""

    def loss_without(layer=None, head=None):
        def take_out(heads, hook):  # [1, T, H, D]
            heads[:, :, head] = 0.0
            return heads

        hooks = [] if layer is None else [(f"blocks.{layer}.attn.hook_z", take_out)]
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()

    whole = loss_without()
    counts = range(model.cfg.n_layers), range(model.cfg.n_heads)
    return torch.tensor([[loss_without(layer, head) - whole for head in counts[1]] for layer in counts[0]])


def main(command_line=None) -> None:
    """Load, take out each head, show."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="a folder or Hub id with a repo")
    parser.add_argument("text")
    arguments = parser.parse_args(command_line)
    if importlib.util.find_spec("transformer_lens") is None:
        sys.exit("transformer-lens is not installed: pip install transformer-lens")
    trust = {"trust_remote_code": True}
    config = AutoConfig.from_pretrained(arguments.source, **trust)
    auto_class = AutoModelForCausalLM if config.is_decoder else AutoModelForMaskedLM
    model = auto_class.from_pretrained(arguments.source, **trust)
    tokenizer = AutoTokenizer.from_pretrained(arguments.source, **trust)
    tokens = tokenizer(arguments.text, return_tensors="pt")["input_ids"]
    labels = torch.full_like(tokens, -100)
    if config.is_decoder:
        labels[:, :-1] = tokens[:, 1:]
    elif tokenizer.mask_token_id is None:
        sys.exit("the tokenizer has no mask token, which a masked language model needs.")
    else:
        labels[:, 1::4] = tokens[:, 1::4]  # every fourth token is to be guessed
        tokens[:, 1::4] = tokenizer.mask_token_id
    rises = worth_of_heads(bridge(model), tokens, labels)
    table = Table("layer", *(f"head {head}" for head in range(rises.shape[1])), title="rise of the loss without a head")
    for layer, row in enumerate(rises.tolist()):
        table.add_row(str(layer), *(f"{rise:+.3f}" for rise in row))
    Console().print(table)
    layer, head = divmod(rises.argmax().item(), rises.shape[1])
    Console().print(f"worth most: head {head} of layer {layer}")


if __name__ == "__main__":
    main()
