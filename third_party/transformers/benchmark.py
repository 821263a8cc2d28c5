"""Generation: rpg_jax beside `transformers`' generate.

python third_party/transformers/benchmark.py --peer_python=VENV/bin/python
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))

import interleave
import torch_model


def generation(shape, task):
    import torch

    model = torch_model.build(shape).eval()
    prompts = torch.randint(1, shape["vocab"], (task["rows"], task["prompt"]))
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True, pad_token_id=0)
    settings |= dict(max_new_tokens=task["new"], min_new_tokens=task["new"])

    def step():
        with torch.inference_mode():
            out = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
        assert out.shape == (task["rows"], task["prompt"] + task["new"])

    return step


if __name__ == "__main__":
    interleave.main(__file__, "transformers", {"generation": generation})
