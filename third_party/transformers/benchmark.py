"""Generation: rpg_jax beside `transformers`' generate.

python third_party/transformers/benchmark.py --peer_python=VENV/bin/python
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))

import interleave
import torch_model


def generation(shape, task):
    """Waves of `rows` responses: a batch is generated until its longest response is complete."""
    import torch

    model = torch_model.build(shape).eval()
    lengths, rows = interleave.response_lengths(task), task["rows"]
    prompts = torch.randint(1, shape["vocab"], (len(lengths), task["prompt"]))
    waves = [(prompts[i : i + rows], int(lengths[i : i + rows].max())) for i in range(0, len(lengths), rows)]
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True, pad_token_id=0)

    def step():
        for wave, longest in waves:
            limits = dict(max_new_tokens=longest, min_new_tokens=longest)
            with torch.inference_mode():
                out = model.generate(wave, attention_mask=torch.ones_like(wave), **settings, **limits)
            assert out.shape == (len(wave), task["prompt"] + longest)

    return step


if __name__ == "__main__":
    interleave.main(__file__, "transformers", {"generation": generation, "long_tails": generation})
