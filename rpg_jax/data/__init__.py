"""Problems and how they become batches: tasks, TFDS datasets, the tokenizer, one global order."""

from rpg_jax.data.datasets import Sets, load
from rpg_jax.data.pipeline import ProblemStream, prompt_rows, supervised_rows
from rpg_jax.data.preparation import prepare
from rpg_jax.data.problems import Problem
from rpg_jax.data.tasks import TASKS
from rpg_jax.data.tokenizer import Tokenizer, load_tokenizer
