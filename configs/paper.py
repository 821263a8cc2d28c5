"""The paper's experiments (arXiv 2505.17508, Tables 3 and 5 to 8), as variants MODEL,OBJECTIVE,CONTEXT[,OPTION...].

    python -m configs.paper    # every published run, its command, its tables and its best scores
    python -m rpg_jax.prepare --source=dapo-math-17k.parquet --target=data/dapo-math-17k    # and each held-out set
    python -m rpg_jax.train --config=configs/paper.py:qwen3-4b,rpg-reinforce-urkl,8k --workdir=runs/urkl-8k

MODEL      qwen3-4b, qwen2.5-7b: in checkpoints/Qwen3-4B and checkpoints/Qwen2.5-7B-Instruct
OBJECTIVE  grpo, dapo, reinforce++, reinforce++-baseline, rpg-{fkl,rkl,ufkl,urkl}, rpg-reinforce-{fkl,rkl,ufkl,urkl}
CONTEXT    2k, 4k, 8k: most tokens of a response
OPTION     adamw (default), schedule-free; clip-0.1, clip-0.2 (default of grpo), clip-0.2-0.28 (default of the others);
           iterative reference (default), fixed (default of grpo); minerva-olympiad: evaluates on those two as well;
           as-released: dapo and rpg as the authors' public code runs them, in place of what the paper prints

As released: the public code never calls its implementation of Algorithm 2. Its actor runs PPO's dual clip, and the
scripts of RPG-REINFORCE switch the KL loss off and give the KL in the reward a coefficient of zero. So as released,
rpg-reinforce-fkl, -rkl, -ufkl and -urkl are one algorithm: DAPO without division by the deviation, at a learning rate
of 5e-7. These scripts are for 7B models; those of the 4B runs are not public, and what ran there cannot be told here.
docs/paper.md lists the differences; third_party/rpg/parity.py holds our objectives against the authors' functions.

Hardware: 8 GPUs of 80 GB, as in the paper; docs/devices.md has TPUs, and the slots and pages of more memory. Expect the
mean@32 that `python -m configs.paper` prints; for qwen3-4b,rpg-reinforce-urkl,8k a best of 0.578 on AIME24, 0.521 on
AIME25 and 0.947 on AMC23 in 400 steps.

Where the sources differ or are silent:
* GRPO clips at (0.2, 0.2) in the paper's section 5 and the released scripts, as here, at (0.1, 0.1) in its Appendix H.
* Learning rates are Appendix H's 1e-6. The released 7B scripts run RPG-REINFORCE at 5e-7 with either optimizer, and
  all else at 1e-6 with either. Here RPG-REINFORCE takes 5e-7 as released, and on the 7B with schedule-free, which only
  the scripts describe.
* verl's scheduler steps once a rollout: its 10 warm-up steps are 160 updates.
* c = 10 and at most 20 generation batches are the scripts'. Their overlong buffer at 2K is a quarter of the response;
  that share is taken at every context. GRPO has neither this buffer nor dynamic sampling. verl bounds negative
  advantages by c in every loss; GRPO, DAPO and REINFORCE++ are without it here, as published.
* REINFORCE++ has its KL in the reward here, which is zero with an iterative reference, and REINFORCE++-Baseline has k2
  in its loss. The scripts of both add k1 to the loss, whose expected gradient is zero on policy.
* Tables 5 and 7 are the same runs on other benchmarks.
"""

import csv
import difflib
import itertools
import pathlib
from typing import NamedTuple

from configs import base
from rpg_jax import InputError

MODELS = {"qwen3-4b": "Qwen3-4B", "qwen2.5-7b": "Qwen2.5-7B-Instruct"}
CONTEXTS = {"2k": 2048, "4k": 4096, "8k": 8192}  # tokens of a response
SLOTS = {"2k": 1536, "4k": 1024, "8k": 512}  # responses decoded at a time
CACHE_PAGES = 16384  # of 128 tokens: 39 GB on each of 8 GPUs for qwen3-4b; python -m rpg_jax.plan says what others hold
BENCHMARKS = {"AIME24": "data/aime24", "AIME25": "data/aime25", "AMC23": "data/amc23"}
MORE_BENCHMARKS = {"MinervaMath": "data/minerva", "OlympiadBench": "data/olympiadbench"}
OBJECTIVES = {
    "grpo": dict(name="grpo", beta=1e-3, reduction="token_mean"),
    "dapo": dict(name="dapo"),
    "reinforce++": dict(name="reinforce_pp", beta=1e-4),
    "reinforce++-baseline": dict(name="reinforce_pp_baseline", beta=1e-4),
}
for _divergence, (_method, _form) in itertools.product(
    ("fkl", "rkl", "ufkl", "urkl"),
    {
        "rpg": dict(estimator="differentiable", clip="dual"),
        "rpg-reinforce": dict(estimator="reinforce", clip="rpg"),
    }.items(),
):
    OBJECTIVES[f"{_method}-{_divergence}"] = dict(name="rpg", divergence=_divergence, beta=1e-4, clip_c=10.0, **_form)
