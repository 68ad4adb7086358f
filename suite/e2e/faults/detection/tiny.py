"""Two small random models: one of windows, sinks and experts, one of gated delta nets beside full attention.

Their weights are large enough that attention is sharp, so a single wrong row changes the logits.
"""

import functools

import torch

from suite.models.causal import CausalModel
from suite.models.config import GptOssConfig
from suite.models.gpt_oss import GptOss
from suite.models.hybrid_config import QwenHybridConfig
from suite.models.qwen_hybrid import QwenHybrid

VOCAB, WINDOW = 96, 8
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "swiglu_limit": 7.0,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
}
QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 48,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 512,
}


@functools.cache
def model(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> CausalModel:
    """`window` or `hybrid`, the same weights on every call."""
    with torch.device(device):
        built = (
            GptOss(GptOssConfig.from_hf(GPT_OSS), dtype=dtype, device=device)
            if name == "window"
            else QwenHybrid(QwenHybridConfig.from_hf(QWEN), dtype=dtype, device=device)
        )
    built.requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for key, parameter in sorted(built.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if "norm" in key else noise * (0.3 if parameter.ndim > 1 else 0.5))
    return built.eval()
