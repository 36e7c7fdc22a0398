"""`slora-ref bench kernels`: the kernels against the memory's limit and the vendor's libraries.

cases.py and attention_cases.py need no GPU; run.py and what else it imports need CuPy.
"""
