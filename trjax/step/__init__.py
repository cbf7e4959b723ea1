"""From a plan to one compiled update.

It may use `models`, `data`, `config`, `cost`, `xla`, `mesh` and the leaves; `step.rules` alone also `audit`.
"""
