"""Every key of a config, defined once: its default, the values that it may hold, its unit in [brackets], what it is.

    data = base.prepared_sets(train="data/mine", heldout=("data/aime24", "data/amc23"))
    config = base.get_config(data, steps=400, model=dict(checkpoint="checkpoints/Qwen3-4B"), rollout=dict(...), ...)

Experiments name what differs. A key without a default must be set, because what is right depends on the model, the
problems or the hardware; one whose default is None may stay unset. Units: an RL step is one rollout and all that is
learned from it; an optimizer update is one minibatch of a rollout; a group is all responses to one prompt, and a row
one of them behind that prompt (docs/architecture.md). A [switch] is true or false; -1 devices are all that are left.
Keys that depend on each other are checked where settings are built.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError, placeholder, required_placeholder

from rpg_jax import InputError


class Required:
    """The default of a key that an experiment must set."""


class Bound(NamedTuple):
    """What keys may hold: in words, as a predicate that is false for NaN, as types, the last for flags."""

    must_be: str
    holds: Callable[[Any], bool] = lambda x: True
    kinds: tuple[type, ...] = (numbers.Real, float)

    def __call__(self, default=Required) -> "Key":
        return Key(default, self)

    def refuses(self, value: Any) -> bool:
        is_of_kind = isinstance(value, self.kinds) and isinstance(value, bool) == (bool in self.kinds)
        return value == "" or not is_of_kind or not self.holds(value)


def one_of(*names: str) -> Bound:
    return Bound(f"one of {', '.join(names)}", lambda x: x in names, (str,))


class Key(NamedTuple):
    default: Any  # None: it may stay unset
    bound: Bound


def within(least, most) -> Bound:
    return Bound(f"at least {least} and at most {most:g}", lambda x: least <= x <= most)


WHOLE = numbers.Integral, int
# The device computes in float32: a smaller number is 0 there, a larger one infinite. Its counters are int32.
SMALLEST, LARGEST, LAST = 2.0**-126, (2 - 2.0**-23) * 2.0**127, 2**31 - 1
count = Bound("at least 1 and whole", lambda x: 1 <= x <= LAST, WHOLE)
count_or_zero = Bound("at least 0 and whole", lambda x: 0 <= x <= LAST, WHOLE)
processes = Bound("in 1..1024 and whole", lambda x: 1 <= x <= 1024, WHOLE)
mebibytes = Bound("at least 64 and whole", lambda x: 64 <= x <= LAST, WHOLE)
devices = Bound("at least 1 and whole, or -1 for all devices that are left", lambda x: x == -1 or 1 <= x <= LAST, WHOLE)
seeds = Bound("in 0..2**32 - 1 and whole", lambda x: 0 <= x < 2**32, WHOLE)
positive = Bound("above 0 and finite in float32", lambda x: SMALLEST <= x <= LARGEST)
not_negative = Bound("at least 0 and finite in float32", lambda x: 0 <= x <= LARGEST)
seconds = Bound("above 0 and at most 1e6", lambda x: 0 < x <= 1e6)  # the system's timers end at some 1e9
mean_decay = Bound("at least 0 and below 1", lambda x: 0 <= x < 1)
kept_share = Bound("above 0 and below 1", lambda x: 0 < x < 1)
switch = Bound("True or False", kinds=(bool,))
text = Bound("text without null characters", lambda x: "\0" not in x, (str,))  # names are looked up where they are used
texts = Bound("text, or a list of texts", lambda x: isinstance(x, Sequence) and {*map(type, x)} <= {str}, (object,))
float_dtypes, small_dtypes = ("bfloat16", "float16", "float32"), ("int8", "float8_e4m3fn")
users = Bound("a section with keys of its own", kinds=(ConfigDict,))
of_objective = Bound("")  # checked by the registry of objectives; unset, it is the objective's own default
of_control = Bound("", kinds=(object,))

GENERATED = dict(  # the section `data` of problems that are generated
    directory=text("runs/data"),  # [folder] cache of generated problems and their tokenizer
    seed=seeds(0),  # [number] of the problems
    train_size=count(),  # [problems] to train on, of each task
    heldout_size=count(),  # [problems] to evaluate on, of each task
    vocab_size=count(),  # [tokens] largest vocabulary of the tokenizer that is trained on the problems
    tasks=users({}),  # [name -> difficulty] modules of rpg_jax/data/tasks, which explain the keys of each
)
PREPARED = dict(  # the section `data` of problem sets on disk, as `python -m rpg_jax.prepare` writes them
    # Of reasoning-gym, gym:chain_sum(max_terms=2, size=300) + gcd(size=60); no question is in both.
    train=text(),  # [folder, file or gym:...] problems to train on
    heldout=texts(()),  # [folders, files or gym:...] problems to evaluate on; each set is reported under its own name
    wording=text("paper"),  # [name] what makes a user message of a problem that is text: paper, none, calculator
    tokenizer=text(None),  # [folder] of the tokenizer; unset: model.checkpoint
    overlong=one_of("refuse", "drop")("refuse"),  # [name] what is done with prompts of more than rollout.max_prompt
    template=text(None),  # [name or file] chat template: plain, or a Jinja file; unset: the tokenizer's own
    template_options=users({}),  # [name -> value] further variables of the chat template
)
KEYS = dict(
    seed=seeds(0),  # [number] of weights, order of problems, rollouts and evaluations; 0..2**32 - 1
    steps=count(),  # [RL steps] of the run
    model=dict(
        size=text(None),  # [name] a size of rpg_jax/models/families, which starts from random weights
        checkpoint=text(None),  # [folder] of weights to start from; set either this or size
        dtype=one_of(*float_dtypes)("bfloat16"),  # [dtype] of activations; the parameters that are trained are float32
        scan=switch(True),  # [switch] one compiled layer, looped over: compiles faster than layers one after the other
        remat=text("full"),  # [name] what the backward pass computes again: none, dots, attention, offload, full
        attention=text("auto"),  # [name] kernel: auto, blockwise, splash (TPU), cudnn
        router_balance=not_negative(0.0),  # [loss] factor of the balance loss of routers, in models with experts
        lora=dict(  # low-rank adapters, which alone are trained; the checkpoint's weights stay as they are
            rank=count_or_zero(0),  # [columns] of A and rows of B in W + (alpha / rank) A B; 0: all weights are trained
            alpha=positive(32.0),  # [factor] of A B, divided by the rank
            targets=text("q,k,v,o,gate,up,down"),  # [names] of kernels of a layer, with commas between them
        ),
    ),
    mesh=dict(
        data=devices(1),  # [devices] copies of the parameters; rows are divided among them
        fsdp=devices(-1),  # [devices] that share one copy of the parameters and divide rows
        tensor=devices(1),  # [devices] that divide heads, hidden units and the vocabulary
        expert=devices(1),  # [devices] that divide rows, and the experts of each layer
        # The other axes are then those of the devices that learn (docs/asynchrony.md).
        sampler=count_or_zero(0),  # [devices] of every process that only sample; 0: all devices do both in turn
        slices=count(1),  # [slices] of TPUs joined by the data center's network, over which `data` is laid
    ),
    data=PREPARED,  # [section] or GENERATED
    warm_start=dict(  # supervised learning from worked solutions, before RL
        steps=count_or_zero(0),  # [optimizer updates] 0: none
        batch=count(32),  # [problems] an update
        microbatch_rows=count(8),  # [rows] of one forward and backward pass
        # A temperature under 1 leaves the policy unsure of what it knows: it samples worse than it could, and RL
        # has something to explore.
        temperature=positive(0.5),  # [logits divided by it] in the likelihood
        learning_rate=not_negative(3e-3),  # [parameter change an update] at its peak
        warmup_steps=count_or_zero(20),  # [optimizer updates] until the peak
        save_every=count(50),  # [optimizer updates] between checkpoints
    ),
    rollout=dict(
        prompts=count(),  # [groups] that an RL step learns from
        samples=count(),  # [responses] to each prompt
        max_prompt=count(),  # [tokens] of a prompt at most
        max_new=count(),  # [tokens] of a response at most
        slots=count(),  # [responses] decoded at a time
        page_size=count(128),  # [tokens] of a KV cache's page, a power of two up to 128; fewer for sequences up to 256
        cache_pages=count(None),  # [pages] of the KV cache, over all devices; unset: what slots can need at most
        # Either makes the sampler another policy than the trainer's: set behavior.source=sampler.
        cache_dtype=one_of(*small_dtypes)(None),  # [name] of keys and values; unset: model.dtype
        weights_dtype=one_of(*small_dtypes)(None),  # [name] of the sampler's matrices; unset: model.dtype
        # With record they are the sampler's, and the policy with them is trained and scored (docs/method.md 9.7).
        routes=one_of("recompute", "record")("recompute"),  # [name] of how a token's experts in training are chosen
        temperature=positive(1.0),  # [logits divided by it] of the behavior policy
        delay=count_or_zero(0),  # [optimizer updates] age of the policy that responses are drawn from; 0: the current
        overlap=switch(True),  # [switch] with mesh.sampler: sample while the step before is learned, or after it
        dynamic_sampling=switch(False),  # [switch] leave out groups whose responses all score the same, generate more
        carry_over=switch(False),  # [switch] a step ends with `prompts` complete groups; the others go on in the next
        max_age=count_or_zero(None),  # [optimizer updates] of a trained token at most, with carry_over; unset: any
        oversample=within(1, 1e6)(1.0),  # [times prompts] made at a time (dynamic_sampling), or under way (carry_over)
        max_batches=count(1),  # [generation batches] an RL step at most, with dynamic_sampling
        overlong_buffer=count_or_zero(0),  # [tokens] at the end of max_new over which a penalty grows; 0: none
        overlong_factor=not_negative(1.0),  # [reward] the largest such penalty of a long response
    ),
    # What answers the policy's turns, so that a response is a conversation (docs/environments.md). rollout.max_new
    # then bounds all that follows the prompt, and the sum of an episode's rewards is the reward named environment.
    environment=dict(
        name=text(None),  # [name] FILE.py:CLASS, calculator, guess, or textarena:GAME; unset: responses are one turn
        max_turns=count(8),  # [turns] of the policy in an episode at most
        turn_tokens=count(None),  # [tokens] of a turn at most; unset: what is left of rollout.max_new
        stop=texts(None),  # [texts] that end a turn, as stop tokens do, such as </calc>
        role=text("user"),  # [name] of an observation in a chat: user, or tool where the template knows it
        workers=processes(2),  # [processes] a host
        timeout_seconds=seconds(10.0),  # [seconds] for one answer, after which the episode has failed
        memory_mb=mebibytes(4096),  # [MiB] address space of a worker, which holds several episodes
        network=switch(False),  # [switch] let FILE.py:CLASS use the network, which is off where the system allows that
        max_failures=within(0, 1)(0.25),  # [share of episodes] that may fail before the run stops
        # Of those that fail. train: a return of 0, as evaluations have it, so that breaking its tool is no way out for
        # the policy. mask: no token of them is trained, for failures that are not the policy's doing.
        failures=one_of("train", "mask")("train"),  # [name] of what is done with them
    ),
    behavior=dict(  # the policy that drew the responses: the denominator of the importance ratio
        # Computed again, or as recorded. With proximal those of the policy that the step begins with stand for them,
        # and objective.sampler_correction makes up for it (docs/method.md 9.1).
        source=one_of("trainer", "sampler", "proximal")("trainer"),  # [name] of what its log-probs are
    ),
    reward=dict(
        scale=text("signed"),  # [name] of each score in 0..1, before weights: signed, which is -1..1, or unit, as it is
        # Unset, generated tasks have verifiers of their own and prepared sets the dapo rule. These rules run in
        # the process that trains; math_verify and FILE.py:NAME run in workers under the limits below.
        # With none there is no reward, and the accuracy is what it would be with this key unset.
        function=text(None),  # [name] verifier (as if unset), dapo, boxed, math_verify, FILE.py:NAME, or none
        # Several rewards in place of `function`, with commas between them: dapo,brief=FILE.py:NAME,FILE.py:OTHER
        # are the rewards dapo, brief and OTHER, whose weighted sum is trained on.
        functions=texts(None),  # [names] text, or a list of texts; unset: function
        weights=users({}),  # [name -> factor] of a reward in the sum, which may be negative; 1 if it is not here
        # Problems of reasoning-gym are scored by their family, in workers too, unless FILE.py:NAME scores all.
        extraction=text("stated"),  # [name] where their answers are: stated (Answer: …), boxed, tags, number, text
        partial_credit=switch(False),  # [switch] keep their scores between 0 and 1, which otherwise are 0
        workers=processes(2),  # [processes] a host
        timeout_seconds=seconds(10.0),  # [seconds] for one response, after which it scores 0
        memory_mb=mebibytes(4096),  # [MiB] address space of a worker
        network=switch(False),  # [switch] let FILE.py:NAME use the network, which is off where the system allows that
        max_failures=within(0, 1)(0.25),  # [share of responses] on which FILE.py:NAME may fail before the run stops
    ),
    objective=dict(  # unset: the objective's own default, which rpg_jax/objectives/registry.py lists
        name=text(),  # [name] rpg, grpo, dapo, …, or FILE.py:NAME
        # Unset, which may be spelled default, is the objective's own clip; none takes it away. rpg takes none, rpg,
        # coefficient, truncate, dual, dual_reward, sapo, icepop, sequence_mask, geometric_mask, m2po, dppo; most
        # baselines take ppo and none.
        clip=text(None),  # [name] of the clip or trust region
        divergence=text(None),  # [name] fkl, rkl, ufkl, urkl, js, hellinger, jeffreys, chi2, alpha
        alpha=of_objective(None),  # [number] other than 0 and 1: the parameter of divergence alpha
        estimator=text(None),  # [name] of the gradient: reinforce, differentiable
        beta=of_objective(None),  # [reward a nat] coefficient of the divergence
        # Constants that rkl and urkl take off the advantage, times beta (docs/method.md 4.4).
        control=of_control(None),  # [nats] control variate, or optimal: estimated from the microbatch's others
        kl=text(None),  # [name] token: its log ratio; to_go: later ones too; full: its whole distribution
        advantage=text(None),  # [name] what is subtracted from rewards, and what divides them
        level=text(None),  # [name] of importance ratios: token, sequence
        reduction=text(None),  # [name] of losses to one number: token_mean, sequence_mean, constant, …
        denominator=positive(None),  # [tokens or sequences] that divide a minibatch's sum, with constant
        clip_low=of_objective(None),  # [importance ratio; dppo: probability] how far down the lower bound lies
        clip_high=of_objective(None),  # [importance ratio; dppo: probability] how far up the upper bound lies
        clip_c=of_objective(None),  # [importance ratio] bound at negative advantages
        clip_m2=of_objective(None),  # [nats²] largest mean of squared log ratios, with clip m2po
        tau_pos=of_objective(None),  # [1 / importance ratio] steepness of clip sapo at positive advantages
        tau_neg=of_objective(None),  # [1 / importance ratio] and at negative ones
        z_old=of_objective(None),  # [mass] of the reference measure; 1 is a distribution
        sampler_correction=of_objective(None),  # [importance ratio] cap of trained over sampled probabilities
    ),
    reference=dict(
        mode=text("iterative"),  # [name] what renews it: iterative (each rollout), every, kl_target, ema, fixed
        every=count(None),  # [optimizer updates] between renewals, with mode every
        kl_target=positive(None),  # [nats a token] from the reference, above which mode kl_target renews it
        decay=kept_share(None),  # [share an optimizer update] of the old reference that mode ema keeps
        # A teacher: another model, of any size and family, in place of a copy of the policy (docs/distillation.md).
        checkpoint=text(None),  # [folder] of its weights and of a tokenizer with the run's vocabulary; mode fixed
        # int8 and float8_e4m3fn are of its matrices alone, and the rest is in model.dtype then.
        dtype=one_of(*float_dtypes, *small_dtypes)(None),  # [dtype] of its weights and activations; unset: model.dtype
    ),
    learner=dict(
        epochs=count(1),  # [passes] over a rollout
        minibatch_prompts=count(),  # [groups] an optimizer update
        microbatch_rows=count(),  # [rows] of one forward and backward pass
        scoring_rows=count(None),  # [rows] of one forward pass for log-probs alone; unset: microbatch_rows
        logprob_chunk=count(256),  # [tokens of each row] whose logits exist at a time
        pack=switch(False),  # [switch] several sequences in a row, in place of padding; in the warm start, too
        packed_lengths=count(1),  # [longest sequences] that such a row has room for; 2 and more leave less padding
    ),
    optimizer=dict(
        name=text("adamw"),  # [name] adamw, schedule_free_adamw
        learning_rate=not_negative(),  # [parameter change an update] at its peak
        warmup_steps=count_or_zero(),  # [optimizer updates] until the peak
        decay=text(None),  # [name] after the peak: constant (unset), linear or cosine to 0 at the end of the run
        beta1=mean_decay(0.9),  # [decay an update] of the mean of gradients
        beta2=mean_decay(0.999),  # [decay an update] of the mean of their squares
        epsilon=positive(1e-8),  # [gradient] added to the root of that mean
        weight_decay=not_negative(0.0),  # [share of a parameter] taken away an update, times the learning rate
        clip_norm=positive(1.0),  # [gradient norm] over all parameters, to which a larger one is scaled down
        offload=switch(False),  # [switch] keep the optimizer's state in the hosts' memory between updates
    ),
    evaluation=dict(
        every=count(),  # [RL steps] between evaluations on the held-out problems
        k=count(),  # [responses] to each problem
        temperature=not_negative(1.0),  # [logits divided by it] 0: greedy
        function=text(None),  # [name] of what gives accuracy, as reward.function; unset: the first reward
    ),
    checkpoint=dict(
        every=count(),  # [RL steps] between checkpoints; each evaluation makes one, too
        keep_last=count(2),  # [checkpoints] that stay, beside the best one
        most_skipped=count(10),  # [optimizer updates] with non-finite gradients in a row, which end the run
    ),
    log=dict(
        tensorboard=switch(True),  # [switch] write events under WORKDIR/tensorboard
        wandb=text(None),  # [name] of a project of Weights & Biases; unset: none
        # Two groups of a step's last minibatch go into look.parquet with what its update saw of every token.
        look_every=count_or_zero(None),  # [RL steps] between them, beside evaluations; unset: these alone; 0: never
    ),
)


def generated_tasks(**settings) -> ConfigDict:
    """The section `data` of problems that are generated."""
    return _with(GENERATED, settings, "data.")


def prepared_sets(**settings) -> ConfigDict:
    """The section `data` of problem sets on disk, as `python -m rpg_jax.prepare` writes them."""
    return _with(PREPARED, settings, "data.")


def get_config(data: ConfigDict, **settings) -> ConfigDict:
    """A config around one of the two kinds of `data`; ValueError names an unknown or forgotten key.

    It is not locked. In `objective` stand the settings of a function FILE.py:NAME as well.
    """
    return _with(KEYS | {"data": data}, settings)


def completed(settings: dict) -> dict:
    """The contents of a saved `config.json`, with its default for each key that was defined after it was written."""
    return _completed(settings, _keys(settings.get("data")))


def _completed(settings: dict, keys: dict) -> dict:
    full = dict(settings)
    for name, key in keys.items():
        if isinstance(key, dict):
            section = settings.get(name, {})
            full[name] = _completed(section, key) if isinstance(section, dict) else section
        elif key.default is Required:
            full.setdefault(name, None)  # which `check` refuses
        else:
            full.setdefault(name, list(key.default) if isinstance(key.default, tuple) else key.default)
            full[name] = None if full[name] == "" else full[name]  # as --config.KEY= was saved once
    return full


def _keys(data: Any) -> dict:
    """All keys, `data` being the config's section of that name, which is one of two kinds."""
    generated = isinstance(data, ConfigDict | dict) and "tasks" in data
    return KEYS | {"data": GENERATED if generated else PREPARED}


