"""Runs a recipe of the tinker cookbook with a seed for its adapter. Recipes give no seed, so two runs would differ.

python seeded_recipe.py SEED MODULE OPTION=VALUE...
"""

from __future__ import annotations

import functools
import runpy
import sys

import tinker

if __name__ == "__main__":
    _, seed, module, *options = sys.argv
    made = tinker.ServiceClient.create_lora_training_client
    tinker.ServiceClient.create_lora_training_client = functools.partialmethod(made, seed=int(seed))  # type: ignore[method-assign]
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