OPTIMIZERS = {"adamw": "adamw", "schedule-free": "schedule_free_adamw"}
CLIPS = {"clip-0.1": (0.1, 0.1), "clip-0.2": (0.2, 0.2), "clip-0.2-0.28": (0.2, 0.28)}
# For --config.reward.function=math_verify or FILE.py:NAME; the paper's own rule runs without workers. A generation
# batch is 24,576 responses, and hosts of eight GPUs or four TPUs have 100 cores and more, of which 32 leave most to
# JAX. sympy takes seconds and gigabytes over some of the expressions that a long response may end with.
REWARD_LIMITS = dict(workers=32, max_failures=0.1)
PARTS = {"model": MODELS, "objective": OBJECTIVES, "context": CONTEXTS}
OPTIONS = {
    "optimizer": tuple(OPTIMIZERS),
    "clip": tuple(CLIPS),
    "reference": ("iterative", "fixed"),
    "benchmarks": ("minerva-olympiad",),
    "source": ("as-released",),
}
# The actor of the released code: PPO's dual clip at c = 10 on the reward, and the KL, where there is one, beside it.
RELEASED = dict(name="rpg", clip="dual_reward", clip_c=10.0, estimator="differentiable")
RELEASED_ADVANTAGES = {"dapo": "group_mean_std"}  # RPG's is the group mean, without a deviation


class Variant(NamedTuple):
    """A variant with every option resolved."""

    model: str
    objective: str
    context: str
    optimizer: str
    clip: str
    reference: str
    benchmarks: str | None
    source: str | None

    @property
    def has_kl(self) -> bool:
        """Whether its objective has a KL term: as released, RPG-REINFORCE has none."""
        return self.objective != "dapo" and not (self.source and self.objective.startswith("rpg-reinforce"))

    @property
    def heldout(self) -> dict:
        """Benchmark -> prepared set."""
        return BENCHMARKS | MORE_BENCHMARKS if self.benchmarks else BENCHMARKS


class Score(NamedTuple):
    """A row of the paper: mean@32 at step 400 and the best of its evaluations."""

    table: int
    model: str
    context: str
    method: str
    benchmark: str
    last: float
    best: float
    note: str

    @property
    def variant(self) -> str:
        """The variant that the row stands for, whatever it evaluates on."""
        model = next(name for name, checkpoint in MODELS.items() if checkpoint == self.model)
        return f"{model},{self.method.lower()},{self.context}"


def _known(kind, word, known):
    if word not in known:
        nearest = difflib.get_close_matches(word, known, 1, cutoff=0.0)[0]
        raise InputError(
            f"unknown {kind} {word!r} of configs/paper.py; the nearest is {nearest!r}, known are: {', '.join(known)}"
        )
    return word


