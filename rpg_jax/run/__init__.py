"""From a config to a run: `build` (the parts), `states` (fresh and restored), `warm_start`, `train`; around them `cli`
(the wrapper of commands), `job` (processes), `watchdog`, `profile` and `summary`.
"""
