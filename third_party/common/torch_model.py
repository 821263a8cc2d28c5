"""The benchmarks' shapes as `transformers` builds them, randomly initialized in float32."""


def build(shape):
    import torch
    import transformers

    torch.manual_seed(0)
    family = "Qwen3" if shape.get("qk_norm", True) else "Llama"
    build_config, build_model = (getattr(transformers, family + name) for name in ("Config", "ForCausalLM"))
    return build_model(
        build_config(
            vocab_size=shape["vocab"],
            hidden_size=shape["hidden"],
            intermediate_size=shape["mlp"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            tie_word_embeddings=shape.get("tied", True),
            bos_token_id=None,
            eos_token_id=None,
        )
    )
