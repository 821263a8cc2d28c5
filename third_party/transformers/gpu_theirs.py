"""The peer's side of gpu_benchmark.py: torch and transformers, eager and compiled."""

import pathlib
import platform
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))

import torch
import torch_model
import transformers
from gpu_benchmark import decode_seconds, seconds_of, serve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak():
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None


def built(shape):
    """The model in float32, made on the device: on the host it takes a quarter of a minute."""
    with torch.device(DEVICE):
        return torch_model.build(shape)


def make_decodes(shape, task):
    """{variant: decode}; `decode(new)` draws so many tokens for each row, from the whole distribution."""
    policy = built(shape).to(torch.bfloat16).eval()
    prompts = torch.randint(1, shape["vocab"], (task["rows"], task["prompt"]), device=DEVICE)
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True, pad_token_id=0)
    # With a static cache generate compiles its step, on a GPU unasked, by CUDA graphs (mode reduce-overhead).
    compiling = transformers.CompileConfig()
    compiling._compile_all_devices = True
    more = dict(eager={}, compiled=dict(cache_implementation="static", compile_config=compiling))

    def decode(new, variant):
        with torch.inference_mode():
            lengths = dict(max_new_tokens=new, min_new_tokens=new)
            mask = torch.ones_like(prompts)
            policy.generate(prompts, attention_mask=mask, **settings, **lengths, **more[variant])
        wait()

    return {variant: lambda new, variant=variant: decode(new, variant) for variant in more}


def make_updates(shape, task):
    """{variant: update}; `update()` learns once, in bfloat16 by autocast, from rows of one length."""
    model = built(shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows, length = task["rows"], task["columns"]
    tokens = torch.randint(0, shape["vocab"], (rows, length), device=DEVICE)
    advantage = torch.randn(rows, 1, device=DEVICE)
    trained = length - task["prompt"]

    def loss(tokens, advantage):
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(tokens, logits_to_keep=trained + 1).logits[:, :-1]
        targets = tokens[:, -trained:].flatten()
        logp = -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
        ratio = torch.exp(logp - logp.detach()).view(-1, trained)
        return -(ratio * advantage).sum() / (rows * trained)

    def update(loss):
        for part in range(0, rows, task["microbatch_rows"]):
            some = slice(part, part + task["microbatch_rows"])
            loss(tokens[some], advantage[some]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait()

    losses = dict(eager=loss, compiled=torch.compile(loss))
    return {variant: lambda one=one: update(one) for variant, one in losses.items()}


def build(work, shape, task) -> dict:
    """Steps of a work by name, each () -> the reply."""
    if work.startswith("decode"):
        runs = {
            variant: lambda run=run: decode_seconds(run, task) for variant, run in make_decodes(shape, task).items()
        }
    else:
        runs = {variant: lambda run=run: seconds_of(run) for variant, run in make_updates(shape, task).items()}

    def reply(run):
        if DEVICE == "cuda":  # each variant's own peak; what the other has left is given back
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return dict(seconds=run(), peak=peak())

    return {variant: lambda run=run: reply(run) for variant, run in runs.items()}


def versions():
    cuda = {"cuda": torch.version.cuda} if DEVICE == "cuda" else {}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    } | cuda


if __name__ == "__main__":
    if sys.argv[1] == "versions":
        serve(lambda *_: dict(versions=lambda: dict(versions=versions())))
    else:
        serve(build)
