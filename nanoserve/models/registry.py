"""Which class builds which architecture, by the name in config.json's `architectures`.

A class in here is made as `Model(arch, backend, group)` and offers `attention_layers`,
`forward(batch, kv_caches)`, `compute_logits(hidden)` and `load_weights(pairs)`; see
`nanoserve.models.llama.LlamaForCausalLM`. Third parties register theirs from a plugin.
"""

from nanoserve.registry import Registry

MODELS = Registry(
    "architecture",
    {
        "LlamaForCausalLM": "nanoserve.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "nanoserve.models.llama:LlamaForCausalLM",
        "Qwen2ForCausalLM": "nanoserve.models.llama:LlamaForCausalLM",
        "Qwen3ForCausalLM": "nanoserve.models.llama:Qwen3ForCausalLM",
    },
)
