"""Every key of a config, defined once: what it is, its unit or kind in [brackets], and its default.

    data = base.prepared_sets(train="data/mine", heldout=("data/aime24", "data/amc23"))
    config = base.get_config(data, steps=400, model=dict(checkpoint="checkpoints/Qwen3-4B"), rollout=dict(...), ...)

Experiments name what differs. A `required` key has no default, because what is right depends on the model, the problems
or the hardware. Units: an RL step is one rollout and all that is learned from it; an optimizer update is one minibatch
of a rollout; a group is all responses to one prompt. A [switch] is true or false; -1 devices are all that are left.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError
from ml_collections.config_dict import placeholder as optional  # None until it is set
from ml_collections.config_dict import required_placeholder as required

from rpg_jax import InputError


def generated_tasks(**settings) -> ConfigDict:
    """The section `data` of problems that are generated."""
    return _with(
        dict(
            directory="runs/data",  # [folder] cache of generated problems and their tokenizer
            seed=0,  # [number] of the problems
            train_size=required(int),  # [problems] to train on, of each task
            heldout_size=required(int),  # [problems] to evaluate on, of each task
            vocab_size=required(int),  # [tokens] largest vocabulary of the tokenizer that is trained on the problems
            tasks=dict(),  # [name -> difficulty] modules of rpg_jax/data/tasks, which explain the keys of each
        ),
        settings,
        "data.",
    )


def prepared_sets(**settings) -> ConfigDict:
    """The section `data` of problem sets on disk, as `python -m rpg_jax.prepare` writes them."""
    return _with(
        dict(
            # Of reasoning-gym, gym:chain_sum(max_terms=2, size=300) + gcd(size=60); no question is in both.
            train=required(str),  # [folder, file or gym:...] problems to train on
            heldout=(),  # [folders, files or gym:...] problems to evaluate on; each set is reported under its own name
            wording="paper",  # [name] what makes a user message of a problem that is text: paper, none
            tokenizer=optional(str),  # [folder] of the tokenizer; unset: model.checkpoint
            overlong="refuse",  # [name] prompts of more than rollout.max_prompt: refuse, drop
            template=optional(str),  # [name or file] chat template: plain, or a Jinja file; unset: the tokenizer's own
            template_options=dict(),  # [name -> value] further variables of the chat template
        ),
        settings,
        "data.",
    )


def get_config(data: ConfigDict, **settings) -> ConfigDict:
    """A config around one of the two kinds of `data`; ValueError names an unknown or forgotten key.

    It is not locked. In `objective` stand the settings of a function FILE.py:NAME as well.
    """
    defaults = dict(
        seed=0,  # [number] of weights, order of problems, rollouts and evaluations; 0..2**32 - 1
        steps=required(int),  # [RL steps] of the run
        model=dict(
            size=optional(str),  # [name] a size of rpg_jax/models/config.py, which starts from random weights
            checkpoint=optional(str),  # [folder] of weights to start from; set either this or size
            dtype="bfloat16",  # [dtype] of activations; the parameters that are trained are float32
            scan=True,  # [switch] one compiled layer, looped over: compiles faster than layers one after the other
            remat="full",  # [name] what the backward pass computes again: none, dots, attention, offload, full
            attention="auto",  # [name] kernel: auto, blockwise, splash (TPU), pallas_gpu, cudnn
            lora=dict(  # low-rank adapters, which alone are trained; the checkpoint's weights stay as they are
                rank=0,  # [columns] of A and rows of B in W + (alpha / rank) A B; 0: all weights are trained
                alpha=32.0,  # [factor] of A B, divided by the rank
                targets="q,k,v,o,gate,up,down",  # [names] of kernels of a layer, with commas between them
            ),
        ),
        mesh=dict(
            data=1,  # [devices] copies of the parameters; rows are divided among them
            fsdp=-1,  # [devices] that share one copy of the parameters and divide rows
            tensor=1,  # [devices] that divide heads, hidden units and the vocabulary
            slices=1,  # [slices] of TPUs joined by the data center's network, over which `data` is laid
        ),
        data=data,
        warm_start=dict(  # supervised learning from worked solutions, before RL
            steps=0,  # [optimizer updates] 0: none
            batch=32,  # [problems] an update
            microbatch_rows=8,  # [rows] of one forward and backward pass
            # A temperature under 1 leaves the policy unsure of what it knows: it samples worse than it could, and RL
            # has something to explore.
            temperature=0.5,  # [logits divided by it] in the likelihood
            learning_rate=3e-3,  # [parameter change an update] at its peak
            warmup_steps=20,  # [optimizer updates] until the peak
            save_every=50,  # [optimizer updates] between checkpoints
        ),
        rollout=dict(
            prompts=required(int),  # [groups] that an RL step learns from
            samples=required(int),  # [responses] to each prompt
            max_prompt=required(int),  # [tokens] of a prompt at most
            max_new=required(int),  # [tokens] of a response at most
            slots=required(int),  # [responses] decoded at a time
            page_size=128,  # [tokens] of a page of the KV cache, a power of two up to 128; less for sequences up to 256
            cache_pages=optional(int),  # [pages] of the KV cache, over all devices; unset: what slots can need at most
            # Either makes the sampler another policy than the trainer's: set behavior.source=sampler.
            cache_dtype=optional(str),  # [name] of keys and values: int8 or float8_e4m3fn; unset: model.dtype
            weights_dtype=optional(str),  # [name] of the sampler's matrices: int8 or float8_e4m3fn; unset: model.dtype
            temperature=1.0,  # [logits divided by it] of the behavior policy
            delay=0,  # [optimizer updates] how old the policy is that responses are drawn from; 0: the current one
            dynamic_sampling=False,  # [switch] leave out groups whose responses all score the same, and generate more
            carry_over=False,  # [switch] a step ends when `prompts` groups are complete; the others go on in the next
            max_age=optional(int),  # [optimizer updates] of a trained token at most, with carry_over; unset: any
            oversample=1.0,  # [multiple of prompts] generated at a time (dynamic_sampling), or under way (carry_over)
            max_batches=1,  # [generation batches] an RL step at most, with dynamic_sampling
            overlong_buffer=0,  # [tokens] at the end of max_new over which the penalty of long responses grows; 0: none
            overlong_factor=1.0,  # [reward] the largest such penalty
        ),
        behavior=dict(  # the policy that drew the responses: the denominator of the importance ratio
            source="trainer",  # [name] of its log-probs: trainer, computed again, or sampler, as recorded when drawn
        ),
        reward=dict(
            scale="signed",  # [name] of each score in 0..1, before weights: signed, which is -1..1, or unit, as it is
            # Unset, generated tasks have verifiers of their own and prepared sets the dapo rule. These rules run in
            # the process that trains; math_verify and FILE.py:NAME run in workers under the limits below.
            function=optional(str),  # [name] verifier (as if unset), dapo, boxed, math_verify, or FILE.py:NAME
            # Several rewards in place of `function`, with commas between them: dapo,brief=FILE.py:NAME,FILE.py:OTHER
            # are the rewards dapo, brief and OTHER, whose weighted sum is trained on.
            functions=optional(object),  # [names] text, or a list of texts; unset: function
            weights=dict(),  # [name -> factor] of a reward in the sum, which may be negative; 1 if it is not here
            # Problems of reasoning-gym are scored by their family, in workers too, unless FILE.py:NAME scores all.
            extraction="stated",  # [name] where their answers are: stated (Answer: …), boxed, tags, number, text
            partial_credit=False,  # [switch] keep their scores between 0 and 1, which otherwise are 0
            workers=2,  # [processes] a host
            timeout_seconds=10.0,  # [seconds] for one response, after which it counts as wrong
            memory_mb=4096,  # [MiB] address space of a worker
            network=False,  # [switch] let FILE.py:NAME use the network, which is off where the system allows that
            max_failures=0.25,  # [share of responses] on which FILE.py:NAME may fail before the run stops
        ),
        objective=dict(  # unset: the objective's own default, which rpg_jax/objectives/registry.py lists
            name=required(str),  # [name] rpg, grpo, dapo, …, or FILE.py:NAME
            # Unset, which may be spelled default, is the objective's own clip; none takes it away. rpg takes none, rpg,
            # coefficient, truncate, dual, dual_reward, sapo, icepop, sequence_mask, geometric_mask, m2po, dppo; most
            # baselines take ppo and none.
            clip=optional(str),  # [name] of the clip or trust region
            divergence=optional(str),  # [name] fkl, rkl, ufkl, urkl, js, hellinger, jeffreys, chi2, alpha
            alpha=optional(float),  # [number] other than 0 and 1: the parameter of divergence alpha
            estimator=optional(str),  # [name] of the gradient: reinforce, differentiable
            beta=optional(float),  # [reward a nat] coefficient of the divergence
            # Constants that rkl and urkl take off the advantage, times beta (docs/method.md 4.4).
            control=optional(object),  # [nats] control variate, or optimal: estimated from the microbatch's others
            kl=optional(str),  # [name] token: its log ratio; to_go: later ones too; full: its whole distribution
            advantage=optional(str),  # [name] what is subtracted from rewards, and what divides them
            level=optional(str),  # [name] of importance ratios: token, sequence
            reduction=optional(str),  # [name] of losses to one number: token_mean, sequence_mean, constant, …
            denominator=optional(float),  # [tokens or sequences] that divide a minibatch's sum, with constant
            clip_low=optional(float),  # [importance ratio; dppo: probability] how far down the lower bound lies
            clip_high=optional(float),  # [importance ratio; dppo: probability] how far up the upper bound lies
            clip_c=optional(float),  # [importance ratio] bound at negative advantages
            clip_m2=optional(float),  # [nats²] largest mean of squared log ratios, with clip m2po
            tau_pos=optional(float),  # [1 / importance ratio] steepness of clip sapo at positive advantages
            tau_neg=optional(float),  # [1 / importance ratio] and at negative ones
            z_old=optional(float),  # [mass] of the reference measure; 1 is a distribution
            sampler_correction=optional(float),  # [importance ratio] cap of trained over sampled probabilities
        ),
        reference=dict(
            mode="iterative",  # [name] what renews it: iterative (each rollout), every, kl_target, ema, fixed
            every=optional(int),  # [optimizer updates] between renewals, with mode every
            kl_target=optional(float),  # [nats a token] from the reference, above which mode kl_target renews it
            decay=optional(float),  # [share an optimizer update] of the old reference that mode ema keeps
        ),
        learner=dict(
            epochs=1,  # [passes] over a rollout
            minibatch_prompts=required(int),  # [groups] an optimizer update
            microbatch_rows=required(int),  # [rows] of one forward and backward pass
            scoring_rows=optional(int),  # [rows] of one forward pass for log-probs alone; unset: microbatch_rows
            logprob_chunk=256,  # [tokens of each row] whose logits exist at a time
            pack=False,  # [switch] several sequences in a row, in place of padding; in the warm start, too
            packed_lengths=1,  # [longest sequences] that such a row has room for; 2 and more leave less padding
        ),
        optimizer=dict(
            name="adamw",  # [name] adamw, schedule_free_adamw
            learning_rate=required(float),  # [parameter change an update] at its peak
            warmup_steps=required(int),  # [optimizer updates] until the peak
            decay=optional(str),  # [name] after the peak: constant (unset), linear or cosine to 0 at the end of the run
            beta1=0.9,  # [decay an update] of the mean of gradients
            beta2=0.999,  # [decay an update] of the mean of their squares
            epsilon=1e-8,  # [gradient] added to the root of that mean
            weight_decay=0.0,  # [share of a parameter] taken away an update, times the learning rate
            clip_norm=1.0,  # [gradient norm] over all parameters, to which a larger one is scaled down
            offload=False,  # [switch] keep the optimizer's state in the hosts' memory between updates
        ),
        evaluation=dict(
            every=required(int),  # [RL steps] between evaluations on the held-out problems
            k=required(int),  # [responses] to each problem
            temperature=1.0,  # [logits divided by it] 0: greedy
            function=optional(str),  # [name] of what gives accuracy, as reward.function; unset: the first reward
        ),
        checkpoint=dict(
            every=required(int),  # [RL steps] between checkpoints; each evaluation makes one, too
            keep_last=2,  # [checkpoints] that stay, beside the best one
            most_skipped=10,  # [optimizer updates] with non-finite gradients in a row, which end the run
        ),
        log=dict(
            tensorboard=True,  # [switch] write events under WORKDIR/tensorboard
            wandb=optional(str),  # [name] of a project of Weights & Biases; unset: none
        ),
    )
    return _with(defaults, settings)


def _with(defaults: dict, settings: dict, path="") -> ConfigDict:
    """`_filled`; ValueError names every key that an experiment must set and has not."""
    config, missing = _filled(defaults, settings, path)
    if missing:
        keys = "them" if missing[1:] else "it"
        raise InputError(f"configs/base.py has no default for {', '.join(missing)}: an experiment must set {keys}")
    return config


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
            config[key] = ((value,) if one else tuple(value)) if is_list else value
        try:
            config[key]
        except RequiredValueError:
            missing.append(f"{path}{key}")
    return config, missing
