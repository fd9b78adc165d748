"""Llama and its near relatives: Mistral, SmolLM, Qwen2 and Qwen3.

They are one model with small switches: biases and sliding windows come from config.json, and Qwen3
normalises each query and key head before turning it. The residual stream is carried beside the
hidden states, so that each addition is fused with the norm that follows it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from nanoserve.config.arch import ModelArch
from nanoserve.forward import AttentionBackend, AttentionShape, ForwardBatch
from nanoserve.layers.activation import SiluAndMul
from nanoserve.layers.attention import Attention
from nanoserve.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanoserve.layers.group import ParallelGroup, SingleRank
from nanoserve.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from nanoserve.layers.norm import RMSNorm
from nanoserve.layers.ops import get_op
from nanoserve.layers.rotary import RotaryEmbedding
from nanoserve.layers.weights import fill_slots

CosSin = tuple[torch.Tensor, torch.Tensor]


class LlamaAttention(nn.Module):
    """Project to heads, turn queries and keys by their positions, attend, project back."""

    def __init__(
        self,
        arch: ModelArch,
        layer: int,
        backend: AttentionBackend,
        group: ParallelGroup,
        qk_norm: bool,
    ) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        self.qkv_proj = QKVParallelLinear(
            arch.hidden_size,
            arch.head_dim,
            arch.num_heads,
            arch.num_kv_heads,
            bias=arch.qkv_bias,
            group=group,
        )
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        self.o_proj = RowParallelLinear(
            arch.num_heads * arch.head_dim, arch.hidden_size, bias=arch.o_bias, group=group
        )
        self.q_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps) if qk_norm else None
        self.rotate = get_op("rotary_embedding")
        shape = AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=arch.head_dim,
            scale=arch.head_dim**-0.5,
            sliding_window=arch.sliding_window[layer] if arch.sliding_window else None,
        )
        self.attn = Attention(shape, layer, backend)

    def forward(
        self,
        hidden: torch.Tensor,
        cos_sin: CosSin,
        kv_caches: Sequence[torch.Tensor],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        heads = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        query_key, value = heads.split(
            (self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = query_key.split((self.num_heads, self.num_kv_heads), dim=1)
            query_key = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        # Queries and keys are turned together, as one tensor of more heads.
        query_key = self.rotate(query_key, *cos_sin)
        query, key = query_key.split((self.num_heads, self.num_kv_heads), dim=1)
        attended = self.attn(query, key, value, kv_caches, batch)
        return self.o_proj(attended.view(len(hidden), -1))


class LlamaMLP(nn.Module):
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, arch: ModelArch, group: ParallelGroup) -> None:
        super().__init__()
        self.gate_up_proj = GateUpParallelLinear(
            arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias, group=group
        )
        self.act = SiluAndMul(arch.hidden_act)
        self.down_proj = RowParallelLinear(
            arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias, group=group
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down_proj(self.act(self.gate_up_proj(hidden)))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream."""

    def __init__(
        self,
        arch: ModelArch,
        layer: int,
        backend: AttentionBackend,
        group: ParallelGroup,
        qk_norm: bool,
    ) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(arch, layer, backend, group, qk_norm)
        self.mlp = LlamaMLP(arch, group)
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        cos_sin: CosSin,
        kv_caches: Sequence[torch.Tensor],
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer.

        Args:
            hidden: the layer before's output, not yet added; None in the first layer.
            residual: [num_tokens, hidden]; changed in place.

        Returns:
            (this layer's output, not yet added to the residual; the residual).
        """
        if hidden is None:
            hidden = self.input_layernorm(residual)
        else:
            hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        hidden = self.self_attn(hidden, cos_sin, kv_caches, batch)
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(nn.Module):
    """Embedding, the decoder layers, and the last norm."""

    def __init__(
        self, arch: ModelArch, backend: AttentionBackend, group: ParallelGroup, qk_norm: bool
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, arch.hidden_size, group)
        self.rotary = RotaryEmbedding(arch)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(arch, layer, backend, group, qk_norm)
            for layer in range(arch.num_layers)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """One step's tokens to their last hidden states, [num_tokens, hidden]."""
        residual = self.embed_tokens(batch.input_ids)
        cos_sin = self.rotary(batch.positions)
        hidden: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos_sin, kv_caches, batch)
        assert hidden is not None
        return self.norm.add_and_norm(hidden, residual)[0]


class LlamaForCausalLM(nn.Module):
    """The whole model, and the surface every model class here has.

    Args:
        arch: what config.json says.
        backend: the attention backend all layers share.
        group: the ranks its weights are split over.

    Attributes:
        ignored_weights: checkpoint tensors that carry nothing this model needs, by name's ending.
    """

    qk_norm = False

    def __init__(
        self, arch: ModelArch, backend: AttentionBackend, group: ParallelGroup | None = None
    ) -> None:
        super().__init__()
        group = group or SingleRank()
        self.model = LlamaModel(arch, backend, group, self.qk_norm)
        tied = self.model.embed_tokens if arch.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(arch.vocab_size, arch.hidden_size, group, tied)
        self.ignored_weights = ["rotary_emb.inv_freq"]
        if arch.tie_word_embeddings:
            self.ignored_weights.append("lm_head.weight")

    @property
    def attention_layers(self) -> list[Attention]:
        """The attention layers, in layer order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """One step's tokens to their last hidden states, [num_tokens, hidden]."""
        return self.model(batch, kv_caches)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size]."""
        return self.lm_head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every weight from (checkpoint name, tensor) pairs.

        Raises:
            ModelLoadError: a weight is missing, unexpected, or of the wrong shape.
        """
        fill_slots(self, weights, self.ignored_weights)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3: each query and key head is RMS-normalised before it is turned."""

    qk_norm = True
