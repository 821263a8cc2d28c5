"""One update, and one whole RL step: rpg_jax beside trl's own GRPOTrainer.

python third_party/trl/benchmark.py --peer_python=VENV/bin/python
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))

import interleave
import trl_trainer


def update(shape, task):
    """`GRPOTrainer`'s loss on given responses, backward, clip at norm 1, AdamW: the fastest of trl's on this CPU is the
    whole batch at once, for a model of 0.85M."""
    import torch

    trainer = trl_trainer.build(shape, **task, samples=8)
    rows, vocab = task["rows"], shape["vocab"]
    batch = {
        "prompt_ids": torch.randint(1, vocab, (rows, task["prompt"])),
        "completion_ids": torch.randint(1, vocab, (rows, task["new"])),
        "prompt_mask": torch.ones(rows, task["prompt"], dtype=torch.long),
        "completion_mask": torch.ones(rows, task["new"], dtype=torch.long),
        "advantages": torch.randn(rows),
        "num_items_in_batch": torch.tensor(rows * task["new"]),
    }

    count = trainer.current_gradient_accumulation_steps  # losses are divided by it
    parts = [
        {key: value.chunk(count)[i] if value.ndim else value for key, value in batch.items()} for i in range(count)
    ]

    def step():
        for part in parts:
            trainer._compute_loss(trainer.model, part).backward()
        trl_trainer.apply(trainer)

    return step


def rl_step(shape, task):
    """Generation, a rule reward and the update, as `GRPOTrainer.training_step` does them from a batch of prompts."""
    trainer = trl_trainer.build(shape, **task)
    batches = trl_trainer.endless(trainer, task)

    def step():
        for _ in range(trainer.current_gradient_accumulation_steps):
            inputs = trainer._prepare_inputs(next(batches))
            trainer.compute_loss(trainer.model, inputs).backward()
            trainer._step += 1
        trl_trainer.apply(trainer)

    return step


if __name__ == "__main__":
    interleave.main(__file__, "trl", {"update": update, "rl_step": rl_step})
