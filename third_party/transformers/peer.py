"""The side of `end_to_end.py` that runs with transformers and torch: makes a checkpoint, and reads ours.

python peer.py make FOLDER TEXTS.json: a random Qwen3 and a tokenizer trained on the texts, saved.
python peer.py logits FOLDER TOKENS.npy OUT.npy: what AutoModelForCausalLM gives for i64[B, T] tokens.
"""

import json
import sys

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make(folder, texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=[END, START, STOP], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(json.load(open(texts)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=STOP, pad_token=END, chat_template=CHAT_TEMPLATE, model_max_length=2048
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast) + 24,  # as in the published models: more rows than the tokenizer has ids
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.08,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    print(f"{folder}: Qwen3, {sum(p.numel() for p in Qwen3ForCausalLM(config).parameters()):,} parameters, bfloat16")


def logits(folder, tokens, out):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        np.save(out, model(torch.from_numpy(np.load(tokens))).logits.numpy())


if __name__ == "__main__":
    {"make": make, "logits": logits}[sys.argv[1]](*sys.argv[2:])