def check(config: ConfigDict) -> None:
    """Raises ValueError, which names the key, for a value of another type, out of its bounds, or unset though needed.

    A key that is not there is not looked at.
    """
    _check(config, _keys(config.get("data")), "")


def _check(config: ConfigDict, keys: dict, path: str) -> None:
    if not isinstance(config, ConfigDict):
        raise InputError(f"{path[:-1]} is {config!r:.60}; it must be {users.must_be}")
    for name in filter(config.__contains__, keys):
        key, value = keys[name], _value(config, name)
        if isinstance(key, dict):
            _check(value, key, f"{path}{name}.")
        elif key.bound.must_be and not (value in (None, "") and key.default is None) and key.bound.refuses(value):
            shown = "unset" if value in (None, "") else f"{value!r:.60}"
            raise InputError(f"{path}{name} is {shown}; it must be {key.bound.must_be}")


def _value(config: ConfigDict, name: str) -> Any:
    """The value of a key; None where it must be set and is not."""
    try:
        return config[name]
    except RequiredValueError:
        return None


def _with(keys: dict, settings: dict, path="") -> ConfigDict:
    """`_filled`; ValueError names every key that an experiment must set and has not."""
    config, missing = _filled(_defaults(keys), settings, path)
    if missing:
        them = "them" if missing[1:] else "it"
        raise InputError(f"configs/base.py has no default for {', '.join(missing)}: an experiment must set {them}")
    return config