def parse(variant: str) -> Variant:
    """Resolves MODEL,OBJECTIVE,CONTEXT[,OPTION...]; ValueError names what is wrong and the nearest that is not."""
    words = [word.strip() for word in variant.split(",")]
    for word, (kind, known) in zip(words if variant else (), PARTS.items(), strict=False):
        _known(kind, word, known)
    if len(words) < len(PARTS):
        raise InputError(
            f"variant {variant!r} of configs/paper.py: expected MODEL,OBJECTIVE,CONTEXT[,OPTION...] such as "
            f"qwen3-4b,rpg-reinforce-urkl,8k; `python -m configs.paper` lists them"
        )
    kinds, given = {word: kind for kind, words in OPTIONS.items() for word in words}, {}
    for word in words[len(PARTS) :]:
        kind = kinds[_known("option", word, kinds)]
        if kind in given:
            raise InputError(f"{given[kind]!r} and {word!r} of configs/paper.py:{variant} exclude each other; give one")
        given[kind] = word
    model, objective, context = words[: len(PARTS)]
    grpo = objective == "grpo"
    own = dict(optimizer="adamw", clip="clip-0.2" if grpo else "clip-0.2-0.28", benchmarks=None, source=None)
    own["reference"] = "fixed" if grpo else "iterative"
    run = Variant(model, objective, context, **(own | given))
    if run.source and objective not in ("dapo", *(name for name in OBJECTIVES if name.startswith("rpg-"))):
        raise InputError(
            f"'as-released' of configs/paper.py:{variant} is for dapo and rpg objectives: of {objective} the scripts "
            "differ by what docs/paper.md says and no setting here expresses; drop it"
        )
    if "reference" in given and not run.has_kl:
        reason = f"{objective} has no KL" + (" as released" if run.source else "")
        raise InputError(f"{run.reference!r} of configs/paper.py:{variant} cannot matter: {reason}; drop it")
    return run


def scores() -> list[Score]:
    """The published scores, row by row."""
    with open(pathlib.Path(__file__).with_name("published_scores.csv"), newline="") as file:
        rows = [Score(**row) for row in csv.DictReader(file)]
    return [row._replace(table=int(row.table), last=float(row.last), best=float(row.best)) for row in rows]


def published(variant: str) -> list[Score]:
    """What the paper has for a variant, on the benchmarks that the variant evaluates; empty if it is not there."""
    asked = parse(variant)
    run = asked._replace(benchmarks=None)
    return [row for row in scores() if row.benchmark in asked.heldout and parse(row.variant) == run]


def get_config(variant=""):
    run = parse(variant)
    response = CONTEXTS[run.context]
    rollout = dict(
        prompts=512, samples=16, max_prompt=2048, max_new=response, slots=SLOTS[run.context], cache_pages=CACHE_PAGES
    )
    if run.objective != "grpo":
        rollout |= dict(dynamic_sampling=True, oversample=3.0, max_batches=20, overlong_buffer=response // 4)
    clip_low, clip_high = CLIPS[run.clip]
    reinforce = run.objective.startswith("rpg-reinforce")
    half_rate = reinforce and (run.source or (run.model, run.optimizer) == ("qwen2.5-7b", "schedule-free"))
    objective = OBJECTIVES[run.objective]
    if run.source:
        objective = RELEASED | dict(beta=objective["beta"] if run.has_kl else 0.0)
        objective |= dict(divergence=OBJECTIVES[run.objective]["divergence"]) if run.has_kl else {}
        objective |= dict(advantage=RELEASED_ADVANTAGES.get(run.objective, "group_mean"))
    return base.get_config(
        base.prepared_sets(train="data/dapo-math-17k", heldout=tuple(run.heldout.values()), overlong="drop"),
        steps=400,
        model=dict(checkpoint=f"checkpoints/{MODELS[run.model]}"),
        rollout=rollout,
        reward=REWARD_LIMITS,
        objective=dict(objective, clip_low=clip_low, clip_high=clip_high),
        reference=dict(mode=run.reference),
        # Log-probs alone need little memory, and every pass gathers all weights: more rows at a time than in updates.
        learner=dict(minibatch_prompts=32, microbatch_rows=16, scoring_rows=64, logprob_chunk=1024, pack=True),
        optimizer=dict(
            name=OPTIMIZERS[run.optimizer],
            learning_rate=5e-7 if half_rate else 1e-6,
            warmup_steps=160,
            weight_decay=0.1,
        ),
        evaluation=dict(every=10, k=32),
        checkpoint=dict(every=20),
    )


def listing() -> str:
    """Every published run: the end of its command, its tables, and its best scores."""
    rows = scores()
    variants = dict.fromkeys(row.variant for row in rows)
    columns = BENCHMARKS | MORE_BENCHMARKS
    lines = [("--config=", "tables", *columns)]
    for variant in variants:
        found = published(f"{variant},minerva-olympiad")
        best = {row.benchmark: f"{row.best:.4f}" for row in found}
        tables = ", ".join(map(str, sorted({row.table for row in found})))
        lines.append((f"configs/paper.py:{variant}", tables, *(best.get(name, "-") for name in columns)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    print(__doc__)
    print(listing())
