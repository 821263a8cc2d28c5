"""The benchmarks' Qwen3 shapes as `transformers` builds them, randomly initialized in float32."""


def build(shape):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape["vocab"],
            hidden_size=shape["hidden"],
            intermediate_size=shape["mlp"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
