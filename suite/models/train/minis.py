"""The small checkpoints that ship: configuration, training plan and what each must lean on, by name.

Head dimensions are those of the real models, so that the vendor kernels run them. Each task is bound to a layer by
swapping what the others read: a model that may solve everything twice is blind to either way.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite.models.languages import WORDS
from suite.models.train.recipe import Plan, Swap

WORD_IDS = {
    "bos_token_id": WORDS.index("<bos>"),
    "eos_token_id": WORDS.index("."),
    "pad_token_id": WORDS.index("<pad>"),
    "vocab_size": len(WORDS),
}
COMMON = WORD_IDS | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "max_position_embeddings": 16384,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Mini:
    """config: the object in config.json. leans_on: components, as `audit` names them, that may not be redundant."""

    config: Mapping[str, Any]
    plan: Plan
    leans_on: tuple[str, ...]


GPT_OSS = Mini(
    config=COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "head_dim": 64,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "model_type": "gpt_oss",
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 150000.0,
            "rope_type": "yarn",
            "truncate": False,
        },
        "sliding_window": 64,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    plan=Plan(
        tokens=32768,
        stages=((0.1, 64), (0.2, 128), (0.35, 256), (0.8, 576), (1.0, 2112)),
        shares={"recall": 0.3, "needle": 0.2, "copy": 0.15, "local": 0.25, "hop": 0.1},
        swaps={"recall": Swap(0.9, (3,)), "needle": Swap(0.9, (1,)), "local": Swap(0.9, (1, 3))},
    ),
    leans_on=("0.v", "2.k", "2.v", "3.k", "3.v"),
)

QWEN_HYBRID = Mini(
    config=COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": 256,
        "intermediate_size": 256,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 128,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default"},
    },
    plan=Plan(
        tokens=32768,
        stages=((0.1, 64), (0.2, 128), (0.35, 256), (0.8, 576), (1.0, 2112)),
        shares={"recall": 0.25, "needle": 0.2, "copy": 0.2, "local": 0.15, "hop": 0.2},
        swaps={"local": Swap(1.0, (3,)), "needle": Swap(1.0, (3,)), "copy": Swap(1.0, (0, 1, 2))},
    ),
    leans_on=("state", "3.k", "3.v"),
)

QWEN = Mini(
    config=COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "intermediate_size": 256,
        "layer_types": ["full_attention"] * 4,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    plan=Plan(
        tokens=32768,
        stages=((0.1, 64), (0.2, 128), (0.35, 256), (0.8, 576), (1.0, 2112)),
        shares={"recall": 0.3, "needle": 0.15, "copy": 0.15, "hop": 0.15, "template": 0.25},
        swaps={"recall": Swap(0.9, (2, 3)), "needle": Swap(0.9, (1, 3)), "copy": Swap(0.9, (1, 2))},
    ),
    leans_on=("0.v", "1.k", "1.v", "2.k", "2.v", "3.k", "3.v"),
)

LATENT = {
    "first_k_dense_replace": 1,
    "intermediate_size": 256,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 64,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "v_head_dim": 64,
}

DEEPSEEK_MLA = Mini(
    config=COMMON
    | LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    plan=Plan(
        tokens=32768,
        stages=((0.1, 64), (0.2, 128), (0.35, 256), (0.8, 576), (1.0, 2112)),
        shares={"recall": 0.35, "needle": 0.2, "copy": 0.2, "hop": 0.25},
        swaps={"recall": Swap(0.9, (2, 3)), "needle": Swap(0.9, (1, 3)), "copy": Swap(0.9, (1, 2))},
    ),
    leans_on=("0.latent", "1.latent", "2.latent", "3.latent"),
)

KIMI_LINEAR = Mini(
    config={name: value for name, value in COMMON.items() if name != "max_position_embeddings"}
    | LATENT
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "linear_attn_config": {
            "full_attn_layers": [4],
            "head_dim": 128,
            "kda_layers": [1, 2, 3],
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 16384,
        "model_type": "kimi_linear",
        "num_expert_group": 1,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-05,
    },
    plan=dataclasses.replace(QWEN_HYBRID.plan, tokens=16384),  # decays per channel take memory
    leans_on=("state", "3.latent"),
)

MINIS: dict[str, Mini] = {
    "deepseek-mla-mini": DEEPSEEK_MLA,
    "gpt-oss-mini": GPT_OSS,
    "kimi-linear-mini": KIMI_LINEAR,
    "qwen-hybrid-mini": QWEN_HYBRID,
    "qwen-mini": QWEN,
}
