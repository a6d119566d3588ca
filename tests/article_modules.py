"""Plain modules by the formulas of the articles, with the names that the articles' code gives to its tensors.

The oracle of the conversions: nothing of Blockformer and nothing of transformers is in them. Evaluation only.
B batch, T query length, S key length, H heads, D head size, C width.
"""

import math

import torch
from torch import nn

LATER = {  # a causal mask as a buffer, in the forms in which it is met
    "upper": lambda n: torch.ones(n, n).triu(1),
    "upper bool": lambda n: torch.ones(n, n).triu(1).bool(),
    "lower": lambda n: torch.ones(n, n).tril()[None, None],
    "infinite": lambda n: torch.full((n, n), -torch.inf).triu(1),
}


def shake(module, scale=0.4):
    """Random weights that are large, so that outputs differ from token to token; norms around 1."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        is_gain = parameter.dim() == 1 and not name.endswith(("bias", "beta", "shift"))
        fresh = torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else scale)
        parameter.data = 1 + fresh if is_gain else fresh
    return module.eval()


def attend(query, key, value, heads, hidden=None):
    """softmax(Q K^T / sqrt(D)) V for each head; `hidden` is True, [B or 1, 1, T or 1, S], where a key is not seen."""
    q, k, v = (states.unflatten(-1, (heads, -1)).transpose(1, 2) for states in (query, key, value))  # [B, H, T, D]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -1e9)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def future(length):
    return torch.ones(length, length).triu(1).bool()[None, None]


def sinusoid(length, width):
    """PE(pos, 2i) = sin(pos / 10000^(2i/C)), PE(pos, 2i+1) = cos(the same): [1, length, C]."""
    table = torch.zeros(length, width)
    position, even = torch.arange(length)[:, None], torch.arange(0, width, 2)
    table[:, 0::2] = torch.sin(position / 10000 ** (even / width))
    table[:, 1::2] = torch.cos(position / 10000 ** (even / width))
    return table[None]


# The second article: a GPT.


class GPTAttention(nn.Module):
    def __init__(self, cfg, names, out_bias, mask):
        super().__init__()
        self.names, self.heads = names, cfg["n_heads"]
        for index, name in enumerate(names):
            bias = out_bias if index == 3 else cfg["qkv_bias"]
            setattr(self, name, nn.Linear(cfg["embedding_dim"], cfg["embedding_dim"], bias=bias))
        if mask:
            self.register_buffer("mask", LATER[mask](cfg["max_seq_length"]))

    def forward(self, x):
        q, k, v, out = (getattr(self, name) for name in self.names)
        return out(attend(q(x), k(x), v(x), self.heads, future(x.shape[1])))


class GPTBlock(nn.Module):
    def __init__(self, cfg, *attention):
        super().__init__()
        width = cfg["embedding_dim"]
        self.mha = GPTAttention(cfg, *attention)
        self.ffn = nn.Module()
        self.ffn.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.mha(self.norm_1(x))
        return x + self.ffn.layers(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, cfg, names=("W_query", "W_key", "W_value", "out_proj"), out_bias=True, mask="upper"):
        super().__init__()
        width = cfg["embedding_dim"]
        self.token_embedding = nn.Embedding(cfg["vocab_size"], width)
        self.position_embedding = nn.Embedding(cfg["max_seq_length"], width)
        self.transformer_blocks = nn.Sequential(*(GPTBlock(cfg, names, out_bias, mask) for _ in range(cfg["n_layers"])))
        self.layer_norm = nn.LayerNorm(width)
        self.out_head = nn.Linear(width, cfg["vocab_size"], bias=False)
        shake(self)

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        return self.out_head(self.layer_norm(self.transformer_blocks(x)))


# The third article: an encoder-decoder with a norm before each sub-layer.


class OwnNorm(nn.Module):
    """gain (x - mean) / (s + 1e-6) + shift with the unbiased deviation, or / sqrt(variance + 1e-5)."""

    names, size, unbiased = ("alpha", "bias"), None, True

    def __init__(self, width):
        super().__init__()
        self.register_parameter(self.names[0], nn.Parameter(torch.ones(self.size or width)))
        self.register_parameter(self.names[1], nn.Parameter(torch.zeros(self.size or width)))

    def forward(self, x):
        gain, shift = (getattr(self, name) for name in self.names)
        variance = x.var(-1, keepdim=True, unbiased=self.unbiased)
        deviation = variance.sqrt() + 1e-6 if self.unbiased else (variance + 1e-5).sqrt()
        return gain * (x - x.mean(-1, keepdim=True)) / deviation + shift


def own_norm(gain, shift, size, unbiased):
    """A class of norms; `size` 1 has one number for all features."""
    return type("OwnNorm", (OwnNorm,), {"names": (gain, shift), "size": size, "unbiased": unbiased})


class PreNormAttention(nn.Module):
    def __init__(self, cfg, bias, out_bias):
        super().__init__()
        self.heads = cfg["h"]
        for name in "qkvo":
            linear = nn.Linear(cfg["d_model"], cfg["d_model"], bias=out_bias if name == "o" else bias)
            setattr(self, f"w_{name}", linear)

    def forward(self, query, states, hidden):
        return self.w_o(attend(self.w_q(query), self.w_k(states), self.w_v(states), self.heads, hidden))


class PreNormLayer(nn.Module):
    def __init__(self, cfg, norm, bias, out_bias, mlp_bias, cross):
        super().__init__()
        self.self_attention_block = PreNormAttention(cfg, bias, out_bias)
        if cross:
            self.cross_attention_block = PreNormAttention(cfg, bias, out_bias)
        self.feed_forward_block = nn.Module()
        self.feed_forward_block.linear_1 = nn.Linear(cfg["d_model"], cfg["d_ff"], bias=mlp_bias)
        self.feed_forward_block.linear_2 = nn.Linear(cfg["d_ff"], cfg["d_model"], bias=mlp_bias)
        self.residual_connections = nn.ModuleList(nn.Module() for _ in range(3 if cross else 2))
        for connection in self.residual_connections:
            connection.norm = norm(cfg["d_model"])

    def forward(self, x, hidden, source=None, source_hidden=None):
        norms = [connection.norm for connection in self.residual_connections]
        states = norms[0](x)
        x = x + self.self_attention_block(states, states, hidden)
        if source is not None:
            x = x + self.cross_attention_block(norms[1](x), source, source_hidden)
        ffn = self.feed_forward_block
        return x + ffn.linear_2(torch.relu(ffn.linear_1(norms[-1](x))))


class Stack(nn.Module):
    def __init__(self, layers, norm):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(self, x, *more):
        for layer in self.layers:
            x = layer(x, *more)
        return self.norm(x)


def child(name, module):
    """A module that holds another under a name."""
    parent = nn.Module()
    parent.add_module(name, module)
    return parent


class EncoderDecoder(nn.Module):
    def __init__(
        self, cfg, alpha=True, bias=False, out_bias=False, mlp_bias=True, head_bias=True, norm_bias=True, norm=None
    ):
        super().__init__()
        self.width = width = cfg["d_model"]
        norm = norm or (OwnNorm if alpha else lambda width: nn.LayerNorm(width, bias=norm_bias))
        for name, cross in (("encoder", False), ("decoder", True)):
            layers = [PreNormLayer(cfg, norm, bias, out_bias, mlp_bias, cross) for _ in range(cfg["N"])]
            setattr(self, name, Stack(layers, norm(width)))
        for side in ("src", "tgt"):
            setattr(self, f"{side}_embed", child("embedding", nn.Embedding(cfg[f"{side}_vocab_size"], width)))
            positions = nn.Module()
            positions.register_buffer("pe", sinusoid(cfg[f"{side}_seq_len"], width))
            setattr(self, f"{side}_pos", positions)
        self.projection_layer = child("proj", nn.Linear(width, cfg["tgt_vocab_size"], bias=head_bias))
        shake(self, 0.3)

    def embed(self, side, tokens):
        table = getattr(self, f"{side}_embed").embedding
        return table(tokens) * math.sqrt(self.width) + getattr(self, f"{side}_pos").pe[:, : tokens.shape[1]]

    def forward(self, source, target, mask=None, target_mask=None):
        hidden = None if mask is None else (mask == 0)[:, None, None]
        later = future(target.shape[1])
        if target_mask is not None:
            later = later | (target_mask == 0)[:, None, None]
        states = self.encoder(self.embed("src", source), hidden)
        return self.projection_layer.proj(self.decoder(self.embed("tgt", target), later, states, hidden))


# The fourth article: `Transformer`, by its formula x + f(norm(x)) at every sub-layer; `printed` has the norms where its
# code has them: norm(x) + f(norm(x)) around attention and, in the decoder, around the feed-forward network.


class ListedAttention(nn.Module):
    def __init__(self, cfg, buffer):
        super().__init__()
        width, bias, self.heads = cfg["n_embd"], cfg["bias"], cfg["n_head"]
        self.c_attns = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(3))
        self.c_proj = nn.Linear(width, width, bias=bias)
        if buffer:
            self.register_buffer("bias", LATER["lower"](cfg["block_size"]))

    def forward(self, query, states, hidden):
        q, k, v = (linear(x) for linear, x in zip(self.c_attns, (query, states, states), strict=True))
        return self.c_proj(attend(q, k, v, self.heads, hidden))


class FourthLayer(nn.Module):
    def __init__(self, cfg, buffer, cross, printed):
        super().__init__()
        width, bias, self.cross, self.printed = cfg["n_embd"], cfg["bias"], cross, printed
        for name in ("ln_1", "ln_2", "ln_3") if cross else ("ln1", "ln2"):
            setattr(self, name, nn.LayerNorm(width, bias=bias))
        for name in ("m_attn", "attn") if cross else ("attn",):
            setattr(self, name, ListedAttention(cfg, buffer))
        self.mlp = nn.Module()
        self.mlp.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.mlp.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x, hidden, source=None, source_hidden=None):
        def step(x, norm, sublayer, printed):
            states = norm(x)
            return (states if printed else x) + sublayer(states)

        def feed_forward(x):
            return self.mlp.c_proj(torch.relu(self.mlp.c_fc(x)))

        if self.cross:
            x = step(x, self.ln_1, lambda x: self.m_attn(x, x, hidden), self.printed)
            x = step(x, self.ln_2, lambda x: self.attn(x, source, source_hidden), self.printed)
            return step(x, self.ln_3, feed_forward, self.printed)
        x = step(x, self.ln1, lambda x: self.attn(x, x, hidden), self.printed)
        return step(x, self.ln2, feed_forward, False)


class Transformer(nn.Module):
    def __init__(self, cfg, buffer=False, printed=False):
        super().__init__()
        width = cfg["n_embd"]
        stacks = {
            name: Stack(
                [FourthLayer(cfg, buffer, name == "decoder", printed) for _ in range(cfg["n_layer"])],
                nn.LayerNorm(width, bias=cfg["bias"]),
            )
            for name in ("encoder", "decoder")
        }
        positions = nn.Module()
        positions.register_buffer("pe", sinusoid(cfg["block_size"], width))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(cfg["vocab_size"], width), "wpe": positions, **stacks})
        self.lm_head = nn.Linear(width, cfg["vocab_size"], bias=False)
        shake(self, 0.15 if printed else 0.3)

    def forward(self, source, target, mask=None, target_mask=None):
        hidden = None if mask is None else (mask == 0)[:, None, None]
        later = future(target.shape[1])
        if target_mask is not None:
            later = later | (target_mask == 0)[:, None, None]
        parts = self.transformer
        source, target = (parts["wte"](x) + parts["wpe"].pe[:, : x.shape[1]] for x in (source, target))
        return self.lm_head(parts["decoder"](target, later, parts["encoder"](source, hidden), hidden))
