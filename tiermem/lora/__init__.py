"""Low-rank adapters (LoRA) around the layers of a frozen model, in peft's arithmetic and files.

``config`` checks the options and refuses those not supported; ``targets`` chooses the modules;
``adapters`` adds adapters to them; ``files`` saves and loads. It works on plain and on
wrapped modules, through the interface of all modules; it needs neither the tiers nor peft.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021 (arXiv:2106.09685).
"""
