"""S-LoRA (Sheng et al., MLSys 2024) in readable form: one base model, thousands of adapters, one page pool, one batch.

Start with allocator.py and pager.py (the pool, paper section 5.1), then scheduler.py and engine.py (the loop).
"""

__version__ = "0.1.0"