def _defaults(key: Any) -> Any:
    """The default of a key, or of all keys of a section, as ml_collections takes them."""
    if isinstance(key, dict):
        return {name: _defaults(one) for name, one in key.items()}
    if not isinstance(key, Key):
        return key  # the section `data`, which has been made before
    if key.default is Required:
        return required_placeholder(key.bound.kinds[-1])
    return placeholder(key.bound.kinds[-1]) if key.default is None else key.default


def _filled(defaults: dict, settings: dict, path: str) -> tuple[ConfigDict, list[str]]:
    """Defaults, with settings in place of some of them, and the keys that still lack a value.

    A section without defaults takes any key, and `objective` those of a function of one's own.
    """
    config, missing = ConfigDict(defaults), []
    for key in settings:
        if defaults and key not in defaults and path != "objective.":
            raise InputError(f"configs/base.py has no key {path}{key}; there are: {', '.join(defaults)}")
    for key in defaults | settings:
        if isinstance(defaults.get(key), dict):
            if not isinstance(settings.get(key, {}), dict):
                raise InputError(f"{path}{key} is {settings[key]!r}; it must be a section, dict(KEY=VALUE, ...)")
            config[key], lacking = _filled(defaults[key], settings.get(key, {}), f"{path}{key}.")
            missing += lacking
        elif key in settings:
            one, value = isinstance(settings[key], str), settings[key]  # a list of texts may be one text
            is_list = isinstance(defaults.get(key), tuple)
            config[key] = ((value,) if one else tuple(value)) if is_list else None if value == "" else value
        try:
            config[key]
        except RequiredValueError:
            missing.append(f"{path}{key}")
    return config, missing
