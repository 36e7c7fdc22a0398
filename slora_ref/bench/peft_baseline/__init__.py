"""The baseline of `bench decode` and `bench serve`: the same model and adapters in transformers and PEFT themselves.

It runs in a process of its own, before the engine takes the device's memory: PyTorch and CuPy would not give each other
what they keep. process.py starts it and does without PyTorch; model.py and measure.py are the process's side.
(slora_ref.baselines is about something else: this project's own engine with one part swapped.)
"""
