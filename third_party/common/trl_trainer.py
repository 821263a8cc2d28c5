"""trl's `GRPOTrainer` around a small random model, a vocabulary of numbers and a rule reward."""

import tempfile

import torch_model


def build(shape, *, rows, samples, prompt, new, peer_rows=None, **settings):
    """A trainer of `rows` rows a step, whose loss takes `peer_rows` at a time (all, if unset) and accumulates."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {"[PAD]": 0, "[EOS]": 1} | {str(i): i for i in range(2, shape["vocab"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]")
    prompts = torch.randint(2, shape["vocab"], (rows // samples, prompt), generator=torch.manual_seed(0))
    dataset = Dataset.from_dict({"prompt": [" ".join(map(str, row)) for row in prompts.tolist()]})
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=peer_rows or rows,
        gradient_accumulation_steps=rows // (peer_rows or rows),
        num_generations=samples,
        max_completion_length=new,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate=1e-6,
        max_grad_norm=1.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **{"beta": 0.0, "loss_type": "grpo", **settings},
    )
    trainer = GRPOTrainer(torch_model.build(shape), even_share, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.model.train()
    return trainer


def even_share(completions, **_):
    """The rule reward: share of even numbers among the tokens."""
    shares = []
    for text in completions:
        numbers = [int(word) for word in text.split() if word.isdigit()]
        shares.append(sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1))
    return shares


def endless(trainer, task):
    """Batches of prompts, each repeated for its samples, as the trainer's own data loader yields them."""
    while True:
        yield from trainer.get_train_dataloader()


def apply(trainer):
    """The optimizer's step from the gradients that are there."""
    import torch

    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
